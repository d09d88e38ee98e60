"""Names in other libraries with their equivalents in halfstep, one table for both packages."""

import difflib
import re
from collections.abc import Iterable

_ROUNDING = (
    "param_storage",
    'Weights of 16 bits are rounded stochastically by default: param_storage="stochastic". Leave it out.',
)
_COMPENSATED = ("param_storage", 'Use param_storage="compensated".')
_BLOCKS = ("nu_dtype", 'Use formats with blocks: nu_dtype=scaled("uroot8", 128, min_size=4096).')
_NOTHING = ("", "halfstep has nothing for it. Leave it out.")
# By the name without underscores: the argument that the hint describes, or "", and the hint.
_ARGUMENTS = {
    **dict.fromkeys(("stochasticrounding", "bf16stochasticround", "usestochasticrounding"), _ROUNDING),
    **dict.fromkeys(("kahansum", "kahan", "usekahan", "usekahansummation"), _COMPENSATED),
    **dict.fromkeys(("blocksize", "min8bitsize", "blockwise"), _BLOCKS),
    **dict.fromkeys(
        ("decouplelr", "percentileclipping", "ispaged", "triton", "usetriton", "adamwmode", "correctbias"),
        _NOTHING,
    ),
    "optimbits": ("recipe", 'Use recipe="eight_bit".'),
    "masterweightbits": ("param_storage", 'Use param_storage="split8" for 24 bits, or "split16" for 32.'),
    **dict.fromkeys(
        ("masterweights", "usemasterweights", "usefp32master"),
        ("param_storage", 'Use param_storage="master".'),
    ),
    "variancedtype": ("nu_dtype", "Did you mean nu_dtype?"),
    **dict.fromkeys(("momentumdtype", "expavgdtype"), ("mu_dtype", "Did you mean mu_dtype?")),
    "accumulatordtype": ("mu_dtype", "Did you mean mu_dtype?"),
    **dict.fromkeys(("b1", "b2", "beta1", "beta2"), ("betas", "Did you mean betas=(b1, b2)?")),
    **dict.fromkeys(("learningrate", "maxlr", "schedule"), ("lr", "Did you mean lr?")),
    **dict.fromkeys(("lr", "maxlearningrate"), ("learning_rate", "Did you mean learning_rate?")),
    **dict.fromkeys(("betas", "beta"), ("b1", "Did you mean b1=..., b2=...?")),
    **dict.fromkeys(("wd", "decay", "decayrate"), ("weight_decay", "Did you mean weight_decay?")),
}
# Low-precision optimizers in other libraries: the bits in their names, and the recipe.
_BITS = (("8bit", "eight_bit"), ("fp8", "eight_bit"), ("4bit", "four_bit"), ("fp4", "four_bit"), ("bf16", ""))
_ELSEWHERE = (
    "adadelta",
    "adagrad",
    "adamax",
    "asgd",
    "nadam",
    "radam",
    "rmsprop",
    "novograd",
    "lars",
    "yogi",
)
_OTHERS = {
    "halfstep_torch": "Use round_weights(...) around the optimizer of torch.optim.",
    "halfstep_jax": 'Use store_params(..., "stochastic") around the transform of Optax.',
}
_SAME = {"schedulefreeadamw": "adamwschedulefree", "adamwschedulefree": "schedulefreeadamw"}


def plain(name: str) -> str:
    """Return a name without case, underscores and hyphens."""
    return re.sub(r"[_-]", "", name).lower()


def advice_on_argument(name: str, takes: Iterable[str]) -> str:
    """Return a sentence with the right argument, or with all arguments.

    Example:
        >>> advice_on_argument("optim_bits", ["lr", "recipe"])
        'Use recipe="eight_bit".'
        >>> advice_on_argument("weight_deacy", ["lr", "weight_decay"])
        'Did you mean weight_decay?'
    """
    takes = list(takes)
    about, hint = _ARGUMENTS.get(plain(name), (None, ""))
    if about == "" or about in takes:
        return hint
    word = name.lower().replace("beta", "b") if about == "betas" else name.lower()
    meant = difflib.get_close_matches(word, takes, 1) if about in (None, "betas") else []
    return f"Did you mean {meant[0]}?" if meant else f"Its arguments are {', '.join(takes)}."


def advice_on_name(name: str, names: Iterable[str], package: str) -> str:
    """Return a sentence with the right optimizer or function, or "" if no name is similar.

    Args:
        name: the missing name.
        names: the names in the package.
        package: name of the package.

    Example:
        >>> names = ["AdamW", "Lion"]
        >>> advice_on_name("PagedAdamW8bit", names, "halfstep_torch")
        'Use AdamW(..., recipe="eight_bit").'
        >>> advice_on_name("adamw", names, "halfstep_torch")
        'Did you mean AdamW?'
    """
    by_name = {plain(other): other for other in names}
    word = re.sub(r"^(paged|fused|flash|deepspeedcpu)", "", plain(name))
    word = _SAME.get(word, word) if word not in by_name else word
    for bits, recipe in _BITS:
        base = word.replace(bits, "")
        if bits in word and base in by_name:
            beside = f', recipe="{recipe}"' if recipe else ""
            return f"Use {by_name[base]}(...{beside})."
    if word in _ELSEWHERE:
        return _OTHERS[package]
    near = [word] if word in by_name else difflib.get_close_matches(word, by_name, 1, 0.75)
    return f"Did you mean {by_name[near[0]]}?" if near else ""


def no_attribute(package: str, name: str, names: Iterable[str]) -> AttributeError:
    """Return the error for a name that a package lacks."""
    advice = "" if name.startswith("_") else advice_on_name(name, names, package)
    return AttributeError(f"module {package!r} has no attribute {name!r}. {advice}".removesuffix(". "))

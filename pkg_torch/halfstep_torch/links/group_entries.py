"""Checks of param-group entries that are not numbers of links."""

import difflib
import reprlib

import numpy as np

from halfstep.hyperparameters import Arguments
from halfstep_torch.leaves.group_names import Group
from halfstep_torch.links.chain import HEADER

# Arguments of torch's own optimizers that have no effect with these values.
ASKS_FOR_NOTHING = {
    "amsgrad": (False, None),
    "capturable": (False, True, None),
    "differentiable": (False, None),
    "foreach": (True, False, None),
    "fused": (True, False, None),
    "dampening": (0, None),
    "decoupled_weight_decay": (True, False, None),
    # Of transformers' Adafactor.
    "scale_parameter": (True, None),
    "relative_step": (True, None),
    "warmup_init": (False, None),
}
_FIXED_RATE = (
    " For a rate that is not relative use Optimizer with chain(scale_by_factored_rms(), "
    "clip_by_block_rms(1.0), scale_by_learning_rate(lr), round_stochastically())."
)
_WAYS = {"scale_parameter": _FIXED_RATE, "relative_step": _FIXED_RATE}
# Entries and arguments of the optimizers here and in JAX. Tags of other libraries are not included.
ELSEWHERE = frozenset(
    """
    accumulator_dtype adam_eps adam_lr adam_lr_ratio adam_mu_dtype adam_mu_rounding adam_weight_decay
    adjust_lr_fn alpha b1 b2 b3 beta2 beta2_decay betas bias_correction cautious compile d diff_dtype eps
    eps_root exact grad_dtype lead_dtype learning_rate lr matrices max_norm max_ratio maximize
    min_dim_size_to_factor min_norm min_ratio momentum mu_dtype mu_rounding names nesterov normalize
    ns_coefficients ns_dtype ns_steps nu_dtype nu_rounding output_axis param_storage recipe reduction_axis
    rounding seed slow_dtype slow_rounding state_device trust_coefficient trust_power tx use_muon warmup_steps
    weight_decay
    """.split()
)
# Names that resemble no entry, and the entry that is meant.
_MEANT = {"learning_rate": "lr", "schedule": "lr, which may be a function of the step", "b1": "betas"}
_MEANT |= {"b2": "betas", "accumulator_dtype": "mu_dtype", "adam_lr": "adam_lr_ratio"}


def check_torch_options(caller: str, given: Arguments) -> None:
    """Raise ValueError for an argument of torch's optimizers that is not supported."""
    for name, value in given.items():
        allowed = ASKS_FOR_NOTHING.get(name)
        if allowed is not None and value not in allowed:
            way = f"Use {name}={allowed[0]!r}.{_WAYS.get(name, '')}"
            raise ValueError(f"{caller}: {name}={value!r} is not supported. {way}")


def check_decay(caller: str, index: int, group: Group, decoupled: bool | None) -> None:
    """Raise ValueError for a group of torch's Adam in AdamW, or the other way round: decay differs."""
    saved_decay = group.get("decoupled_weight_decay")
    if None in (saved_decay, decoupled) or bool(saved_decay) == decoupled or not group.get("weight_decay"):
        return
    raise ValueError(
        f"{caller}: decoupled_weight_decay={saved_decay} in param group {index}, whose weight_decay is "
        f"{group['weight_decay']}; here decay is {'decoupled' if decoupled else 'added to the gradient'}. "
        f"Use {'AdamW' if saved_decay else 'Adam'}, or weight_decay=0."
    )


def check_maximize(caller: str, index: int, value: object) -> None:
    """Raise TypeError unless `maximize` is a bool: other values would count as true or false."""
    if not (isinstance(value, (bool, np.bool_)) or (type(value) is int and value in (0, 1))):
        raise TypeError(
            f"{caller}: maximize of param group {index} is {value!r}, not a bool. Use True or False."
        )


def check_entries(caller: str, group: Group, entries: set[str], arguments: set[str]) -> None:
    """Raise ValueError for an entry of a group without effect. A user's own tags are allowed."""
    check_torch_options(caller, {key: value for key, value in group.items() if key not in entries})
    for key in group:
        if key in entries or key in ASKS_FOR_NOTHING or key in ("params", "param_names", HEADER):
            continue
        problem = f"{caller}: {key}={reprlib.repr(group[key])} in a param group"
        if key == "recipe" and key in arguments:
            raise ValueError(
                f"{problem}; it is read when the group is added. Build an optimizer with it, and move the "
                "float32_state_dict there by load_float32_state_dict."
            )
        if key in arguments and _MEANT.get(key) not in entries:
            raise ValueError(
                f"{problem}; it is the same for all groups. "
                "Give it to the optimizer, or use an optimizer of its own for these parameters."
            )
        way = _MEANT.get(key, "")
        meant = _close_to(key, entries) or [way] * (way.partition(",")[0] in entries)
        if key in ELSEWHERE or meant:
            known = f"Did you mean {meant[0]}?" if meant else f"Its entries are {', '.join(sorted(entries))}."
            raise ValueError(f"{problem} is unknown. {known}")


def _close_to(key: object, entries: set[str]) -> list[str]:
    """Return the entry that a key misspells, if any. `max_momentum` of a scheduler is a name of its own."""
    if not isinstance(key, str) or any(f"_{entry}_" in f"_{key}_" for entry in entries):
        return []
    return difflib.get_close_matches(key.lower(), entries, 1, 0.8)

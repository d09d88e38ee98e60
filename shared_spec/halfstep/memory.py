"""Bytes for a model with a given size, by recipe and for other optimizers, before it is built."""

import math

from halfstep import recipes
from halfstep.did_you_mean import did_you_mean
from halfstep.hyperparameters import Arguments
from halfstep.storage.state_dtypes import as_format
from halfstep.text_table import Table, in_units

RECIPES = ("full_precision", "near_float32", "sixteen_bit", "one_pass", "eight_bit", "four_bit")
_ITEMSIZE = {"bfloat16": 2, "float16": 2, "uint16": 2, "float32": 4}
_BESIDE = {"stochastic": 0, "split8": 1, "split16": 2}
_WEIGHT = _GRADIENT = 2
# A matrix that is large enough for every scale.
_SHAPE = (4096, 4096)
OTHERS = {
    "AdamW, all in float32": (4, 4, 8),
    "AdamW, bfloat16 (loses updates)": (2, 2, 4),
    "torchao AdamW8bit": (2, 2, 2.0332),
    "bitsandbytes AdamW8bit (loses updates)": (2, 2, 2.0332),
}
"""Bytes per weight for weight, gradient and state with other optimizers (docs/comparison.md)."""


def bytes_per_weight(recipe: str) -> tuple[float, float, float]:
    """Return the bytes for weight, gradient and state, per weight of a large bfloat16 matrix with a recipe.

    Example:
        >>> bytes_per_weight("one_pass")
        (2, 2, 2.0)
    """
    if recipe not in RECIPES:
        meant = did_you_mean(recipe, RECIPES)
        raise ValueError(
            f"memory: recipe={recipe!r} is not a recipe. {meant}Use one of {', '.join(RECIPES)}."
        )
    options: Arguments = getattr(recipes, recipe)
    state = float(_BESIDE[options.get("param_storage", "stochastic")])
    for name in ("mu_dtype", "nu_dtype"):
        fmt = as_format("memory", name, options[name])
        codes = math.prod(fmt.code_shape(_SHAPE)) * _ITEMSIZE.get(fmt.code_dtype, 1)
        scales = math.prod(fmt.scale_shape(_SHAPE)) if fmt.scaled else 0
        state += (codes + scales) / math.prod(_SHAPE)
    return _WEIGHT, _GRADIENT, state


def count_of(text: str) -> int:
    """Return a number of weights from a text such as "8e9", "8B" or "125M".

    Example:
        >>> count_of("8e9"), count_of("1.5B"), count_of("125m")
        (8000000000, 1500000000, 125000000)
    """
    units = {"K": 1e3, "M": 1e6, "B": 1e9, "G": 1e9, "T": 1e12}
    word = text.strip().upper().replace("_", "").replace(",", "")
    unit = units.get(word[-1:], 1)
    try:
        count = float(word[:-1] if unit > 1 else word) * unit
    except ValueError:
        count = math.nan
    if not 1 <= count < math.inf:
        raise ValueError(f"memory: params={text!r} is not a number of weights. Use one such as 8e9 or 8B.")
    return round(count)


def memory_table(params: int, recipe: str = "") -> Table:
    """Return a table of bytes for weights, gradients and state, by recipe and with other optimizers.

    Args:
        params: number of weights.
        recipe: name of a recipe, or "" for all recipes.
    """
    ours = {f"halfstep {name}": bytes_per_weight(name) for name in ([recipe] if recipe else RECIPES)}
    whole = sum(OTHERS["AdamW, all in float32"]) * params
    rows = []
    for name, sizes in {**ours, **OTHERS}.items():
        total = sum(sizes) * params
        cells = [in_units(size * params) for size in sizes]
        rows.append((name, f"{sum(sizes):.2f}", *cells, in_units(total), f"{1 - total / whole:.0%}"))
    head = ("", "bytes", "weights", "gradients", "state", "in all", "saved")
    note = f"{params:,} weights, all in large matrices; bytes of each. Activations are not counted."
    return Table(head, rows, range(1, len(head)), [note])

"""Checks of a moment's format and rounding, and the meaning of "auto".

Contract: F1 to F3, F12, F18 to F20.
"""

import math
import warnings
from collections.abc import Iterable, Sequence
from typing import Literal, get_args

from halfstep.did_you_mean import did_you_mean, listed
from halfstep.hyperparameters import Scalar
from halfstep.rule import Moment
from halfstep.storage.formats import Format
from halfstep.storage.relative import LARGEST_BOUND, bound, rates_within
from halfstep.storage.state_dtypes import default_format, scaled

AMPLIFIED = scaled("float16", 128)
"""The default format of an amplified moment under bfloat16 weights: an eighth of bfloat16's error."""

INT8 = scaled("int8", "row", scale="fine")
"""Weights of 8 bits: a scale of three significant bits for every row (contract P8)."""

Rounding = Literal["stochastic", "feedback", "nearest", "auto", "nearest_unchecked"]
ROUNDINGS: tuple[str, ...] = get_args(Rounding)


def dtype_argument(moment: Moment) -> str:
    """Return the argument that asks for a moment's format."""
    return moment.dtype or f"{moment.name}_dtype"


def rounding_argument(moment: Moment) -> str:
    """Return the argument that asks for a moment's rounding."""
    return moment.rounding or f"{moment.name}_rounding"


MOST_FEEDBACK = 0.9901
"""Up to this rate, 0.95 in any precision, errors of codes are fed back without a warning: 19 in a step."""


def check_rounding(caller: str, moment: Moment, rounding: object) -> None:
    """Raise ValueError for an unknown rounding."""
    if rounding not in ROUNDINGS:
        raise ValueError(
            f"{caller}: {rounding_argument(moment)}={rounding!r} is not a rounding. "
            f"{did_you_mean(rounding, ROUNDINGS)}Use {listed(ROUNDINGS)}."
        )
    if rounding == "feedback" and moment.errors != "linear":
        raise ValueError(
            f'{caller}: {rounding_argument(moment)}="feedback" takes back the error of storing '
            f"{moment.name}, which needs an update that is linear in it. "
            'Use "stochastic".'
        )


def check_sign(caller: str, argument: str, fmt: Format, signed: bool) -> None:
    """Raise ValueError for a format without a sign, if the moment has one."""
    if signed and not fmt.signed:
        raise ValueError(
            f"{caller}: {argument}={fmt.dtype} has no sign. "
            f"Use it for nu, and a signed format for {argument.removesuffix('_dtype')}."
        )


def check_format(caller: str, moment: Moment, fmt: Format) -> None:
    """Raise ValueError for a format that cannot hold a moment."""
    argument = dtype_argument(moment)
    check_sign(caller, argument, fmt, moment.signed)
    if fmt.relative and not moment.unit:
        raise ValueError(
            f"{caller}: {argument}=relative(...) needs a second moment beside {moment.name}. "
            "Use it for mu of Adam or LAMB, and scaled(...) here."
        )
    if not moment.signed and not fmt.for_second_moments:
        raise ValueError(
            f"{caller}: {argument}={fmt.dtype} cannot hold a second moment: "
            "it rounds small ones to zero, or up by orders of magnitude, and steps are too long or short. "
            'Use "bfloat16", scaled("float16"), scaled("ufloat8_e5m3") or codebook("udynamic8").'
        )
    if not moment.signed and fmt.scaled and fmt.dtype == "float8_e4m3fn":
        warnings.warn(
            f"{caller}: {argument}={fmt.dtype} holds 18 binades of a block, and rounds smaller second "
            "moments up. If sizes of gradients in a block are lognormal with a sigma of 2, 28 % of all get "
            'over 4 times their value (ufloat8_e5m3: 0.5 %). Use scaled("ufloat8_e5m3") or scaled("uroot8"): '
            "they hold 32 and 43 binades in as many bytes.",
            stacklevel=3,
        )
    if moment.errors == "amplified":
        _check_amplified(caller, argument, fmt)
    if moment.copies_weights:
        check_codes(caller, argument, fmt)
    if moment.stored_first and fmt.has_inverse_root:
        raise ValueError(
            f"{caller}: {argument}={fmt.dtype} makes updates of moments before they are stored, and weights "
            "are rounded before the first moment here. "
            'Use the recipe eight_bit, or scaled("uroot8") with a mu_dtype of its own.'
        )
    if moment.of_any_size and (fmt.family == "fixed" or (fmt.dtype == "float16" and not fmt.scaled)):
        raise ValueError(
            f"{caller}: {argument}={fmt.text} holds numbers of a fixed range, and {moment.name} has the size "
            'of updates of weights. Use "float32", "bfloat16" or relative("int8", 128).'
        )


def check_codes(caller: str, argument: str, fmt: Format) -> None:
    """Raise ValueError for a format of weights that is not `INT8`, sizes of small arrays aside."""
    if fmt.label != INT8.label or not fmt.scaled:
        raise ValueError(
            f"{caller}: {argument}={fmt.text} is not a format that weights are kept in. "
            'Use scaled("int8", "row", scale="fine").'
        )


NO_END = 4
"""`room_for_errors` of formats that follow the largest number."""


def room_for_errors(fmt: Format) -> int:
    """Return the power of two that is the number of roots by which an error of one gap moves mu at most.

    Codes of 4 bits have room for half a root, those with an end that does not move for 4 (contract A21).
    """
    if fmt.packed:
        return -1
    return 2 if fmt.family == "fixed" else NO_END


def check_weight_dtype(caller: str, moment: Moment, leaf: str, dtype: str) -> None:
    """Raise ValueError for model weights of 16 bits, if the moment holds them in codes."""
    if moment.copies_weights and dtype in ("bfloat16", "float16"):
        of_leaf = f"the weight '{leaf}' is {dtype}" if leaf else f"weights are {dtype}"
        raise ValueError(
            f'{caller}: {of_leaf}, and param_storage="int8" keeps the numbers of float32 weights, which 16 '
            "bits do not hold. Pass float32 weights, and cast them in the forward pass."
        )


def _check_amplified(caller: str, argument: str, fmt: Format) -> None:
    """Warn of a coarse format for a moment if an update magnifies its errors."""
    is_fine = fmt.family == "fine" and isinstance(fmt.block_size, int) and fmt.block_size <= 64
    if fmt.codes.half_gap > 2.0**-8 and not is_fine:
        warnings.warn(
            f"{caller}: {argument}={fmt.text} is too coarse for the factor of a matrix, which magnifies "
            "errors of storing 485 times. On digits a run ends further from float32 (0.55 to 0.68) than with "
            'another order of the batches (0.27). Use scaled("float16", 128), or of 8 bits '
            'scaled("int8", 32, scale="fine") (0.39).',
            stacklevel=3,
        )


def default_of(moment: Moment, dtype: str) -> Format:
    """Return the format of a moment where none is asked for, by the dtype of the weights (F1, F20)."""
    return AMPLIFIED if moment.errors == "amplified" and dtype == "bfloat16" else default_format(dtype)


def check_freezing(
    caller: str, moment: Moment, fmt: Format, rounding: str, rate: Scalar | None, rate_name: str = ""
) -> None:
    """Raise ValueError where rounding to nearest would freeze an average.

    `rate` is None if it is not known; `rate_name` is its name for the user, if not the field.
    """
    if rounding == "nearest" and rate is not None and fmt.freezes(rate):
        dtype, name, rate_name = dtype_argument(moment), rounding_argument(moment), rate_name or moment.rate
        raise ValueError(
            f'{caller}: {dtype}={fmt.dtype} with {name}="nearest" freezes '
            f"at {rate_name}={float(rate):.7g} (1-{rate_name} < {fmt.half_gap}). "
            f'Use {name}="stochastic", or {dtype}="float32".'
        )


def check_unit(
    caller: str, moment: Moment, unit: Moment, rates: tuple[Scalar, Scalar], names: tuple[str, str]
) -> None:
    """Raise ValueError if a moment in units of another, without scales, is beyond its codes."""
    b1, b2 = map(float, rates)
    largest = bound(b1, b2)
    if largest > LARGEST_BOUND:
        dtype, ends, way = dtype_argument(moment), rates_within(b2), "Use"
        if b1 > b2:
            way = f"Are {names[0]} and {names[1]} swapped? Otherwise use"
        elif ends:
            first, last = ends
            way = f"At this {names[1]} use {names[0]} from {first} to {last}, constant or in a schedule, or"
        raise ValueError(
            f"{caller}: {dtype} has no scale and holds up to {LARGEST_BOUND}, and {moment.name} reaches "
            f"{largest:.3g} roots of {unit.name} at {names[0]}={b1:.7g} and {names[1]}={b2:.7g}. "
            f'{way} {dtype}=relative("int8", 128) with {dtype_argument(unit)}=scaled("uroot8"), or the '
            "recipe four_bit or sixteen_bit: these take any rates."
        )


def check_saturation(
    caller: str, moment: Moment, fmt: Format, others: Iterable[tuple[Moment, Format | None]]
) -> None:
    """Raise ValueError for a second moment that saturates, where no first moment does so with it.

    After a spike past its largest number steps would be thousands of learning rates long.

    Args:
        caller: the rule of the moments.
        moment: perhaps one that saturates.
        fmt: its format.
        others: the moments of the rule, and their formats.
    """
    bounded = (x and x.family == "fixed" for other, x in others if other.unit == moment.name)
    if fmt.has_inverse_root and not any(bounded):
        raise ValueError(
            f"{caller}: {dtype_argument(moment)}={fmt.dtype} stops at its largest number, and no first "
            "moment in its units stops with it: after a spike steps would be thousands of lr long. "
            'Use mu_dtype=relative("mulaw8") of adam or lamb, or scaled("ufloat8_e5m3") here.'
        )


def check_power_unit(caller: str, moment: Moment, fmt: Format, unit: Moment, unit_fmt: Format | None) -> None:
    """Raise ValueError for a moment in units of a power of two where no format gives this unit.

    Args:
        caller: the rule of the moments.
        moment: in these units, perhaps.
        fmt: its format.
        unit: the second moment.
        unit_fmt: its format; None: as the dtype of the weights has it.
    """
    if fmt.power_unit and not (unit_fmt and unit_fmt.has_inverse_root):
        dtype, found = dtype_argument(unit), "None" if unit_fmt is None else unit_fmt.text
        raise ValueError(
            f'{caller}: {dtype_argument(moment)}=relative("{fmt.dtype}") is in units of a power of two that '
            f'{dtype}="uroot4_e4m4" gives, and {dtype} is {found}. '
            f'Use {dtype}="uroot4_e4m4", or relative("float8_e3m4").'
        )


def check_feedback(caller: str, moment: Moment, rounding: str, unit: Moment, unit_fmt: Format | None) -> None:
    """Raise ValueError for error feedback beside a second moment that the update reads unrounded.

    Args:
        caller: the rule of the moments.
        moment: the first.
        rounding: its rounding.
        unit: the second moment.
        unit_fmt: its format; None: as the dtype of the weights has it.
    """
    if rounding == "feedback" and unit_fmt is not None and unit_fmt.has_inverse_root:
        raise ValueError(
            f'{caller}: {rounding_argument(moment)}="feedback" is of no effect beside {dtype_argument(unit)}='
            f'{unit_fmt.dtype}, where updates are made of moments before they are stored. Use "stochastic".'
        )


def kept_wide(caller: str, moment: Moment, fmt: Format, shapes: Sequence[tuple[int, ...]]) -> str:
    """Return that arrays of few axes stay float32, as flat shards do; "" below 5 % of all elements.

    Args:
        caller: the rule of the moment.
        moment: of weights of such
        shapes: all that are stepped.
        fmt: its format.
    """
    few = [
        math.prod(shape)
        for shape in shapes
        if fmt.scaled and len(shape) < fmt.min_ndim and math.prod(shape) >= max(fmt.min_size, 1)
    ]
    if not few or sum(few) <= 0.05 * sum(map(math.prod, shapes)):
        return ""
    name = dtype_argument(moment)
    return (
        f"{caller}: {moment.name} of arrays with fewer axes than min_ndim={fmt.min_ndim} stays float32, as "
        f"of one with {max(few)} elements, such as a flat shard. For {name}={fmt.text} of these pass {name}="
        f'{"relative" if fmt.relative else "scaled"}("{fmt.dtype}", {fmt.block_size!r}, min_ndim=1).'
    )


def check_slow_feedback(
    caller: str, moment: Moment, fmt: Format, rounding: str, rate: Scalar | None, rate_name: str = ""
) -> None:
    """Warn of error feedback of 8 or 4 bits at a slow rate: it is as long as the step.

    `rate` and `rate_name` are as in `check_freezing`.
    """
    in_codes = fmt.rounds and fmt.dtype not in ("bfloat16", "float16")
    if rounding != "feedback" or not in_codes or rate is None or float(rate) <= MOST_FEEDBACK:
        return
    name, rate_name, b = rounding_argument(moment), rate_name or moment.rate, float(rate)
    warnings.warn(
        f'{caller}: {rate_name}={b:.7g} with {name}="feedback" and {dtype_argument(moment)}={fmt.text} takes '
        f"back {b / (1 - b):.3g} errors of storing {moment.name} in a step, and weights jitter by them. "
        f'Use {name}="stochastic", or a {rate_name} of at most 0.99.',
        stacklevel=3,
    )


def is_stochastic(moment: Moment, fmt: Format, rounding: str, rate: Scalar | None) -> bool:
    """Whether a moment is rounded stochastically: with "auto" where nearest would fall short."""
    if not fmt.rounds:
        return False
    if rounding == "auto" and moment.errors == "amplified":
        return rate is None or fmt.freezes(rate)
    if rounding == "auto":
        return bool(moment.rate) and (rate is None or fmt.falls_short(rate))
    return rounding in ("stochastic", "feedback")


def feeds_back(fmt: Format, rounding: str) -> bool:
    """Whether a step feeds the error of storing a moment back: in float32 there is none."""
    return rounding == "feedback" and fmt.rounds


def check_stored_state(caller: str, fmt: Format, rounding: object, select: object) -> None:
    """Refuse formats of `store_state` that cannot store unknown state."""
    if fmt.relative:
        raise ValueError(
            f"{caller}: format=relative(...) is in units of the root of a second moment, "
            "which is not known here. Use scaled(...), or mu_dtype=relative(...) of adam."
        )
    if rounding not in ("stochastic", "nearest_unchecked"):
        raise ValueError(
            f"{caller}: rounding={rounding!r} is not a rounding of state whose decay rate is not known. "
            'Use "stochastic" or "nearest_unchecked".'
        )
    if select is not None and not callable(select):
        raise TypeError(f"{caller}: select={select!r} is not a function. Use lambda name, array: ...")

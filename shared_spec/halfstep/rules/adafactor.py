"""Adafactor (contract A18, A19): a factored second moment, and steps relative to root mean squares."""

import functools
from collections.abc import Callable

from halfstep.hyperparameters import Scalar, check_bound
from halfstep.numbers import Number
from halfstep.op import NumbersOp
from halfstep.rule import Rule, moment, number, option
from halfstep.seeds import Seed
from halfstep.storage.formats import DType
from halfstep.storage.moment_formats import Rounding

Shape = tuple[int, ...]


def check_power(caller: str, name: str, value: Scalar, number: float) -> None:
    """Raise an error for a power outside [0, 1]."""
    if not 0 <= number <= 1:
        raise ValueError(
            f"{caller}: {name}={value} is outside [0, 1], so that 1 - t^-{name} is no rate of an average. "
            "Use a power such as 0.8."
        )


def check_threshold(caller: str, name: str, value: Scalar, number: float) -> None:
    """Raise an error unless the threshold is positive. It may be infinite, then nothing is clipped."""
    check_bound(caller, name, value, number, hint="Use a number such as 1.0, or leave the link out.")
    if number == 0:
        raise ValueError(
            f"{caller}: {name}={value} would make every update 0. Use a number such as 1.0, or leave the "
            "link out."
        )


class ScaleByFactoredRms(Rule):
    """Rescale updates by the root of a factored second moment: a matrix keeps one row and one column of it.

    With t the step count less `step_offset`, w = t^-decay_rate, and the two longest axes of an array:

        s = (g g) + epsilon
        row <- ((1 - w) row) + (w mean(s, longest));  col <- ((1 - w) col) + (w mean(s, second))
        root = sqrt(row / max(mean(row, second), floor)) sqrt(col)
        u = g / max(root, floor)

    If the second longest axis is shorter than `min_dim_size_to_factor`, or if `factored` is False, the array
    keeps the whole average:

        nu <- round(((1 - w) nu) + (w s));  root = sqrt(nu)

    In float32, each operation rounded once. Means are sums by halves (contract M3), so that the bits are the
    same in both packages, compiled, and on a mesh under `jax.jit`. Rows and columns are always float32.
    `nu_dtype` and `nu_rounding` are for `nu`, as in `scale_by_adam`. Rounding to nearest raises an error,
    because w falls without end and an average in 16 bits would freeze. The arrays of the form that is not in
    use have one element.

    Optax has no `floor`; torch has no `epsilon` and adds nothing, but has a floor, `eps[0]`. Optax's
    `decay_rate_fn` is left out: write a rule for another decay rate.

    In torch, the group entries are `decay_rate`, `epsilon`, `floor` and `nu_dtype`. The state has `row_var`,
    `col_var` and `variance`. Every process gathers a sharded parameter whole, and the bits are the same as in
    one process. Inside `jax.shard_map` a shard raises an error. Step under `jax.jit` instead.

    Raises the same errors as `scale_by_adam`, and ValueError for a power outside [0, 1].

    Example:
        >>> ScaleByFactoredRms(min_dim_size_to_factor=32).name
        'scale_by_factored_rms'

    Source: N. Shazeer, M. Stern, "Adafactor: adaptive learning rates with sublinear memory cost", ICML 2018,
        algorithms 4 and 5. The arguments are as in Optax. Storage and the order of sums are ours (contract
        A18).
    """

    scope = "parameter"

    factored: bool = True
    decay_rate: Scalar = number(0.8, check=check_power)
    step_offset: int = option(0)
    min_dim_size_to_factor: int = 128
    epsilon: Scalar = number(1e-30)
    floor: Scalar = number(0.0)
    nu_dtype: DType = None
    nu_rounding: Rounding = "stochastic"
    seed: Seed = 0
    nu = moment(signed=False, shape="whole_shape", torch="variance")
    nu_row = moment(signed=False, shape="row_shape", torch="row_var", always="float32")
    nu_col = moment(signed=False, shape="col_shape", torch="col_var", always="float32")

    def __post_init__(self) -> None:
        for name in ("step_offset", "min_dim_size_to_factor"):
            value = getattr(self, name)
            if value is not None and (not isinstance(value, int) or isinstance(value, bool) or value < 0):
                raise ValueError(f"{self.name}: {name}={value!r} is no integer from 0 up. Use 0 or more.")
        if self.nu_rounding in ("nearest", "auto"):
            raise ValueError(
                f'{self.name}: nu_rounding="{self.nu_rounding}" freezes nu, whose decay rate goes to 1 with '
                'the count of steps. Use "stochastic".'
            )

    def numbers(self, h, t, op):
        """Return the share of the new values in an average, and the share of the old average."""
        share = inverse_power(op.maximum(op.float32(t - self.step_offset), 1.0), h.decay_rate, op)
        return {"share": share, "kept": 1.0 - share}

    def update(self, g, p, n, m, op):
        """Return the update over the root of the second moment, factored or not."""
        square, axes = g * g + n.epsilon, factored_axes(g.shape, self.factored, self.min_dim_size_to_factor)
        if axes is None:
            root = op.sqrt(m.nu.round(n.kept * m.nu.value + n.share * square))
            idle = (m.nu_row, m.nu_col)
        else:
            longest, second = axes
            row = m.nu_row.round(n.kept * m.nu_row.value + n.share * op.mean(square, longest))
            col = m.nu_col.round(n.kept * m.nu_col.value + n.share * op.mean(square, second))
            root = op.sqrt(row / op.maximum(op.mean(row, second), n.floor)) * op.sqrt(col)
            idle = (m.nu,)
        for kept in idle:
            kept.round(kept.value)
        return g / op.maximum(root, n.floor)

    @property
    def whole_shape(self) -> Callable[[Shape], Shape]:
        """Function from a weight's shape to the shape of `nu`."""
        return _shape_of(None, self.factored, self.min_dim_size_to_factor)

    @property
    def row_shape(self) -> Callable[[Shape], Shape]:
        """Function from a weight's shape to the shape of `nu_row`, in which the longest axis has size 1."""
        return _shape_of(0, self.factored, self.min_dim_size_to_factor)

    @property
    def col_shape(self) -> Callable[[Shape], Shape]:
        """Function from a weight's shape to the shape of `nu_col`, with size 1 on the second longest axis."""
        return _shape_of(1, self.factored, self.min_dim_size_to_factor)


class ClipByBlockRms(Rule):
    """Clip every update by its root mean square: u / max(1, rms(u) / threshold).

    rms(u) = sqrt(mean(u u)), a sum by halves (contract M3), so that the bits are the same everywhere. The
    root mean square is multiplied by 1 / threshold, and the update by the inverse of the maximum. Each
    product is rounded once.

    In torch the group entry is `threshold`. If a parameter is sharded, one process gathers the whole update.

    Raises the same errors as `scale_by_learning_rate`, and ValueError unless the threshold is positive.

    Example:
        >>> ClipByBlockRms(1.0).name
        'clip_by_block_rms'

    Source: N. Shazeer, M. Stern, "Adafactor", ICML 2018, section 6; the name is Optax's (contract A19).
    """

    scope = "parameter"
    needs = "update"

    threshold: Scalar = number(check=check_threshold)

    def numbers(self, h, t, op):
        """Return the inverse of the threshold."""
        return {"inverse": 1.0 / h.threshold}

    def update(self, g, p, n, m, op):
        """Return the clipped update."""
        return op.scaled(g, 1.0 / op.maximum(op.sqrt(op.mean(g * g)) * n.inverse, 1.0))


class ScaleByParamBlockRms(Rule):
    """Multiply every update by the root mean square of its weight: max(rms(p), min_scale) u.

    A learning rate is then relative to the size of the weight. rms(p) is computed from the weight as the link
    reads it. Its mean is a sum by halves (contract M3), so the bits are the same everywhere.

    In torch the group entry is `min_scale`. Every process gathers a sharded parameter whole.

    Raises the same errors as `scale_by_learning_rate`.

    Example:
        >>> ScaleByParamBlockRms().name
        'scale_by_param_block_rms'

    Source: N. Shazeer, M. Stern, "Adafactor", ICML 2018, section 8; the name is Optax's (contract A19).
    """

    scope = "parameter"
    reads_params = "the link measures the params"

    min_scale: Scalar = number(1e-3)

    def update(self, g, p, n, m, op):
        """Return the scaled update."""
        return op.scaled(g, op.maximum(op.sqrt(op.mean(p * p)), n.min_scale))


def inverse_power(t: Number, c: Number, op: NumbersOp) -> Number:
    """Return t^-c for float32 t >= 1 and c in [0, 1], with the same bits everywhere (contract M4).

    It is computed from roots alone. Every bit 2^-k that is set in c, for k from 0 to 24, contributes a
    factor, the correctly rounded root t^(2^-k).
    """
    root, power = t, 1.0
    for k in range(25):
        bit = c >= 2.0**-k
        power = op.where(bit, power * root, power)
        c = op.where(bit, c - 2.0**-k, c)
        root = op.sqrt(root)
    # The power is never below 1. The maximum keeps a compiler from turning 1 / sqrt into another function.
    return 1.0 / op.maximum(power, 1.0)


def factored_axes(shape: Shape, factored: bool, min_dim_size_to_factor: int) -> tuple[int, int] | None:
    """Return the longest and the second longest axis, or None if the array is kept whole.

    If axes have equal sizes, the later axis counts as longer.

    Example:
        >>> factored_axes((3, 3, 256, 512), True, 128)
        (3, 2)
    """
    if not factored or len(shape) < 2:
        return None
    *_, second, longest = sorted(range(len(shape)), key=lambda axis: shape[axis])
    return (longest, second) if shape[second] >= max(min_dim_size_to_factor, 1) else None


@functools.cache
def _shape_of(reduced: int | None, factored: bool, min_dim_size_to_factor: int) -> Callable[[Shape], Shape]:
    """Return the shape function of a moment.

    `reduced` is the index in `factored_axes` of the axis along which the moment is a mean, or None for `nu`.
    """

    def shape_of(shape: Shape) -> Shape:
        axes = factored_axes(shape, factored, min_dim_size_to_factor)
        if (axes is None) != (reduced is None):
            return (1,)
        if axes is None or reduced is None:
            return shape
        return tuple(1 if axis == axes[reduced] else size for axis, size in enumerate(shape))

    return shape_of

"""Muon (contract A13, A14, A22): momentum, the matrices of an array, and the scale of their factor."""

import dataclasses
import functools
import math
import operator
from collections.abc import Callable, Iterable, Sequence
from dataclasses import KW_ONLY
from typing import ClassVar, NamedTuple, TypeVar

import numpy as np

from halfstep.arrays import Array
from halfstep.hyperparameters import Scalar
from halfstep.numbers import Number
from halfstep.op import Op
from halfstep.rule import Rule, decay_rate, moment
from halfstep.seeds import Seed
from halfstep.storage.formats import DType
from halfstep.storage.moment_formats import Rounding

Axes = int | tuple[int, ...] | None
"""One axis, several axes, or None for an array with two axes."""
NS_COEFFS = (3.4445, -4.7750, 2.0315)
"""Jordan's coefficients. A step maps a small singular value x to about 3.4 x, later steps to 0.7 to 1.2."""
_POLAR_EXPRESS = (
    (8.28721201814563, -23.595886519098837, 17.300387312530933),
    (4.107059111542203, -2.9478499167379106, 0.5448431082926601),
    (3.9486908534822946, -2.908902115962949, 0.5518191394370137),
    (3.3184196573706015, -2.488488024314874, 0.51004894012372),
    (2.300652019954817, -1.6689039845747493, 0.4188073119525673),
    (1.891301407787398, -1.2679958271945868, 0.37680408948524835),
    (1.8750014808534479, -1.2500016453999487, 0.3750001645474248),
)
_SAFE = tuple((a / 1.01, b / 1.01**3, c / 1.01**5) for a, b, c in _POLAR_EXPRESS)
NAMED_COEFFS: dict[str, Callable[[int], tuple]] = {
    "jordan": lambda steps: (NS_COEFFS,) * steps,
    "deepseek_v4": lambda steps: ((NS_COEFFS,) * (steps - 2) + ((2.0, -1.5, 0.5),) * 2)[-steps:],
    "polar_express": lambda steps: (*_SAFE, *((1.875, -1.25, 0.375),) * MOST_STEPS)[:steps],
}
"""Functions from the number of steps to a row of coefficients per step, by name.

Sources: K. Jordan et al., "Muon", 2024. DeepSeek-V4 as in MaxText, where the last two steps lead to values of
1. N. Amsel et al., "The Polar Express", arXiv:2505.16932, algorithm 1, with its safety factor of 1.01.
"""
NS_DTYPES = ("float32", "bfloat16")
SCALES = ("original", "consistent_rms", None)
NORMALIZED = ("rows", None)
MOST_STEPS = 20
_SMALLEST_NORMAL = 2.0**-126
_MOMENTUM = moment(rate="beta", torch="momentum_buffer", errors="amplified")
Factor = TypeVar("Factor", bound="Orthogonalize")


class MuonMomentum(Rule):
    """The momentum of `scale_by_muon`: an average, one step ahead with `nesterov`."""

    name = "scale_by_muon"

    beta: Scalar = decay_rate(0.95, torch="momentum")
    mu_dtype: DType = None
    nesterov: bool = True
    bias_correction: bool = False
    mu_rounding: Rounding = "auto"
    seed: Seed = 0
    mu = _MOMENTUM

    def numbers(self, h, t, op):
        """Return the inverse bias corrections in Optax's form. Torch's form has none."""
        if not self.bias_correction:
            return {}
        r1, r1_next = op.unbias((h.beta, t), (h.beta, t + 1))
        return {"r1": r1, "r1_next": r1_next}

    def update(self, g, p, n, m, op):
        """Return (beta mu) + ((1 - beta) g) from the stored average, or without `nesterov` the average."""
        mu = m.mu.round(op.ema(m.mu.value, g, n.beta))
        if not self.nesterov:
            return mu * n.r1 if self.bias_correction else mu
        if self.bias_correction:
            mu, g = mu * n.r1_next, g * n.r1
        return op.ema(mu, g, n.beta)


class OfMatrices(Rule):
    """Base class for rules that treat an array as a stack of matrices."""

    scope = "parameter"

    reduction_axis: Axes
    output_axis: Axes

    @property
    def trial_shape(self) -> tuple[int, ...]:
        """A shape with the declared axes."""
        axes = [*axes_of(self.reduction_axis), *axes_of(self.output_axis)]
        return (2,) * max(2, *(max(axis + 1, -axis) for axis in axes))

    def axes_read(self, ndim: int) -> Iterable[int]:
        """Return the axes that span matrices. The other axes count matrices."""
        if self.reduction_axis is None:
            return range(ndim)
        return [axis % ndim for axis in (*axes_of(self.reduction_axis), *axes_of(self.output_axis))]


class Orthogonalize(OfMatrices):
    """Replace every matrix by its factor, times a number computed from its shape.

    A framework implements `factor` and sets `usual_output_axis`, the output axis of its layers.
    """

    usual_output_axis: ClassVar[int]

    name = "scale_by_muon"
    needs = "update"

    ns_coeffs: tuple = NS_COEFFS
    ns_steps: int = 5
    eps: float = 1e-7
    ns_dtype: str = "float32"
    scale: str | None = "original"

    def factor(self, x: Array, matrices: "Matrices") -> Array:
        """Return the Newton-Schulz factor of every matrix, in the shape of the array."""
        raise NotImplementedError

    def update(self, g, p, n, m, op):
        """Return the factor of g times the scale, one product, rounded once (contract A14)."""
        matrices = matrices_of(self.name, g.shape, self.reduction_axis, self.output_axis)
        return op.apply(lambda x: self.factor(x, matrices), g) * float(shape_scale(self.scale, matrices))


class NormalizeRows(OfMatrices):
    """Bring the rows of a factor, one per output, to the same mean length.

    A row is divided by the root of an average of its mean square. Then the matrix is scaled back to its norm.
    """

    name = "normalize_rows"

    scale: str | None = "original"
    beta2: Scalar = decay_rate(0.95)
    eps: float = 1e-10
    nu_row = moment(
        signed=False, rate="beta2", shape="row_shape", torch="second_momentum_buffer", always="float32"
    )

    def update(self, g, p, n, m, op):
        """Return every row times its own number (contract A22)."""
        matrices = matrices_of(self.name, g.shape, self.reduction_axis, self.output_axis)
        square = _mean(g * g, matrices.inputs, op)
        inverse = 1.0 / (op.sqrt(m.nu_row.round(op.ema(m.nu_row.value, square, n.beta2))) + self.eps)
        before, after = (_mean(x, matrices.outputs, op) for x in (square, (square * inverse) * inverse))
        back = op.sqrt(before / op.maximum(after, _SMALLEST_NORMAL))
        return g * ((back * inverse) * float(shape_scale(self.scale, matrices)))

    @property
    def row_shape(self) -> Callable[[tuple[int, ...]], tuple[int, ...]]:
        """Function from a weight's shape to the shape of `nu_row`, in which input axes have size 1."""
        inputs, outputs = (
            axis if axis is None else axes_of(axis) for axis in (self.reduction_axis, self.output_axis)
        )
        return _row_shape(inputs, outputs)


class ScaleByMuon(Rule):
    """Replace the update of every matrix by the orthogonal factor of its momentum.

    With m the stored average, h one step ahead of it, and s a number computed from the shape:

        m <- store((beta m) + ((1 - beta) g))
        h = (beta m) + ((1 - beta) g)
        u = s NewtonSchulz(h)

    The factor takes five Newton-Schulz steps in float32, with sums in the framework's own order, so that
    backends differ within a bound (contract A14). All other operations have the same bits everywhere. A zero
    matrix gives exactly 0. A gradient or momentum with an infinity or a NaN raises an error that names the
    weight, and no weight changes. Under `jax.jit` the whole matrix becomes NaN instead.

    In JAX updates are float32. The state has the momentum's state, and the state for `normalize` or an empty
    state. In torch, entries of param groups are `momentum`, `mu_dtype`, and with `normalize` `beta2`. The
    state has `momentum_buffer`, for formats with scales `momentum_buffer_scale`, and with `normalize`
    `second_momentum_buffer`.

    Args:
        ns_coeffs: three numbers for all steps, or three numbers per step, or a name. "jordan" is the default.
            "deepseek_v4", with ns_steps=10, brings singular values to 1. "polar_express" begins with steeper
            steps.
        ns_steps: number of Newton-Schulz steps, 1 to 20.
        beta: decay rate of the average.
        eps: lower bound on the norm by which a matrix is divided.
        mu_dtype: format of the momentum. None is `scaled("float16", 128)` for bfloat16 weights, else float32.
            The factor magnifies storage errors 485 times. For 8 bits use `scaled("int8", 32, scale="fine")`.
            Other 8-bit formats cause a warning.
        nesterov: whether h is one step ahead, in the form of torch and Jordan. Otherwise h = m.
        bias_correction: whether to use Optax's form, in which g is divided by 1 - beta^t, and m by
            1 - beta^(t + 1), or by 1 - beta^t without `nesterov`.
        output_axis: the layer's output axis, or axes. None is 0 in torch and 1 in JAX, where a kernel has the
            shape (inputs, outputs).
        reduction_axis: the layer's input axes. For an array with two axes, None is the other axis. The
            remaining axes count matrices: a stack of layers (layers, in, out) has reduction_axis=1,
            output_axis=2.
        scale: s, which is sqrt(max(1, outputs / inputs)) for "original", 0.2 sqrt(max(inputs, outputs)) for
            "consistent_rms", with which AdamW's learning rate and decay can be used, and 1 for None.
        normalize: "rows" (NorMuon) divides each output's row in the factor by the root of an average of its
            mean square, one float32 per output. Then the matrix is scaled back to its norm (contract A22).
        beta2: decay rate for `normalize`.
        ns_dtype: "float32", or "bfloat16" for the products, which is faster on accelerators, but further from
            float32 (distance 0.046 on digits) than 16-bit momentum (0.014).
        mu_rounding: as in `scale_by_adam`. "auto" is nearest, unless that freezes.
        seed: seed for the random words.

    Raises:
        TypeError: if an argument is not a number.
        ValueError: if a number is out of range. From `init` or the optimizer, if a weight is not a matrix or
            is empty.

    Example:
        >>> import halfstep_jax, halfstep_torch as hs, optax
        >>> tx = optax.chain(halfstep_jax.scale_by_muon(), halfstep_jax.scale_by_learning_rate(0.02))
        >>> tx = hs.chain(hs.scale_by_muon(), hs.scale_by_learning_rate(0.02))

    Source: K. Jordan et al., "Muon: an optimizer for hidden layers in neural networks", 2024;
        `consistent_rms`, J. Liu et al., "Muon is scalable for LLM training", arXiv:2502.16982; `normalize`,
        Z. Li et al., "NorMuon", arXiv:2510.05491. Storage is ours (contract A13, A14, A22, F20).
    """

    ns_coeffs: str | Sequence = NS_COEFFS
    ns_steps: int = 5
    beta: Scalar = decay_rate(0.95, torch="momentum")
    eps: float = 1e-7
    mu_dtype: DType = None
    _: KW_ONLY
    nesterov: bool = True
    bias_correction: bool = False
    output_axis: Axes = None
    reduction_axis: Axes = None
    scale: str | None = "original"
    normalize: str | None = None
    beta2: Scalar = 0.95
    ns_dtype: str = "float32"
    mu_rounding: Rounding = "auto"
    seed: Seed = 0
    mu = _MOMENTUM

    @property
    def momentum(self) -> MuonMomentum:
        """The rule of the momentum."""
        fields = dataclasses.fields(MuonMomentum)  # pyright: ignore[reportArgumentType]
        return MuonMomentum(**{field.name: getattr(self, field.name) for field in fields})

    def of_factor(self, caller: str, orthogonalize: type[Factor]) -> tuple[Factor, NormalizeRows | None]:
        """Return the rules for the factor and for its normalized rows. The last rule applies the scale.

        Raises:
            TypeError: if an option is not a number.
            ValueError: if an option is invalid.
        """
        if self.normalize not in NORMALIZED:
            raise ValueError(
                f'{caller}: normalize={self.normalize!r} is none of ours. Use "rows", or None for none.'
            )
        options = (self.ns_steps, self.eps, self.ns_dtype, self.scale)
        ns_coeffs = check_factor(caller, self.ns_coeffs, *options)
        axis = orthogonalize.usual_output_axis if self.output_axis is None else self.output_axis
        axes = MatrixAxes(self.reduction_axis, axis)
        factor = orthogonalize(*axes, ns_coeffs, *options)
        if self.normalize is None:
            return factor, None
        return dataclasses.replace(factor, scale=None), NormalizeRows(*axes, self.scale, self.beta2)


class MatrixAxes(NamedTuple):
    """The axes that span an array's matrices. All other axes count matrices, as the layers in a stack.

    Attributes:
        reduction_axis: the input axis, or axes, over which the layer sums.
        output_axis: the output axis, or axes.

    Example:
        >>> MatrixAxes(reduction_axis=(0, 1, 2), output_axis=3)  # a convolution's kernel in Flax
        MatrixAxes(reduction_axis=(0, 1, 2), output_axis=3)
    """

    reduction_axis: Axes
    output_axis: Axes


class Matrices(NamedTuple):
    """An array as a stack of matrices.

    Attributes:
        inputs: the axes over which the layer sums, from 0 up.
        outputs: the output axes.
        order: all axes: first the axes that count matrices, then `inputs`, then `outputs`.
        back: the order that undoes `order`.
        moved: the shape in the order `order`.
        stack: the numbers of matrices, inputs and outputs.
    """

    inputs: tuple[int, ...]
    outputs: tuple[int, ...]
    order: tuple[int, ...]
    back: tuple[int, ...]
    moved: tuple[int, ...]
    stack: tuple[int, int, int]


def axes_of(axis: Axes) -> tuple[int, ...]:
    """Return one axis or several as a tuple, empty for None."""
    return () if axis is None else tuple(axis) if isinstance(axis, Sequence) else (operator.index(axis),)


def matrices_of(caller: str, shape: Sequence[int], reduction_axis: Axes, output_axis: Axes) -> Matrices:
    """Return the matrices in an array of a given shape.

    If the array has two axes and `reduction_axis` is None, the inputs have the other axis than the outputs.

    Raises:
        ValueError: if the shape has no such matrices, or empty matrices.
    """
    shape, ndim = tuple(shape), len(shape)
    if ndim < 2:
        kind = "a vector" if ndim else "a scalar"
        raise ValueError(
            f"{caller}: shape {shape} is {kind}, and Muon steps matrices. Step it by AdamW, as muon (JAX) "
            "and Muon (torch) do with all that is no hidden matrix."
        )
    given = axes_of(reduction_axis), axes_of(output_axis)
    for axis in (*given[0], *given[1]):
        if not -ndim <= axis < ndim:
            raise ValueError(
                f"{caller}: axis {axis} is none of shape {shape}. Use axes from {-ndim} to {ndim - 1}."
            )
    inputs, outputs = (tuple(axis % ndim for axis in axes) for axes in given)
    if reduction_axis is None and ndim == 2 and len(outputs) == 1:
        inputs = (1 - outputs[0],)
    if not inputs or not outputs:
        raise ValueError(
            f"{caller}: shape {shape} has {ndim} axes, and which of them span a matrix is not known. Declare "
            "reduction_axis and output_axis, of a convolution (1, 2, 3) and 0 in torch, (0, 1, 2) and 3 in "
            "Flax; the other axes then count matrices."
        )
    if len({*inputs, *outputs}) < len(inputs) + len(outputs):
        raise ValueError(
            f"{caller}: reduction_axis={reduction_axis} and output_axis={output_axis} have an axis of shape "
            f"{shape} in common. Use each axis once."
        )
    if 0 in shape:
        raise ValueError(
            f"{caller}: shape {shape} has no elements, so no matrix has a factor. Leave the parameter out, "
            "or step it by AdamW."
        )
    counting = tuple(axis for axis in range(ndim) if axis not in (*inputs, *outputs))
    order = (*counting, *inputs, *outputs)
    sizes = [math.prod(shape[axis] for axis in axes) for axes in (counting, inputs, outputs)]
    back = tuple(sorted(range(ndim), key=lambda axis: order[axis]))
    return Matrices(
        inputs, outputs, order, back, tuple(shape[axis] for axis in order), (sizes[0], sizes[1], sizes[2])
    )


def shape_scale(scale: str | None, matrices: Matrices) -> np.float32:
    """Return the multiplier for a matrix's factor, rounded once to float32.

    "original" is Jordan's sqrt(max(1, outputs / inputs)). "consistent_rms" is 0.2 sqrt(max(inputs, outputs)),
    with which updates are as large as AdamW's.
    """
    _, inputs, outputs = matrices.stack
    if scale is None:
        return np.float32(1)
    if scale == "original":
        return np.float32(math.sqrt(max(1.0, outputs / inputs)))
    return np.float32(0.2 * math.sqrt(max(inputs, outputs)))


def _mean(x: Number, axes: tuple[int, ...], op: Op) -> Number:
    """Return the mean along some axes, one axis after another from the first."""
    return functools.reduce(op.mean, sorted(axes), x)


@functools.cache
def _row_shape(reduction_axis: Axes, output_axis: Axes) -> Callable[[tuple[int, ...]], tuple[int, ...]]:
    def shape_of(shape: tuple[int, ...]) -> tuple[int, ...]:
        inputs = matrices_of(NormalizeRows.name, shape, reduction_axis, output_axis).inputs
        return tuple(1 if axis in inputs else size for axis, size in enumerate(shape))

    return shape_of


def coefficients_of(ns_coeffs: tuple, ns_steps: int) -> tuple[tuple[float, float, float], ...]:
    """Return three numbers for every Newton-Schulz step. If a table is given, its last rows are used."""
    if isinstance(ns_coeffs[0], Sequence):
        return tuple(tuple(map(float, row)) for row in ns_coeffs[len(ns_coeffs) - ns_steps :])  # pyright: ignore
    return (tuple(map(float, ns_coeffs)),) * ns_steps  # pyright: ignore


def check_factor(
    caller: str, ns_coeffs: str | Sequence, ns_steps: Scalar, eps: object, ns_dtype: object, scale: object
) -> tuple:
    """Return the coefficients as a tuple, and check the other options of the factor.

    Raises:
        TypeError: if `ns_steps` is not an integer.
        ValueError: if an option is out of range.
    """
    try:
        steps = operator.index(ns_steps)
    except TypeError:
        raise TypeError(f"{caller}: ns_steps={ns_steps!r} is not an integer. Use 5.") from None
    if isinstance(ns_steps, bool) or not 1 <= steps <= MOST_STEPS:
        raise ValueError(f"{caller}: ns_steps={ns_steps} is outside 1 to {MOST_STEPS}. Use 5.")
    if isinstance(ns_coeffs, str):
        if ns_coeffs not in NAMED_COEFFS:
            raise ValueError(
                f"{caller}: {ns_coeffs!r} names no Newton-Schulz coefficients. "
                'Use "jordan", "deepseek_v4" or "polar_express", three numbers, or a row for each step.'
            )
        ns_coeffs = NAMED_COEFFS[ns_coeffs](steps)
    coefficients = _checked_coefficients(caller, ns_coeffs)
    if isinstance(coefficients[0], tuple) and len(coefficients) < steps:
        raise ValueError(
            f"{caller}: coefficients have {len(coefficients)} rows for ns_steps={steps}. "
            "Give a row per step, or three numbers for all."
        )
    _check_convergence(caller, coefficients_of(coefficients, steps))
    if not isinstance(eps, (int, float)) or isinstance(eps, bool) or not 0 < eps < math.inf:
        raise ValueError(f"{caller}: eps={eps!r} is not a positive number. Use 1e-7.")
    if ns_dtype not in NS_DTYPES:
        raise ValueError(
            f'{caller}: ns_dtype={ns_dtype!r} is no dtype of the factor. Use "float32"; or "bfloat16", which '
            "costs more than storing the momentum in 16 bits (distance 0.046 on digits)."
        )
    if scale not in SCALES:
        raise ValueError(
            f'{caller}: scale={scale!r} is not a scale. Use "original", "consistent_rms" or None.'
        )
    return coefficients


def _checked_coefficients(caller: str, ns_coeffs: Sequence) -> tuple:
    try:
        rows = np.asarray(ns_coeffs, np.float64)
    except (TypeError, ValueError):
        rows = np.empty(0)
    if rows.shape != (3,) and not (rows.ndim == 2 and rows.shape[-1] == 3 and len(rows)):
        raise ValueError(
            f"{caller}: coefficients {ns_coeffs!r} are neither three numbers nor rows of three. "
            f"Use {NS_COEFFS}."
        )
    if not np.isfinite(rows).all() or not (0 < np.atleast_2d(rows)[:, 0]).all():
        raise ValueError(
            f"{caller}: coefficients {ns_coeffs!r} have a slope at 0 that is not positive, or no finite "
            f"number: no factor comes of it. Use {NS_COEFFS}."
        )
    return tuple(map(tuple, rows.tolist())) if rows.ndim == 2 else tuple(rows.tolist())


def _check_convergence(caller: str, rows: tuple[tuple[float, float, float], ...]) -> None:
    """Raise an error if steps map a singular value in [0, 1], as it is after scaling, to more than 3."""
    start = x = np.linspace(0, 1, 1001)
    for step, (a, b, c) in enumerate(rows, 1):
        x = x * (a + x * x * (b + c * x * x))
        worst = int(np.abs(x).argmax())
        if abs(x[worst]) > 3:
            raise ValueError(
                f"{caller}: {step} of {len(rows)} steps with coefficients {rows[step - 1]} take a singular "
                f"value of {start[worst]:.3g} to {x[worst]:.3g}, and steps diverge. Use {NS_COEFFS}."
            )

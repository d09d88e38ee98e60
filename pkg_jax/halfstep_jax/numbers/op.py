"""The operations of a rule in JAX, with an opaque zero of the step where `halfstep.op` protects a rounding.

Contract: A1 to A3.
"""

from collections.abc import Callable, Sequence

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from halfstep.arrays import Array
from halfstep.numbers import LaterCount, Mask, Number, Operand, Origin
from halfstep.op import NumbersOp
from halfstep_jax.numbers import moments, norms, roots
from halfstep_jax.numbers.global_norm import global_norms
from halfstep_jax.numbers.schedules import is_zero
from halfstep_jax.xla import exact


class JaxOp(NumbersOp):
    """Operations on float32 arrays of JAX.

    Args:
        rule: the name of the rule, for messages.
        zero: from `exact.opaque_zero`; without one, it is made where a value needs it.
        axis_names: of the mesh, for norms inside `jax.shard_map`; see `norms.cut_axes`.
        coming: the result of `coming`, as an array.
    """

    framework = jnp
    in_range = staticmethod(norms.Norms.in_range)  # pyright: ignore[reportAssignmentType]

    def __init__(
        self,
        rule: str,
        zero: jax.Array | None = None,
        axis_names: Sequence[str] | None = None,
        coming: Callable[[str, int], jax.Array | None] | None = None,
    ):
        super().__init__(rule)
        self._zero, self._axis_names, self._is_host = zero, axis_names, zero is None
        self._coming = coming

    def _on_host(self, x: object) -> bool:
        """Whether x is a constant that NumPy computed in `numbers`, which no compiler changes."""
        return self._is_host and isinstance(x, np.floating)

    @property
    def zero(self) -> jax.Array:
        """The opaque zero: no compiler can prove that it is 0."""
        if self._zero is None:
            self._zero = exact.opaque_zero()
        return self._zero

    def as_scalar(self, x: object) -> Array | None:
        """Return a number of Python, NumPy or JAX as a float32 scalar; None for anything else."""
        if isinstance(x, int | float | np.integer | np.floating):
            return np.float32(x)
        return x if isinstance(x, jax.Array) and x.dtype == jnp.float32 and not x.shape else None

    def opaque(self, x: Array) -> Array:
        """Return x with its bits ORed with the opaque zero; NumPy numbers outside of steps are unchanged."""
        return x if self._on_host(x) else exact.opaque(x, self.zero)

    def opaque_product(self, x: Array) -> Array:
        """Return a product to which a zero of unknown sign is added, likewise."""
        return x if self._on_host(x) else exact.rounded_product(x, self.zero)

    def spread(self, x: Array, like: jax.Array) -> jax.Array:
        """Return x in the shape of another array, ORed with a zero from each of its elements.

        Behind a zero of the whole array XLA still sees one divisor, and multiplies by its reciprocal.
        """
        bits = lax.bitcast_convert_type(jnp.asarray(x, jnp.float32), jnp.uint32)
        zeros = lax.bitcast_convert_type(jnp.asarray(like, jnp.float32), jnp.uint32) & self.zero
        return lax.bitcast_convert_type(bits | zeros, jnp.float32)

    def root(self, x: Array) -> jax.Array:
        """Return the root of x, corrected where a device's own is approximate."""
        return roots.sqrt(x)

    def quotient(self, x: Array, y: Array) -> jax.Array:
        """Return x / y, likewise."""
        return roots.divide(x, y)

    def ema(self, average: Operand, value: Operand, rate: Operand) -> Number:
        """Return (rate average) + ((1 - rate) value)."""
        average, value, rate = self.number(average), self.number(value), self.number(rate)
        x, y = self._factor(average, rate), self._factor(value, rate)
        return self.wrap(moments.ema(x, y, rate.value, self.zero))

    def sign(self, x: Operand) -> Number:
        """Return the sign; unlike `jnp.sign`, +0 for -0."""
        y = self.bare(x)
        sign = (y > 0).astype(jnp.float32) - (y < 0).astype(jnp.float32)
        return self.wrap(jnp.where(jnp.isnan(y), y, sign))

    def power(self, x: Operand, y: Operand) -> Number:
        """Return x^y; the exponent is opaque, or that of 0.5 would be a root."""
        x, y = self._pair(x, y, "power")
        exponent = self._opaque(y) if y.made is Origin.NUMBER else self.bare(y)
        return self.wrap(jnp.power(self.bare(x), exponent))

    def matmul(self, x: Operand, y: Operand) -> Number:
        """Return the matrix product, of float32 factors on every device."""
        return self.wrap(jnp.matmul(self.bare(x), self.bare(y), precision=lax.Precision.HIGHEST))

    def norms_of(self, x: jax.Array, exact: bool) -> norms.Norms:
        """Return the norms of the whole array, also if it is a shard by `axis_names`."""
        norms.check_axis_names(self.rule, self._axis_names)
        if exact:
            return global_norms([x], exact=True, axis_names=self._axis_names)
        return norms.norms(x, self._axis_names)

    def is_zero(self, field: object) -> bool:
        """Whether a hyperparameter is the constant 0."""
        return is_zero(field)

    def unbias(self, *pairs: tuple[Operand, "Count"], steps: int = 1) -> tuple[Number, ...]:
        """Return 1 / (1 - rate^t) of each pair (rate, t), all by one program (contract M2)."""
        rates = [jnp.asarray(self.bare(rate)) for rate, _ in pairs]
        offsets, t = [t.offset for _, t in pairs], pairs[0][1].count
        rates = jnp.stack(rates + rates[-1:] * (steps - 1))
        offsets += [offsets[-1] + k for k in range(1, steps)]
        counts = t + np.array(offsets, np.int32) if any(offsets) else jnp.full(len(offsets), t)
        correction, zero = moments.bias_correction_and_zero(rates, counts)
        # One loop serves both.
        self._zero = zero if self._zero is None else self._zero
        inverse, each = roots.divide(jnp.ones(len(offsets)), correction), len(pairs) - (steps > 1)
        return (*map(self.wrap, inverse[:each]), *([self.wrap(inverse[each:])] if steps > 1 else []))

    def coming(self, field: str, steps: int) -> Number | None:
        """Return the numbers of the next steps of a field that follows a schedule."""
        return None if self._coming is None or (x := self._coming(field, steps)) is None else self.wrap(x)

    def float32(self, x: Array) -> Number:
        """Return a count, or the truth of a comparison, as a number."""
        x = jnp.asarray(x.value if isinstance(x, Count | Mask) else x)
        if x.dtype == jnp.bool_:
            # XLA takes a product with a converted bool for a choice, and 0 times an infinity is NaN.
            one = np.float32(1).view(np.uint32)
            return self.wrap(lax.bitcast_convert_type(x.astype(jnp.uint32) * one, jnp.float32))
        return self.wrap(x.astype(jnp.float32))


class Count(LaterCount):
    """The count of a step, 1 at the first, in a rule's `numbers`: t + 1, t - 1, t % 10, and comparisons."""

    def __init__(self, op: JaxOp, count: jax.Array | None, offset: int = 0):
        self._op, self._count, self.offset = op, count, offset

    @property
    def count(self) -> jax.Array:
        """The count of the step itself."""
        if self._count is None:
            raise ValueError(
                f"{self._op.rule}: numbers reads the count of steps, and the rule keeps none. "
                "Declare a moment, or a number with schedule=True."
            )
        return self._count

    @property
    def value(self) -> jax.Array:
        """The count with its offset."""
        return self.count + self.offset if self.offset else self.count

    def __add__(self, k: int) -> "Count":
        return Count(self._op, self._count, self.offset + k)

    def __mod__(self, k: int) -> "Count":
        return Count(self._op, self.value % k)

    def _compare(self, how: Callable, k: int) -> Mask:
        return Mask(how(self.count, k - self.offset), self._op)

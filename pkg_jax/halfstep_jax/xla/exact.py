"""Opaque zeros, which keep XLA from changing a rounding: from fusing or regrouping products.

Contract: A1, A2. Under `jax.jit`, XLA on CPU turns `a * b + c` into a fused multiply-add. It turns
`(x * c1) * c2` into `x * (c1 * c2)`, and `a / sqrt(b)` into `a * rsqrt(b)`. Op by op it does nothing of the
kind, so the bits would depend on how a step is compiled. `lax.optimization_barrier`, `lax.reduce_precision`
and round trips through integers do not stop it. An OR with a zero that no compiler can prove to be zero stops
it, and takes one instruction: the value becomes opaque.

These are made opaque: a product that feeds a sum; an array that arrives from another link, which may be a
product; a constant that could vanish if it were seen.
"""

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from halfstep.arrays import Array
from halfstep_jax.leaf_calls import given_places
from halfstep_jax.xla.primitives import elementwise, type_of_first

_MINUS_ZERO = np.float32(-0.0).view(np.uint32)


def opaque_zero(word: jax.Array | None = None) -> jax.Array:
    """Return the uint32 zero (word (word + 1)) & 1: one of two neighbours is even, which no compiler proves.

    `word` is a scalar in or out of a rolled loop, such as that of the keys: the result of a loop is not
    folded even if all its inputs are constants. None makes a loop of its own for it.

    Source: ours.
    """
    if given_places() is not None:
        return jnp.uint32(0)
    if word is None:
        # Two turns; a single one would be folded. The operation after the loop is in front of every kernel
        # that reads it, and so the loop's result among the last operands of all: they stay one program.
        return lax.fori_loop(0, 2, _next_zero, jnp.uint32(1)) & np.uint32(1)
    return (word * (word + np.uint32(1))) & np.uint32(1)


def opaque(x: jax.typing.ArrayLike, zero: jax.Array) -> jax.Array:
    """Return float32 `x` with its bits ORed with `zero`: the same value, of unknown origin.

    Not XORed: two links that do so to one value with one zero would cancel each other.

    Example:
        >>> float(opaque(np.float32(0.3), opaque_zero())) == float(np.float32(0.3))
        True

    To a derivative it is the identity.

    Source: ours.
    """
    return _opaque(jnp.asarray(x), zero)


def opaque_input(x: jax.Array, zero: jax.Array) -> jax.Array:
    """Return the input of a link, opaque and in float32.

    In 16 bits too: a product in bfloat16 that is then cast to float32 would not be rounded to bfloat16. Its
    pattern, shifted, is that number in float32, which no compiler takes for a cast; the shift costs nothing.
    """
    return _widened(x, zero) if x.dtype == jnp.bfloat16 else _opaque(x, zero).astype(jnp.float32)


def opaque_bits(x: jax.Array, zero: jax.Array) -> jax.Array:
    """Return an array of any dtype, such as codes, ORed with `zero`."""
    if jnp.issubdtype(x.dtype, jnp.floating) and x.dtype.itemsize > 1:
        return _opaque(x, zero)
    bits = lax.bitcast_convert_type(x, f"uint{8 * x.dtype.itemsize}")
    return lax.bitcast_convert_type(bits | zero.astype(bits.dtype), x.dtype)


def straight_through(x: jax.Array, rounded: jax.Array) -> jax.Array:
    """Return `rounded` with the derivative of `x` (straight-through).

    Example:
        >>> float(jax.grad(lambda x: straight_through(x, jnp.round(x)) ** 2)(0.75))
        2.0

    Source: Y. Bengio et al., "Estimating or propagating gradients through stochastic neurons",
    arXiv:1308.3432, section 4.
    """
    return _straight_through(jnp.asarray(x), rounded)


def without_derivative(x: jax.Array) -> jax.Array:
    """Return x as it is, to be stored in codes; a derivative that reaches it raises ValueError.

    Codes are no numbers, so a derivative through them would be left out in silence.

    Example:
        >>> jax.grad(without_derivative)(1.0)
        Traceback (most recent call last):
        ValueError: a derivative reaches a moment in codes or with scales, ...
    """
    return _without_derivative(jnp.asarray(x))


def add_product(c: Array, a: Array, b: Array, zero: jax.Array) -> jax.Array:
    """Return c + (a b) in float32: product and sum, each rounded once; `c` is opaque, if it may be a product.

    Example:
        >>> float(add_product(np.float32(1.0), np.float32(2.0), np.float32(3.0), opaque_zero()))
        7.0
    """
    return c + opaque_product(a, b, zero)


def opaque_product(a: Array, b: Array, zero: jax.Array) -> jax.Array:
    """Return a b in float32, rounded once even if a sum reads it.

    Example:
        >>> float(opaque_product(np.float32(2.0), np.float32(-0.0), opaque_zero()))
        -0.0

    To a derivative it is the product. Source: ours.
    """
    return rounded_product(a * b, zero)


def rounded_product(product: Array, zero: jax.Array) -> jax.Array:
    """Return a product in float32 as it is, plus -0.0 with a zero of a sign that no compiler knows.

    Where it is fused with that sum, the product is rounded once all the same; and it is an operation less
    than `opaque` of it.
    """
    return _plus_nothing(jnp.asarray(product), zero)


def _with_zero_bits(x: jax.Array, zero: jax.Array) -> jax.Array:
    width = jnp.uint32 if x.dtype == jnp.float32 else jnp.uint16
    bits = lax.bitcast_convert_type(x, width) | zero.astype(width)
    return lax.bitcast_convert_type(bits, x.dtype)


# Patterns have no derivative: without the identity it would be zero, and nothing would say so.
_opaque = elementwise("opaque", _with_zero_bits)


def _shifted(x: jax.Array, zero: jax.Array) -> jax.Array:
    bits = lax.bitcast_convert_type(x, jnp.uint16).astype(jnp.uint32) << np.uint32(16)
    return lax.bitcast_convert_type(bits, jnp.float32)


_widened = elementwise(
    "opaque_widened",
    _shifted,
    lambda x, zero: type_of_first(x).update(dtype=np.dtype(np.float32)),
    lambda primals, tangents: tangents[0].astype(jnp.float32),
    op_by_op=lambda x, zero: x.astype(jnp.float32),
    tpu=lambda x, zero: _with_zero_bits(x, zero).astype(jnp.float32),
)


# -0.0 is the one number that changes no other.
_plus_nothing = elementwise(
    "opaque_product",
    lambda x, zero: x + lax.bitcast_convert_type(zero | _MINUS_ZERO, jnp.float32),
    op_by_op=_with_zero_bits,
    rocm=_with_zero_bits,
)


_straight_through = elementwise(
    "straight_through",
    lambda x, rounded: rounded,
    lambda x, rounded: type_of_first(rounded),
    lambda primals, tangents: tangents[0].astype(primals[1].dtype),
    in_hlo={None: lambda x, rounded: rounded},
)


def _refuse_derivative(primals, tangents):
    raise ValueError(
        "a derivative reaches a moment in codes or with scales, which pass none on to the next step. Use "
        'moments in "bfloat16" or "float32", as without recipe; or, where no derivative of the step is due, '
        "pass jax.lax.stop_gradient of gradients, state, params and rates."
    )


_without_derivative = elementwise(
    "without_derivative", lambda x: x, derivative=_refuse_derivative, in_hlo={None: lambda x: x}
)


def zero_of_pass(zero: jax.Array, *, on_gpu: bool) -> jax.Array:
    """Return a zero that makes an array distinct for XLA: on a CPU, and on a GPU if `on_gpu`.

    On a TPU it is the zero itself: equal operations behind it are computed once.
    """
    return _zero_of_pass(zero) if on_gpu else _zero_of_pass_on_cpu(zero)


def _distinct_zero(zero: jax.Array) -> jax.Array:
    return zero * np.uint32(3)


def _as_it_is(zero: jax.Array) -> jax.Array:
    return zero


_zero_of_pass = elementwise("zero_of_pass", _distinct_zero, tpu=_as_it_is)
_zero_of_pass_on_cpu = elementwise(
    "zero_of_pass_on_cpu", _distinct_zero, tpu=_as_it_is, cuda=_as_it_is, rocm=_as_it_is
)


def zero_on_cpu(zero: jax.Array) -> jax.Array:
    """Return the zero on a CPU; elsewhere a constant 0, which XLA removes."""
    return _zero_on_cpu(zero)


_zero_on_cpu = elementwise(
    "zero_on_cpu", _as_it_is, tpu=jnp.zeros_like, cuda=jnp.zeros_like, rocm=jnp.zeros_like
)


def stored_with(x: jax.Array, codes: jax.Array, zero: jax.Array) -> jax.Array:
    """Return float32 `x`; on a TPU it depends on `codes`, of its shape, so that one kernel makes both.

    XLA for a TPU makes them in one kernel where the last needs the others, and else reads all inputs twice.
    """
    return _stored_with(x, codes, zero)


_stored_with = elementwise(
    "stored_with",
    lambda x, codes, zero: x,
    in_hlo={None: lambda x, codes, zero: x},
    op_by_op=lambda x, codes, zero: x,
    tpu=lambda x, codes, zero: _with_zero_bits(x, codes.astype(jnp.uint32) & zero),
)


def _next_zero(_, word: jax.Array) -> jax.Array:
    """Return a zero out of a turn of a linear congruential generator."""
    return opaque_zero(word * np.uint32(747796405) + np.uint32(2891336453))

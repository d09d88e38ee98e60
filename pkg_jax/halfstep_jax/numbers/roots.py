"""Square roots and quotients, correctly rounded on CPUs and GPUs.

Contract: A3, C3, C5. On a CPU, XLA rounds roots and quotients correctly. On a GPU they are approximate, and
no option changes that: there the remainder tells how far off they are. A remainder of integer mantissas,
taken modulo 2^32, is exact, because it is small. It takes integer operations alone, which are the same
everywhere.

On a TPU they are left as they are: no document says how far off they may be. With a correction, XLA would
also take a second pass over memory for steps that keep something beside the weights.
"""

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from halfstep_jax.xla.primitives import elementwise, stablehlo, type_of

_MANTISSA_BITS = np.uint32(23)
_MANTISSA = np.uint32(0x7FFFFF)
_HIDDEN = np.uint32(0x800000)
_EXPONENT = np.uint32(0x7F800000)
_ONE = np.uint32(0x3F800000)
_SMALLEST_NORMAL = np.float32(2.0**-126)


def sqrt(x: jax.typing.ArrayLike) -> jax.Array:
    """Return the square root of float32 `x`, rounded once to nearest.

    Example:
        >>> float(sqrt(jnp.float32(9.0)))
        3.0

    On a GPU: `corrected_root`.
    """
    return _sqrt(jnp.asarray(x, jnp.float32))


def divide(x: jax.typing.ArrayLike, y: jax.typing.ArrayLike) -> jax.Array:
    """Return the quotient of float32 `x` and `y`, of shapes that broadcast, rounded once to nearest.

    Example:
        >>> divide(jnp.array([1.0, 3.0]), jnp.float32(4.0)).tolist()
        [0.25, 0.75]

    On a GPU: `corrected_quotient`. Under `jax.jit` on a CPU a `y` that elements share must differ by an
    opaque zero of each (`JaxOp.spread`), or XLA multiplies by its reciprocal.
    """
    return _divide(*jnp.broadcast_arrays(jnp.asarray(x, jnp.float32), jnp.asarray(y, jnp.float32)))


def divide_by_scale(x: jax.Array, y: jax.Array) -> jax.Array:
    """Return the quotient of float32 `x` and a shared `y` of three significant bits, rounded once.

    XLA on CPU would take the product with the reciprocal of a divisor that elements share, which rounds
    twice. So there it is `quotient_by_products`.

    Example:
        >>> divide_by_scale(jnp.array([[1.0, 3.0]]), jnp.array([[1.25]])).tolist()
        [[0.800000011920929, 2.4000000953674316]]
    """
    return _divide_by_scale(x, jnp.broadcast_to(y, x.shape))


def _corrected_sqrt(x: jax.Array) -> jax.Array:
    return corrected_root(x, lax.sqrt(x))


def _corrected_divide(x: jax.Array, y: jax.Array) -> jax.Array:
    return corrected_quotient(x, y, lax.div(x, y))


def corrected_root(x: jax.Array, about: jax.Array) -> jax.Array:
    """Return the root of float32 `x`, correctly rounded, given the root or a number next to it.

    Let S be the mantissa of `about`, an integer of 24 bits, and N the mantissa of `x`, moved to where S^2 is.
    Then R = N - S^2 is exact. The root is past S + 1/2 if R > S, and below S - 1/2 if R <= -S: it is never
    halfway between numbers. Where `x` is not a positive normal number, `about` is returned.

    Source: ours.
    """
    bits = _bits(x)
    twice = bits + _ONE  # in its exponent, that of the root
    # The power of two below the root: S is in its unit, also where `about` is on its other side.
    base = (twice >> np.uint32(1)) & _EXPONENT
    root = jnp.maximum(_bits(about), base)
    s = root - (base - _HIDDEN)
    # Exponents and signs are moved out.
    remainder, s = _signed(bits * (_HIDDEN + (twice & _HIDDEN)) - s * s), _signed(s)
    # A sign, shifted, is -1 or 0.
    root = _signed(root) - (s - remainder >> 31) + (remainder + (s - 1) >> 31)
    # Not a subnormal number, nor NaN; infinity has no remainder.
    return jnp.where(x >= _SMALLEST_NORMAL, lax.bitcast_convert_type(root, jnp.float32), about)


def corrected_quotient(x: jax.Array, y: jax.Array, about: jax.Array) -> jax.Array:
    """Return the quotient of float32 `x` and `y`, correctly rounded, given a number at most two away from it.

    Let Q and Y be the mantissas of `about` and `y`, integers of 24 bits. Let N be the mantissa of `x`, moved
    to where Q Y is. Then R = N - Q Y is exact. The quotient is one unit away if |R| > Y / 2, and two units if
    |R| > 3 Y / 2: a normal quotient is never halfway between numbers. `about` is returned unless its
    magnitude is in [2^-124, 2^127). A subnormal `x` may move the result by six numbers, and a subnormal `y`
    by two.

    Source: ours.
    """
    x_bits, y_bits = _bits(x), _bits(y)
    d = y_bits & _MANTISSA | _HIDDEN
    is_less = (x_bits & _MANTISSA | _HIDDEN) - d >> np.uint32(31)
    # The power of two below the quotient: Q is in its unit, also where `about` is on its other side, of which
    # two units are four numbers. Of a subnormal `x` it is too large. Signs are where they belong: that of
    # `about`, too. Where Y is the larger mantissa, it borrows from the exponent.
    base = (x_bits - y_bits + _ONE) & ~_MANTISSA
    quotient = jnp.maximum(_bits(about), jnp.minimum(base, _bits(about) + np.uint32(4)))
    minus_q = (base - _HIDDEN) - quotient
    remainder, d = _signed((x_bits << (_MANTISSA_BITS + is_less)) + minus_q * d), _signed(d)
    twice, twice_d = remainder << 1, d << 1
    # Negative where the quotient is a unit above, and below; two units with 2 Y added. A sign, shifted,
    # is -1 or 0.
    above, below = d - twice, d + twice
    quotient = _signed(quotient) - (above >> 31) - (above + twice_d >> 31)
    quotient = quotient + (below >> 31) + (below + twice_d >> 31)
    # Without its sign.
    is_normal = (_bits(about) << np.uint32(1)) - np.uint32(3 << 24) < np.uint32(251 << 24)
    return jnp.where(is_normal, lax.bitcast_convert_type(quotient, jnp.float32), about)


def quotient_by_products(x: jax.Array, y: jax.Array) -> jax.Array:
    """Return the quotient of float32 `x` and positive `y` of three significant bits, rounded once.

    Let q be x / y to 20 bits. Then r = x - q y is exact, as is every product and difference on the way:
    numbers within a factor of two of each other have an exact difference. The quotient is q + r / y; it is
    never within 1/14 of a unit of halfway between numbers, and r / y is known to 2^-42 of the quotient. So it
    may be fused or not. A quotient itself is nothing that XLA on CPU computes twice: it would keep it.

    Source: ours.
    """
    bits = _bits(y)
    # Without its power of two, so that no remainder is subnormal: the rest of y is 1 + half + quarter.
    x = x * lax.bitcast_convert_type((_ONE << np.uint32(1)) - (bits & _EXPONENT), jnp.float32)
    has_half, has_quarter = (bits & np.uint32(1 << bit) != 0 for bit in (22, 21))
    half, quarter = (jnp.where(has, np.float32(y), 0) for has, y in ((has_half, 0.5), (has_quarter, 0.25)))
    above, below = (jnp.where(has_quarter, np.float32(1 / (y + 0.25)), np.float32(1 / y)) for y in (1.5, 1))
    inverse = jnp.where(has_half, above, below)
    q = lax.bitcast_convert_type(_bits(x * inverse) & ~np.uint32(0xF), jnp.float32)
    return q + (((x - q) - q * half) - q * quarter) * inverse


def _bits(x: jax.Array) -> jax.Array:
    return lax.bitcast_convert_type(x, jnp.uint32)


def _signed(x: jax.Array) -> jax.Array:
    return lax.bitcast_convert_type(x, jnp.int32)


# Bit patterns have no derivative. The derivative of XLA's operation stands for it.
_sqrt = elementwise(
    "correct_sqrt",
    _corrected_sqrt,
    type_of("sqrt"),
    lambda primals, tangents: jax.jvp(lax.sqrt, primals, tangents)[1],
    in_hlo=dict.fromkeys(("cpu", "tpu"), stablehlo("sqrt")),
    cpu=lax.sqrt,
    tpu=lax.sqrt,
)
_divide = elementwise(
    "correct_divide",
    _corrected_divide,
    type_of("div"),
    lambda primals, tangents: jax.jvp(lax.div, primals, tangents)[1],
    in_hlo=dict.fromkeys(("cpu", "tpu"), stablehlo("divide")),
    cpu=lax.div,
    tpu=lax.div,
)
_divide_by_scale = elementwise(
    "correct_divide_by_scale",
    _corrected_divide,
    type_of("div"),
    lambda primals, tangents: jax.jvp(lax.div, primals, tangents)[1],
    in_hlo={"tpu": stablehlo("divide")},
    cpu=quotient_by_products,
    tpu=lax.div,
)

"""Formats and states of formats that cannot be: value, rule and way out."""

import jax
import jax.numpy as jnp
import optax
import pytest

import halfstep_jax as hs
from on_jax.steps import weights

E4M3, E5M3 = hs.scaled("float8_e4m3fn"), hs.scaled("ufloat8_e5m3")


_SCALED = (
    'Use "float16", "float8_e4m3fn", "float8_e5m2", "float8_e3m4", "int8", "ufloat8_e5m3", "ufloat8_e4m4" '
    'or "uroot8".'
)


_BLOCK = 'Use a positive integer, "row" or None.'


@pytest.mark.parametrize(
    ("call", "error", "message"),
    [
        (lambda: hs.scaled("int4"), ValueError, f"scaled: dtype=int4 has no scaled format. {_SCALED}"),
        (
            lambda: hs.scaled(jnp.complex64),
            ValueError,
            f"scaled: dtype=complex64 has no scaled format. {_SCALED}",
        ),
        (
            lambda: hs.scaled("unit8"),
            ValueError,
            f'scaled: dtype=unit8 has no scaled format. Did you mean "int8"? {_SCALED}',
        ),
        (
            lambda: hs.adamw(1e-3, nu_dtype="scaled('uroot')"),
            ValueError,
            f'scaled: dtype=uroot has no scaled format. Did you mean "uroot8"? {_SCALED}',
        ),
        (
            lambda: hs.relative("mulaw"),
            ValueError,
            'relative: dtype=mulaw with block_size=None is not a format. Did you mean "mulaw8"? '
            'Use "float8_e3m4", "int8" or "mulaw8".',
        ),
        (lambda: hs.scaled(3), TypeError, f"scaled: dtype=3 is not a dtype. {_SCALED}"),
        (lambda: hs.scaled("int8", 0), ValueError, f"scaled: block_size=0 is not a block size. {_BLOCK}"),
        (lambda: hs.scaled("int8", -8), ValueError, f"scaled: block_size=-8 is not a block size. {_BLOCK}"),
        (lambda: hs.scaled("int8", 8.0), TypeError, f"scaled: block_size=8.0 is not a block size. {_BLOCK}"),
        (
            lambda: hs.scaled("int8", True),
            TypeError,
            f"scaled: block_size=True is not a block size. {_BLOCK}",
        ),
        (
            lambda: hs.scaled("int8", "col"),
            ValueError,
            f"scaled: block_size='col' is not a block size. {_BLOCK}",
        ),
        (
            lambda: hs.scaled("int8", min_size=-1),
            ValueError,
            "scaled: min_size=-1 is negative. Use an integer >= 0.",
        ),
        (
            lambda: hs.scaled("int8", min_ndim=1.5),
            TypeError,
            "scaled: min_ndim=1.5 is not an integer. Use an integer >= 0.",
        ),
        (
            lambda: hs.scale_by_adam(mu_dtype=E5M3),
            ValueError,
            "scale_by_adam: mu_dtype=ufloat8_e5m3 has no sign. Use it for nu, and a signed format for mu.",
        ),
        (
            lambda: hs.scale_by_adam(mu_dtype="ufloat8_e6m2"),
            ValueError,
            "scale_by_adam: mu_dtype=ufloat8_e6m2 has no sign. Use it for nu, and a signed format for mu.",
        ),
        (
            lambda: hs.scale_by_adam(nu_dtype="ufloat8_e5m3"),
            ValueError,
            "scale_by_adam: nu_dtype=ufloat8_e5m3 cannot hold a moment without a block scale. "
            'Use scaled("ufloat8_e5m3").',
        ),
        (
            lambda: hs.scale_by_adam(nu_dtype="complex64"),
            ValueError,
            "scale_by_adam: nu_dtype='complex64' is not a state dtype. "
            'Use "bfloat16" or "float32"; of 8 bits '
            'scaled("ufloat8_e5m3"), or a recipe.',
        ),
        (
            lambda: hs.scale_by_adam(mu_dtype=hs.scaled("int8"), b1=0.999, mu_rounding="nearest"),
            ValueError,
            'scale_by_adam: mu_dtype=int8 with mu_rounding="nearest" freezes at b1=0.999 (1-b1 < 1/254). '
            'Use mu_rounding="stochastic", or mu_dtype="float32".',
        ),
        (
            lambda: hs.scale_by_adam(nu_dtype=hs.scaled("int8")),
            ValueError,
            "scale_by_adam: nu_dtype=int8 cannot hold a second moment: it rounds small ones to zero, or up "
            'by orders of magnitude, and steps are too long or short. Use "bfloat16", scaled("float16"), '
            'scaled("ufloat8_e5m3") or codebook("udynamic8").',
        ),
        (
            lambda: hs.scale_by_adam(nu_dtype=E5M3, b2=0.95, nu_rounding="nearest"),
            ValueError,
            'scale_by_adam: nu_dtype=ufloat8_e5m3 with nu_rounding="nearest" freezes at b2=0.95 '
            '(1-b2 < 2^-4). Use nu_rounding="stochastic", or nu_dtype="float32".',
        ),
    ],
)
def test_a_bad_call_says_what_is_wrong_and_what_to_do(call, error, message):
    with pytest.raises(error) as caught:
        call()
    assert str(caught.value) == message


STATE = "Pass the state that init made, and the block_size that it was made with."


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (
            {"nu_scale": jnp.full((64, 2), 30, jnp.uint8)},
            f"scale_by_adam: the nu_scale of 'w' holds 30, outside [31, 253]. {STATE}",
        ),
        (
            {"mu_scale": jnp.full((64, 2), 255, jnp.uint8)},
            f"scale_by_adam: the mu_scale of 'w' holds 255, outside [18, 254]. {STATE}",
        ),
        (
            {"nu_scale": jnp.full((64, 4), 40, jnp.uint8)},
            "scale_by_adam: the nu_scale of 'w' is uint8[64, 4]; block_size=128 makes it uint8[64, 2]. "
            + STATE,
        ),
        (
            {"nu_scale": jnp.full((64, 2), 40, jnp.int32)},
            "scale_by_adam: the nu_scale of 'w' is int32[64, 2]; block_size=128 makes it uint8[64, 2]. "
            + STATE,
        ),
    ],
)
def test_a_scale_that_init_did_not_make_is_refused(change, message):
    params = {"w": weights((64, 200))}
    tx = hs.scale_by_adam(mu_dtype=E4M3, nu_dtype=E5M3)
    state = tx.init(params)._replace(**{name: {"w": x} for name, x in change.items()})
    with pytest.raises(ValueError) as caught:  # noqa: PT011 - the whole message is compared
        tx.update({"w": jnp.ones((64, 200))}, state)
    assert str(caught.value) == message


@pytest.mark.parametrize("scales", [{}, {"v": jnp.full((64, 2), 40, jnp.uint8)}, optax.EmptyState()])
def test_scales_that_are_not_there_are_missed(scales):
    params = {"w": weights((64, 200))}
    tx = hs.scale_by_adam(mu_dtype=E4M3, nu_dtype=E5M3)
    with pytest.raises(ValueError, match="the nu_scale of 'w' is missing; block_size=128 makes it uint8"):
        tx.update({"w": jnp.ones((64, 200))}, tx.init(params)._replace(nu_scale=scales))


@pytest.mark.slow
def test_a_marked_block_is_no_fault():
    params = {"w": weights((64, 200))}
    tx = hs.scale_by_adam(mu_dtype=E4M3, nu_dtype=E5M3)
    _, state = jax.jit(tx.update)({"w": jnp.ones((64, 200)).at[0, 0].set(jnp.nan)}, tx.init(params))
    assert int(state.nu_scale["w"][0, 0]) == 255
    tx.update({"w": jnp.ones((64, 200))}, state)

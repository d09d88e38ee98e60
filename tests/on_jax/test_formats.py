"""State formats: codes, scales and decoded values are those of the reference, under every weight rule."""

import dataclasses
import functools
import itertools

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import optax
import pytest

import halfstep_jax as hs
import halfstep_spec as spec
from backends.on_jax import from_jax
from compare import assert_same
from halfstep.float_formats import FLOAT_FORMATS
from halfstep.storage.floats import numbers_of
from halfstep.storage.state_dtypes import SCALED_DTYPES
from halfstep_jax.numbers.arrays import JaxArrays
from halfstep_jax.storage.float_codes import cast
from halfstep_jax.storage.formats import Encoded, Format
from halfstep_spec.vectors import Array
from on_jax.steps import (
    E4M3,
    E5M3,
    assert_same_in_every_mode,
    assert_trees_same,
    gradients,
    run,
    weights,
)

UNSIGNED = [name for name, codes in (spec.SCALED_CODES | spec.PLAIN_CODES).items() if not codes.signed]
ALL = list(dict.fromkeys((*SCALED_DTYPES, *UNSIGNED)))
PLAIN = [name for name, codes in spec.PLAIN_CODES.items() if codes.signed and name != "float32"]


def format_of(dtype, block_size=128):
    """Return the format that takes arrays of any size."""
    return Format(dtype) if dtype not in SCALED_DTYPES else hs.scaled(dtype, block_size, 0, 0)


def spec_format(fmt: Format) -> spec.Format:
    return spec.Format(**dataclasses.asdict(fmt))


def values(shape, seed: int, *, positive: bool) -> np.ndarray:
    """Return float32 over 60 binades, with zeros, extremes and, in some rows, what is not finite."""
    rng = np.random.default_rng(seed)
    x = (rng.standard_normal(shape) * np.exp2(rng.integers(-50, 10, shape))).astype(np.float32)
    x[0] = 0
    x[1] *= np.float32(2.0**100)
    x[2, ::3] = np.nextafter(np.float32(448), np.float32(rng.choice([0, 1000])))
    x[3, 5], x[4, -1], x[5, 0] = np.nan, np.inf, -np.inf
    x[6] = rng.choice(np.float32([0.0, -0.0, 1.0, 127.0, 3.4e38]), x[6].shape)
    return np.where(x < 0, -x, x) if positive else x


@pytest.mark.parametrize("dtype", ["float8_e4m3fn", "float8_e5m2", "float8_e3m4"])
def test_a_cast_as_on_tpu_reads_the_numbers_that_integers_read(dtype):
    patterns = np.arange(256, dtype=np.uint8)
    read = np.asarray(numbers_of(JaxArrays(), jnp.asarray(patterns, jnp.int32), FLOAT_FORMATS[dtype]))
    numbers = np.asarray(cast(jnp.asarray(patterns.view(getattr(ml_dtypes, dtype)))))
    stored = ~np.isinf(numbers)  # of infinity the code is that of NaN
    np.testing.assert_array_equal(numbers[stored], read[stored])


@pytest.mark.parametrize("rounding", ["nearest", "stochastic"])
@pytest.mark.parametrize("dtype", ALL)
def test_codes_scales_and_values_are_those_of_the_reference(dtype, rounding):
    fmt, positive = format_of(dtype), dtype in UNSIGNED
    encode = jax.jit(functools.partial(fmt.encode, keep_nonzero="always" if positive else "never"))
    for seed in range(3):
        x = values((16, 200), seed, positive=positive)
        words = spec.random_words(seed, 1, "w", 1, x.shape) if rounding == "stochastic" else None
        expected = spec_format(fmt).encode(x, words, keep_nonzero="always" if positive else "never")
        stored = encode(jnp.asarray(x), words)
        assert_same(from_jax(stored.codes), Array.of(expected.codes, fmt.code_dtype), dtype)
        if fmt.scaled:
            assert_same(from_jax(stored.scale), Array.of(expected.scale), dtype)
        decoded = spec_format(fmt).decode(expected)
        assert_same(from_jax(jax.jit(fmt.decode)(stored)), Array.of(decoded), dtype)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("shape", "block_size"),
    [
        *itertools.product([(4, 3, 5, 7)], [1, 3, 8, 100, 128, 4096, "row", None]),
        *itertools.product([(300,), (), (0, 8)], [8, "row", None]),
    ],
    ids=str,
)
def test_every_cut_into_blocks_is_that_of_the_reference(shape, block_size):
    fmt = format_of("float8_e4m3fn", block_size)
    x = np.random.default_rng(0).standard_normal(shape).astype(np.float32)
    encode, expected = jax.jit(lambda x: fmt.encode(x, None)), spec_format(fmt).encode(x, None)
    stored = encode(jnp.asarray(x))
    assert_same(from_jax(stored.codes), Array.of(expected.codes, fmt.code_dtype))
    assert_same(from_jax(stored.scale), Array.of(expected.scale))
    assert_same(from_jax(jax.jit(fmt.decode)(stored)), Array.of(spec_format(fmt).decode(expected)))
    assert_trees_same(fmt.zeros_like(jnp.asarray(x)), encode(jnp.zeros(shape)))


@pytest.mark.parametrize("dtype", SCALED_DTYPES)
def test_every_code_under_every_scale_is_decoded_as_in_the_reference(dtype):
    """But for codes that are never stored: infinity, -128, and anything but 0 in a marked block."""
    fmt = format_of(dtype, "row")
    codes = np.arange(65536 if dtype == "float16" else 256).astype(
        "uint16" if dtype == "float16" else "uint8"
    )
    if dtype in spec.FLOAT_FORMATS:
        float_format = spec.FLOAT_FORMATS[dtype]
        infinite = codes & (2 ** (float_format.bits - 1) - 1) == float_format.overflow_code
        codes = codes[~infinite]
    if dtype == "int8":
        codes = codes[codes != 128]
    low, high = spec.SCALED_CODES[dtype].scale_range
    scales = np.array([low, low + 1, 100, 127, 150, high - 1, high], np.uint8)[:, None]
    table = np.broadcast_to(codes, (scales.size, codes.size)).copy()
    given = table.view(getattr(ml_dtypes, dtype, fmt.code_dtype))
    decoded = jax.jit(fmt.decode)(Encoded(jnp.asarray(given), jnp.asarray(scales)))
    assert_same(from_jax(decoded), Array.of(spec_format(fmt).decode(spec.Encoded(table, scales))), dtype)


@pytest.mark.parametrize("dtype", ["float8_e4m3fn", "float8_e5m2", "float8_e3m4"])
def test_every_finite_code_is_that_of_ml_dtypes_and_is_stored_as_itself(dtype):
    codes = np.arange(256, dtype=np.uint8).view(getattr(ml_dtypes, dtype))
    codes = codes[np.isfinite(codes.astype(np.float32))]
    fmt = format_of(dtype, None)
    encode, decode = jax.jit(lambda x: fmt.encode(x, None)), jax.jit(fmt.decode)
    for shift in (-100, -3, 0, 40):
        x = codes.astype(np.float32) * np.float32(2.0**shift)
        stored = encode(jnp.asarray(x))
        assert_same(from_jax(stored.codes), from_jax(codes))
        assert_same(from_jax(decode(stored)), Array.of(x))


@pytest.mark.parametrize("dtype", ALL)
def test_what_is_stored_does_not_move_when_it_is_stored_again(dtype):
    """Under any words: a grid that stands still does not re-round every element at every step."""
    fmt, positive = format_of(dtype), dtype in UNSIGNED
    rng = np.random.default_rng(3)
    x = (rng.standard_normal((16, 200)) * np.exp2(rng.integers(-6, 0, (16, 200)))).astype(np.float32)
    x = np.abs(x) + np.float32(1e-3) if positive else x
    if dtype == "uroot8":
        # Its numbers under one scale are not among those under another: keep the scale of every block.
        x[:, ::20] = 64.0
    words = jnp.asarray(spec.random_words(0, 1, "w", 1, x.shape))

    @jax.jit
    def there_and_back(x, words):
        return fmt.decode(fmt.encode(x, words, keep_nonzero="always" if positive else "never"))

    once = there_and_back(jnp.asarray(x), words)
    again = there_and_back(once, jnp.full_like(words, 2**32 - 1))
    assert_same(from_jax(again), from_jax(once), dtype)


@pytest.mark.parametrize("dtype", ALL)
def test_a_second_moment_above_zero_is_never_stored_as_zero(dtype):
    x = np.exp2(-np.arange(0, 120, 0.5)).astype(np.float32).reshape(2, 120)
    fmt = format_of(dtype, None)
    decoded = jax.jit(lambda x, words: fmt.decode(fmt.encode(x, words, keep_nonzero="always")))
    for words in (None, jnp.zeros(x.shape, jnp.uint32)):
        assert (np.asarray(decoded(jnp.asarray(x), words)) > 0).all()
    # Two have no zero: 2^-43.6 times 2^-81, and 2^-49.4.
    zero = {"uroot8": np.float32(3.2259398e-38), "uroot4_e4m4": np.float32(1.323489e-15)}.get(dtype, 0)
    assert (np.asarray(decoded(jnp.zeros(x.shape), None)) == zero).all()


@pytest.mark.parametrize("dtype", ["float8_e4m3fn", "int8", "float8_e3m4"])
def test_mean_over_evenly_spread_words_is_the_value(dtype):
    """The top 16 bits of 65,536 words take every value once: the mean is off by 2^-16 of a gap at most."""
    words = jnp.asarray((np.arange(65536, dtype=np.uint32) << np.uint32(16)) + np.uint32(0x8000))
    x = np.full(65537, 0.31, np.float32)
    x[0] = 1.0  # the block's maximum
    fmt = format_of(dtype, None)
    words = jnp.concatenate([jnp.zeros(1, jnp.uint32), words])
    decoded = jax.jit(lambda x, words: fmt.decode(fmt.encode(x, words)))(jnp.asarray(x), words)
    decoded = np.asarray(decoded)[1:].astype(np.float64)
    assert np.unique(decoded).size == 2
    assert abs(decoded.mean() - float(x[1])) <= np.ptp(decoded) * 2.0**-16


RULES = tuple(spec.PARAM_STORAGES)
MU = [*PLAIN, "float32", *(hs.scaled(d, 8, 0, 0) for d in SCALED_DTYPES if d not in UNSIGNED)]
NU = ["bfloat16", "float32", "ufloat8_e6m2"]


NU += [hs.scaled(d, 8, 0, 0) for d in SCALED_DTYPES if hs.scaled(d).for_second_moments]


FIELDS = {"compensated": "compensation", "split8": "extra", "split16": "extra", "master": "master"}


def name_of(fmt) -> str:
    return fmt if isinstance(fmt, str) else f"scaled-{fmt.dtype}"


def for_spec(fmt):
    return fmt if isinstance(fmt, str) else spec_format(fmt)


def sample(seed: int, size: int):
    """Return a seeded sample of the product of formats, roundings, weight rules and dtypes of params."""
    roundings = ("nearest", "stochastic")
    product = list(itertools.product(MU, NU, roundings, RULES, ("bfloat16", "float16", "float32")))
    chosen = np.random.default_rng(seed).choice(len(product), size, replace=False)
    return [product[i] for i in chosen]


def check_product(mu, nu, rounding, rule, param_dtype):
    """Run three steps in both and compare everything that is stored."""
    adam = {"mu_rounding": rounding, "seed": 2**33 + 1}
    tx = hs.adamw(
        3e-3,
        weight_decay=0.1,
        mu_dtype=mu,
        nu_dtype=nu,
        param_storage=rule,
        **adam | {"mu_rounding": "nearest_unchecked" if rounding == "nearest" else rounding},
    )
    p, rows = weights((8, 20), param_dtype), gradients(3, (8, 20))
    params, state = run(tx, {"w": p}, {"w": rows})
    step = spec.Step(
        spec.ScaleByAdam(mu_dtype=for_spec(mu), nu_dtype=for_spec(nu), **adam),
        weight_decay=0.1,
        param_dtype=param_dtype,
        param_storage=rule,
    )
    expected = step.init(from_jax(p).bits)
    bits = from_jax(p).bits
    for g in np.asarray(rows):
        bits, expected = step.step(bits, g, expected, "w", np.float32(3e-3))
    assert_same(from_jax(params["w"]), Array.of(bits, param_dtype), "p")
    for name, stored in expected.rule.moments.items():
        codes = from_jax(optax.tree.get(state, name)["w"])
        np.testing.assert_array_equal(codes.bits, stored.codes, name)
        if stored.scale is not None:
            scale = optax.tree.get(state, f"{name}_scale")["w"]
            np.testing.assert_array_equal(scale, stored.scale, name)
    if expected.extra is not None:
        kept = from_jax(optax.tree.get(state, FIELDS[rule])["w"])
        assert_same(kept, Array.of(expected.extra, kept.dtype), FIELDS[rule])


@pytest.mark.parametrize("combination", sample(1, 4), ids=lambda c: "-".join(map(name_of, c)))
def test_any_format_under_any_weight_rule_has_the_bits_of_the_reference(combination):
    check_product(*combination)


@pytest.mark.slow
@pytest.mark.parametrize("combination", sample(2, 100), ids=lambda c: "-".join(map(name_of, c)))
def test_more_of_the_product_has_the_bits_of_the_reference(combination):
    check_product(*combination)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("mu", "nu"),
    [
        pytest.param(E4M3, E5M3, id="fp8"),
        pytest.param(hs.scaled("int8", "row"), hs.scaled("float16", 100), id="mixed", marks=pytest.mark.slow),
    ],
)
def test_op_by_op_compiled_and_over_devices_give_the_same_bits(mu, nu):
    assert_same_in_every_mode(hs.adamw(1e-3, weight_decay=0.1, mu_dtype=mu, nu_dtype=nu, seed=3))


@pytest.mark.parametrize("dtype", ["bfloat16", "float8_e4m3fn", "float8_e5m2"])
@pytest.mark.parametrize("b", [0.9, pytest.param(0.99, marks=pytest.mark.slow), 0.999])
def test_nearest_averages_of_one_stop_where_theory_says(dtype, b):
    """An EMA of g = 1 under nearest rounding: 1 - b meets half a gap; the codes' scale adds range alone."""
    stops = {
        "bfloat16": {0.9: 1.0, 0.99: 1.0, 0.999: 0.25},
        "float8_e4m3fn": {0.9: 0.75, 0.99: 0.21875, 0.999: 0.0234375},
        "float8_e5m2": {0.9: 0.5, 0.99: 0.125, 0.999: 0.015625},
    }
    fmt = dtype if dtype == "bfloat16" else format_of(dtype, None)
    tx = hs.scale_by_adam(b2=b, nu_dtype=fmt, nu_rounding="nearest_unchecked")
    g = {"w": jnp.ones((2, 2))}

    @jax.jit
    def steps(state):
        return jax.lax.fori_loop(0, 3000, lambda _, state: tx.update(g, state)[1], state)

    state = steps(tx.init({"w": jnp.ones((2, 2), jnp.bfloat16)}))
    nu = state.nu["w"] if dtype == "bfloat16" else fmt.decode(Encoded(state.nu["w"], state.nu_scale["w"]))
    nu = float(np.asarray(nu, np.float32)[0, 0])
    assert nu == stops[dtype][b] if dtype == "bfloat16" and b == 0.999 else nu <= stops[dtype][b]

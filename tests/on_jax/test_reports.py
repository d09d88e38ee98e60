"""What is said of a run before it: what every array is kept in and why, and what all of them take."""

import sys

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax.sharding import AbstractMesh, NamedSharding
from jax.sharding import PartitionSpec as P

import halfstep_jax as hs
from halfstep.kernels.build import find_cc
from on_jax.steps import sharded

SHAPES = {
    "w": jax.ShapeDtypeStruct((64, 128), "bfloat16"),
    "b": jax.ShapeDtypeStruct((128,), "bfloat16"),
    "norm": jax.ShapeDtypeStruct((128,), "float32"),
}
FP8 = {"mu_dtype": hs.scaled("float8_e4m3fn"), "nu_dtype": hs.scaled("ufloat8_e5m3")}
CHAINS = {
    "default": lambda: hs.adamw(1e-3),
    "fp8, split8": lambda: hs.adamw(1e-3, param_storage="split8", **FP8),
    "four_bit": lambda: hs.adamw(1e-3, **hs.recipes.four_bit),
    "store_state": lambda: hs.store_state(optax.adam(1e-3), hs.scaled("int8")),
    "optax": lambda: optax.adamw(1e-3),
    "optax, split16": lambda: hs.store_params(optax.adamw(1e-3), "split16"),
    "optax, master": lambda: hs.store_params(optax.adamw(1e-3), "master"),
}
QUICK = ("fp8, split8", "store_state", "optax, split16")


@pytest.mark.parametrize(
    "name", [pytest.param(n, marks=[] if n in QUICK else pytest.mark.slow) for n in CHAINS]
)
def test_the_bytes_that_are_said_are_those_of_the_arrays(name):
    tx, params = CHAINS[name](), jax.tree.map(lambda x: jnp.zeros(x.shape, x.dtype), SHAPES)
    held = sum(x.nbytes for x in jax.tree.leaves((params, tx.init(params))))
    small = sum(x.nbytes for x in jax.tree.leaves(tx.init(params)) if x.ndim == 0 or x.shape == (2,))
    assert sum(x.nbytes for x in hs.describe(tx, SHAPES).arrays) == held - small
    report = hs.memory_report(tx, SHAPES)
    assert report.total - report.nbytes["gradients"] == held
    assert report.float32 == 16 * (64 * 128 + 256)
    assert report.per_device == report.nbytes


def test_a_format_that_is_not_used_says_why():
    found = hs.describe(hs.adamw(1e-3, **FP8), SHAPES)
    assert (found.of("w", "mu").format, found.of("w", "mu").why) == (
        "float8_e4m3fn, blocks of 128",
        "asked for",
    )
    b = found.of("b", "mu")
    assert (b.format, b.rounding) == ("float32", "none")
    assert b.why == "asked for float8_e4m3fn, blocks of 128, but 128 elements are fewer than min_size=4096"
    assert "note 1: asked for float8_e4m3fn, blocks of 128, but 128 elements" in str(found)


@pytest.mark.skipif(find_cc() is None, reason="there is no C compiler")
@pytest.mark.parametrize(
    ("tx", "form"),
    [
        (hs.adamw(1e-3), "stores all 3 weights by a generated kernel."),
        (
            hs.adamw(1e-3, nu_dtype=hs.codebook("udynamic8")),
            "stores 1 of 3 weights by XLA: there is no generated form",
        ),
        (optax.adam(1e-3), "stores all weights by XLA: it is no optimizer of halfstep_jax"),
    ],
)
def test_the_form_of_a_step_is_said_below_the_table(tx, form):
    found = hs.describe(tx, SHAPES)
    assert found.step.startswith(f"update_params {form}")
    assert found.step in " ".join(str(found).split())


def test_weights_on_several_devices_are_said_to_be_stepped_by_xla():
    params = {"w": sharded(jnp.ones((64, 128), jnp.bfloat16), "x")}
    assert (
        hs.describe(hs.adamw(1e-3), params).step
        == "update_params stores all weights by XLA: they are on 8 devices."
    )


def test_roundings_are_those_of_the_step():
    found = hs.describe(hs.adamw(1e-3, mu_dtype="bfloat16", b1=0.5, mu_rounding="nearest"), SHAPES)
    rounded = {name: found.of("w", name).rounding for name in ("weight", "mu", "nu")}
    assert rounded == {"weight": "stochastic", "mu": "nearest", "nu": "stochastic"}
    assert found.of("norm").why == "float32 weights pass through"
    assert found.of("norm", "nu").why == "by default for weights that the link sees in float32"


def test_a_weight_that_no_link_stores_shows():
    for tx in (optax.adamw(1e-3), hs.adamw(1e-3, param_storage="nearest")):
        assert hs.describe(tx, SHAPES).of("w").why == "no link stores it: it is rounded to nearest"
    parts = {"a": hs.adamw(1e-3, param_storage="master"), "b": optax.sgd(0.1)}
    found = hs.describe(optax.partition(parts, {"w": "a", "b": "b", "norm": "b"}), SHAPES)
    assert found.of("w").why == "keep_master_params"
    assert found.of("w", "master").format == "float32"
    assert found.of("b").why == "no link stores it: it is rounded to nearest"
    with pytest.raises(KeyError, match="There is no nu of 'b'"):
        found.of("b", "nu")


@pytest.mark.slow
def test_a_description_takes_time_in_proportion_to_the_leaves():
    """Eight times the leaves, at most 16 times the calls: twice what is due, far from the 64 of a square."""

    tx = hs.adamw(1e-3)

    def calls(leaves: int) -> int:
        shapes = {f"layer_{i}/w": jax.ShapeDtypeStruct((8, 8), "bfloat16") for i in range(leaves)}
        count = 0

        def count_calls(frame, event, arg):
            nonlocal count
            count += event in ("call", "c_call")

        sys.setprofile(count_calls)
        try:
            hs.describe(tx, shapes)
        finally:
            sys.setprofile(None)
        return count

    calls(2)  # what is made once
    assert calls(400) < 16 * calls(50)


def test_a_model_larger_than_the_machine_is_counted_per_device():
    params = {"w": jax.ShapeDtypeStruct((2**17, 2**19), "bfloat16")}
    where = NamedSharding(AbstractMesh((16, 8), ("x", "y")), P("x", "y"))
    report = hs.memory_report(hs.adamw(1e-3, param_storage="split8", **FP8), params, {"w": where})
    # Weights and gradients in 2 bytes, 8 further bits, two moments in a byte, and two scales of 128 each.
    # Of each of two links a count, a seed and a tag.
    assert report.total == 2**36 * 7 + 2**36 // 64 + 2 * (4 + 8 + 4)
    assert report.total_per_device == (2**36 * 7 + 2**36 // 64) // 128 + 2 * (4 + 8 + 4)
    assert report.float32_per_device == 2**36 * 16 // 128
    lines = str(report).splitlines()
    assert lines[-3].split() == ["in", "all", "7.016", "482.11", "GB", "3.77", "GB"]
    np.testing.assert_equal(report.size, 2**36)


def test_a_small_model_is_counted_in_small_units():
    lines = str(hs.memory_report(hs.adamw(1e-3), SHAPES)).splitlines()
    # 64 x 128 + 128 weights of 2 bytes and 128 of 4, and of the state an int32 in each of two links.
    assert [line.split()[-2:] for line in lines if line.startswith(("weights", "count"))] == [
        ["17.15", "kB"],
        ["8", "B"],
    ]

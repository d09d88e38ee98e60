"""Our own operations under everything that JAX does to an operation: the bits of the plain ones.

Contract: A2, A3. On a CPU; what they are lowered to for a GPU is in `test_roots.py`.
"""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P

import halfstep_jax as hs
from halfstep_jax.numbers import roots
from halfstep_jax.xla.exact import opaque, straight_through
from on_jax.steps import take_step

X: Any = np.linspace(0.5, 9.0, 24, dtype=np.float32).reshape(4, 6)
Y: Any = X[::-1] + np.float32(1)
ZERO = np.uint32(0)
# One more than a root: XLA takes a quotient by a bare root for another operation.
EXPECTED: Any = X / (np.sqrt(Y) + np.float32(1))


def ours(x, y, zero):
    return roots.divide(opaque(x, zero), roots.sqrt(opaque(y, zero)) + np.float32(1))


def plain(x, y):
    return x / (jnp.sqrt(y) + 1)


def assert_same(found, expected: Any = EXPECTED):
    np.testing.assert_array_equal(np.asarray(found), expected)


@pytest.mark.parametrize("transform", [lambda f: f, jax.jit], ids=["op by op", "jit"])
def test_a_batch_has_the_bits_of_its_parts(transform):
    for axes, zero in (((0, 0, None), ZERO), ((1, 1, None), ZERO), ((0, 0, 0), np.zeros(4, np.uint32))):
        mapped = transform(jax.vmap(ours, axes, out_axes=axes[0]))
        assert_same(mapped(X, Y, zero))
    assert_same(
        transform(jax.vmap(ours, (None, 0, None)))(X[1], Y, ZERO), ours(np.tile(X[1], (4, 1)), Y, ZERO)
    )
    assert_same(transform(jax.vmap(ours, (None, 1, None), 1))(X[:, 1], Y, ZERO), ours(X[:, [1] * 6], Y, ZERO))
    assert_same(
        transform(jax.vmap(opaque, (None, 0)))(np.float32(0.3), np.zeros(2, np.uint32)),
        X.dtype.type([0.3] * 2),
    )


def test_with_jit_disabled_bits_are_the_same():
    with jax.disable_jit():
        assert_same(jax.jit(ours)(X, Y, ZERO))


@pytest.mark.parametrize("argument", [0, 1])
def test_derivatives_are_those_of_plain_operations_also_where_a_step_is_computed_again(argument):
    total = lambda x, y: ours(x, y, ZERO).sum()  # noqa: E731
    due = jax.jacfwd(lambda x, y: plain(x, y).sum(), argument)(X, Y)
    for found in (
        jax.jit(jax.grad(jax.checkpoint(total), argument)),
        jax.vmap(jax.grad(total, argument)),
        jax.jacfwd(total, argument),
    ):
        np.testing.assert_allclose(found(X, Y), due, rtol=1e-6)


def test_a_straight_derivative_has_the_dtype_of_what_is_rounded():
    rounded, tangent = jax.jvp(lambda x: straight_through(x, x.astype(jnp.bfloat16)), (X,), (Y,))
    assert rounded.dtype == tangent.dtype == jnp.bfloat16


def test_a_program_for_several_platforms_has_the_bits_of_each():
    exported = jax.export.export(jax.jit(ours), platforms=("cpu", "cuda", "tpu"))(X, Y, ZERO)
    assert_same(exported.call(X, Y, ZERO))
    # The root as it is, and the one that is corrected.
    assert exported.mlir_module().count("stablehlo.sqrt") >= 2


@pytest.mark.parametrize("check_vma", [True, False])
def test_in_a_shard_what_varies_and_what_does_not_meet(check_vma):
    mesh = jax.sharding.Mesh(np.array(jax.devices()[:4]), "d")
    zeros = np.zeros(4, np.uint32)
    for specs, x, y in (((P("d"), P("d")), X, Y), ((P("d"), P()), X, Y[:1]), ((P(), P("d")), X[:1], Y)):
        shard = jax.shard_map(
            lambda x, y, zero: ours(x, y, zero[0]),
            mesh=mesh,
            in_specs=(*specs, P("d")),
            out_specs=P("d"),
            check_vma=check_vma,
        )
        assert_same(jax.jit(shard)(x, y, zeros), ours(np.tile(x, (4 // len(x), 1)), y, ZERO))


def test_explicit_axes_pass_through():
    axes = (AxisType.Explicit,) * 2
    mesh = jax.sharding.Mesh(np.array(jax.devices()[:4]).reshape(2, 2), ("a", "b"), axis_types=axes)
    with jax.set_mesh(mesh):
        x, y = (jax.device_put(z, NamedSharding(mesh, P("a", "b"))) for z in (X, Y))
        found = jax.jit(ours)(x, y, ZERO)
        assert_same(found)
        assert jax.typeof(found).sharding.spec == P("a", "b")


def test_a_trace_has_one_equation_for_each():
    params = {"w": jax.ShapeDtypeStruct((16, 128), jnp.bfloat16)}
    tx = hs.adamw(1e-3, weight_decay=0.1)
    step = jax.jit(lambda *args: take_step(tx, *args))
    text = str(step.trace(params, jax.eval_shape(tx.init, params), params).jaxpr)
    assert "opaque" in text
    assert not any(name in text for name in ("custom_jvp", "platform_index", "cond["))

"""`clip_by_global_norm`: float32 norms of 16-bit updates, and norms that no order of adding changes."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import halfstep_jax as hs
from halfstep_jax.numbers.global_norm import global_norm
from halfstep_spec.numbers import global_norm as spec_norm


def tree(seed: int = 0, scale: float = 1.0) -> dict[str, jax.Array]:
    rng = np.random.default_rng(seed)
    shapes = {"a": (3, 70), "b": (), "c": (300,), "d": (0, 4), "e": (2, 9, 17)}
    draw = lambda shape: np.exp(2 * rng.normal(size=shape)) * rng.normal(size=shape) * scale  # noqa: E731
    return {name: jnp.asarray(draw(shape), jnp.float32) for name, shape in shapes.items()}


@pytest.mark.slow
@pytest.mark.parametrize("exact", [True, False])
def test_equal_leaves_in_bfloat16_are_clipped_to_the_bound(exact):
    updates = {f"{i}": jnp.ones((), jnp.bfloat16) for i in range(400)}
    tx = hs.clip_by_global_norm(1.0, exact=exact)
    clipped, _ = tx.update(updates, tx.init(updates))
    norm = np.sqrt(sum(float(u) ** 2 for u in clipped.values()))
    assert abs(norm - 1) < 402 * 2.0**-24  # a sum of 400 equal numbers, a quotient, a product
    # Optax adds their squares in bfloat16, where 256 + 1 is 256.
    theirs, _ = optax.clip_by_global_norm(1.0).update(updates, optax.EmptyState())
    assert np.sqrt(sum(float(u) ** 2 for u in theirs.values())) > 1.2


@pytest.mark.slow
@pytest.mark.parametrize("scale", [1e-30, 1.0, 1e30])
def test_an_exact_norm_has_the_bits_of_the_spec(scale):
    updates = tree(scale=scale)
    arrays = list(updates.values())
    expected = spec_norm.global_norm([np.asarray(x) for x in arrays], exact=True)
    exact = functools.partial(global_norm, exact=True)
    for norm in (exact(arrays), jax.jit(exact)(arrays), exact(arrays[::-1])):
        assert np.asarray(norm).tobytes() == expected.tobytes()


@pytest.mark.slow
@pytest.mark.parametrize("exponent", range(16, 21))
def test_the_exact_norm_of_equal_numbers_is_the_root_of_their_count(exponent):
    """The sum of 2^46 each passes 2^62 to 2^66: of float32's 24 bits the root needs no more."""
    norm = global_norm([jnp.ones(2**exponent)], exact=True)
    assert float(norm) == np.sqrt(np.float32(2.0**exponent))


def test_an_exact_norm_of_many_elements_carries_between_limbs():
    x = jnp.full((1 << 21) + 77, 1.9999999, jnp.float32)
    expected = spec_norm.global_norm([np.asarray(x)], exact=True)
    assert np.asarray(global_norm([x], exact=True)).tobytes() == expected.tobytes()


def test_sharding_does_not_change_the_bits_of_an_exact_norm():
    mesh = jax.sharding.Mesh(np.array(jax.devices()), ("x",))
    x = jnp.asarray(np.random.default_rng(0).normal(size=(16, 33)), jnp.float32)
    exact = functools.partial(global_norm, exact=True)
    spread = jax.device_put(x, jax.NamedSharding(mesh, jax.sharding.PartitionSpec("x")))
    assert np.asarray(jax.jit(exact)([spread])).tobytes() == np.asarray(exact([x])).tobytes()


@pytest.mark.slow
def test_it_follows_optax_in_float32():
    updates = tree()
    ours, _ = hs.clip_by_global_norm(0.5).update(updates, optax.EmptyState())
    theirs, _ = optax.clip_by_global_norm(0.5).update(updates, optax.EmptyState())
    for name in updates:
        # Sums of 800 squares in two orders, and three more roundings on either side.
        np.testing.assert_allclose(ours[name], theirs[name], rtol=(800 + 6) * 2.0**-24)


def test_none_and_an_empty_tree_are_left_alone():
    tx = hs.clip_by_global_norm(1.0, exact=True)
    assert tx.update({"a": None}, tx.init({})) == ({"a": None}, optax.EmptyState())

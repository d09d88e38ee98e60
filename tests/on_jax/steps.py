"""What the tests of halfstep_jax share: weights, gradients, steps, and the comparison to the bit."""

import functools
import types

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import optax

import halfstep_jax as hs
import halfstep_spec as spec
from backends.on_jax import from_jax
from compare import assert_same

DTYPES = {"float32": np.float32, "bfloat16": ml_dtypes.bfloat16, "float16": np.float16}
PLAIN_STATES = tuple(DTYPES)


def assert_trees_same(actual, expected, context: str = "") -> None:
    """Compare two trees of arrays to the bit; NaN is one class."""
    assert jax.tree.structure(actual) == jax.tree.structure(expected), context
    pairs = zip(jax.tree_util.tree_leaves_with_path(actual), jax.tree.leaves(expected), strict=True)
    for (path, leaf), other in pairs:
        assert_same(from_jax(leaf), from_jax(other), f"{context}{jax.tree_util.keystr(path)}")


def weights(shape, dtype="bfloat16", seed: int = 0) -> jax.Array:
    """Return weights near 0.05, of both signs."""
    values = np.random.default_rng(seed).standard_normal(shape) * 0.05
    return jnp.asarray(values.astype(np.float32).astype(DTYPES[dtype]))


def gradients(steps: int, shape, dtype="float32", seed: int = 1) -> jax.Array:
    """Return one gradient a step, over some eight binades."""
    rng = np.random.default_rng(seed)
    shape = (shape,) if isinstance(shape, int) else shape
    scales = np.exp2(rng.integers(-8, 1, (steps, *(1 for _ in shape))))
    values = rng.standard_normal((steps, *shape)) * scales
    return jnp.asarray(values.astype(np.float32).astype(DTYPES[dtype]))


def take_step(tx, params, state, gradient, **extra_args):
    """Take one step: what every training loop does."""
    updates, state = tx.update(gradient, state, params, **extra_args)
    return optax.apply_updates(params, updates), state


def run(tx, params, gradient_rows, *, compiled: bool = True):
    """Take a step per row of gradients from a new state; return the final params and state."""
    step = functools.partial(take_step, tx)
    step = jax.jit(step) if compiled else step
    state = tx.init(params)
    for k in range(jax.tree.leaves(gradient_rows)[0].shape[0]):
        params, state = step(params, state, jax.tree.map(lambda rows, k=k: rows[k], gradient_rows))
    return params, state


def moments(state):
    """Return (mu, nu) of a state, wherever they are in it."""
    return optax.tree.get(state, "mu"), optax.tree.get(state, "nu")


def spec_run(step: spec.Step, params, gradient_rows, leaf: str, learning_rate: float):
    """Take the same steps by the reference; return patterns of the params, and of what its state holds."""
    p = np.asarray(params)
    p = p.view(f"u{p.itemsize}")
    state = step.init(p)
    for g in np.asarray(gradient_rows, np.float32):
        p, state = step.step(p, g, state, leaf, np.float32(learning_rate))
    stored = {name: moment.codes for name, moment in state.rule.moments.items()}
    scales = {f"{name}_scale": moment.scale for name, moment in state.rule.moments.items()}
    return p, types.SimpleNamespace(**stored, **scales, extra=state.extra)


def spec_adamw(param_dtype: str, param_storage: str = "stochastic", weight_decay: float = 0.1, **adam):
    """Return the reference's AdamW."""
    return spec.Step(
        spec.ScaleByAdam(**adam),
        weight_decay=weight_decay,
        param_dtype=param_dtype,
        param_storage=param_storage,
    )


def sharded(array, *axes):
    """Place an array over the eight devices, its axes along the named ones of a 4 x 2 mesh ("x", "y")."""
    mesh = jax.sharding.Mesh(np.array(jax.devices()[:8]).reshape(4, 2), ("x", "y"))
    return jax.device_put(array, jax.sharding.NamedSharding(mesh, jax.sharding.PartitionSpec(*axes)))


_COLLECTIVES = (
    "all-gather",
    "all-reduce",
    "all-to-all",
    "collective-broadcast",
    "collective-permute",
    "reduce-scatter",
)


def assert_no_collectives(compiled) -> None:
    """Say which collectives stand in a compiled program."""
    text = compiled.as_text()
    assert not [name for name in _COLLECTIVES if name in text]


RULES = tuple(spec.PARAM_STORAGES)
KEEPING = [name for name in spec.PARAM_STORAGES if name not in ("nearest", "stochastic")]
W = {"w": jnp.ones(3, jnp.bfloat16)}
G = {"w": jnp.ones(3, jnp.float32)}


def update(tx, updates, params=W, seen=W):
    """Take one update of a state that saw the params `seen`."""
    return tx.update(updates, tx.init(seen), params)


E4M3, E5M3 = hs.scaled("float8_e4m3fn"), hs.scaled("ufloat8_e5m3")
FP8 = {"mu_dtype": E4M3, "nu_dtype": E5M3}
EIGHT = {"mu_dtype": hs.codebook("dynamic8"), "nu_dtype": hs.codebook("udynamic8")}
FOUR = {"mu_dtype": hs.relative("int4", 128), "nu_dtype": hs.scaled("uroot8")}


def assert_same_in_every_mode(tx, dtype: str = "bfloat16") -> None:
    """Hold steps op by op, and over devices, against those of one compiled function."""
    p, g = {"w": weights((64, 200), dtype)}, {"w": gradients(3, (64, 200))}
    expected = run(tx, p, g)
    assert_trees_same(run(tx, p, g, compiled=False), expected, "op by op")
    split = {"w": sharded(p["w"], ("x", "y"))}
    assert_trees_same(run(tx, split, {"w": sharded(g["w"], None, ("x", "y"))}), expected, "over devices")

"""Other libraries' loops over our transforms, and their checkpoints: a resumed run has the same bits.

`make clients-jax` runs these: three steps, and two steps, a checkpoint and one step more. Models are tiny.
"""

import functools
import importlib.util
import pickle

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import halfstep_jax as hs

X = jnp.asarray(np.random.default_rng(0).normal(size=(8, 4)), jnp.bfloat16)
# Moments in codes with scales: all that a checkpoint may lose.
CODES = {"mu_dtype": hs.scaled("float8_e4m3fn", 4, 0, 0), "nu_dtype": "ufloat16_e7m9"}


def needs(*clients: str):
    """Mark a test that drives libraries: `make clients-jax` runs it, if they are there."""
    missing = [name for name in clients if importlib.util.find_spec(name) is None]
    skip = pytest.mark.skipif(bool(missing), reason=f"{', '.join(missing)}: not installed")
    # Clients warn of what they do themselves. Some are among the development dependencies.
    marks = (pytest.mark.clients, pytest.mark.slow, skip, pytest.mark.filterwarnings("default"))
    return lambda test: functools.reduce(lambda marked, mark: mark(marked), marks, test)


def pickled(tree, folder):
    """Write a tree, its arrays in NumPy, and read it."""
    file = folder / "state.pickle"
    file.write_bytes(pickle.dumps(jax.tree.map(np.asarray, tree)))
    return jax.tree.map(jnp.asarray, pickle.loads(file.read_bytes()))


def bits(tree) -> list[bytes]:
    """Return the bytes of all arrays of a tree; other leaves, such as functions, have none."""
    return [np.asarray(x).tobytes() for x in jax.tree.leaves(tree) if hasattr(x, "dtype")]


def resumes(step, state, checkpoint):
    """Take three steps, and the same with a checkpoint after two; return the last state."""
    first = functools.reduce(lambda s, _: step(s), range(2), state)
    # First: a step may donate its state.
    resumed = step(checkpoint(first))
    whole = step(first)
    assert bits(resumed) == bits(whole)
    return whole


@needs("numpyro")
def test_numpyro_fits_and_resumes_to_the_bit(tmp_path):
    import numpyro
    from numpyro.infer import SVI, Trace_ELBO
    from numpyro.infer.autoguide import AutoNormal

    def model(x):
        mean = numpyro.sample("mean", numpyro.distributions.Normal(0.0, 1.0).expand([4]).to_event(1))
        numpyro.sample("x", numpyro.distributions.Normal(mean, 1.0).to_event(1), obs=x)

    tx = hs.adam(optax.cosine_decay_schedule(1e-2, 10), **CODES)
    svi = SVI(model, AutoNormal(model), numpyro.optim.optax_to_numpyro(tx), Trace_ELBO())
    data = X.astype(jnp.float32)
    state = svi.init(jax.random.PRNGKey(0), data)
    update = jax.jit(lambda state: svi.update(state, data)[0])
    last = resumes(update, state, functools.partial(pickled, folder=tmp_path))
    assert (svi.get_params(last)["mean_auto_loc"] != svi.get_params(state)["mean_auto_loc"]).any()


@needs("optimistix", "equinox")
def test_optimistix_steps_bfloat16_weights_and_resumes_to_the_bit(tmp_path):
    """It adds updates itself; `cast_updates` keeps the dtype of the weights."""
    import equinox as eqx
    import optimistix

    def loss(w, args):
        return ((X @ w - 1) ** 2).mean().astype(jnp.float32), None

    solver = optimistix.OptaxMinimiser(hs.chain(hs.adam(1e-2), hs.cast_updates()), rtol=1e-3, atol=1e-3)
    start = jnp.ones(4, jnp.bfloat16)
    shapes = jax.eval_shape(loss, start, None)
    rest = (None, {})  # arguments and options
    state = solver.init(loss, start, *rest, *shapes, frozenset())

    @eqx.filter_jit
    def step(carry):
        return solver.step(loss, carry[0], *rest, carry[1], frozenset())[:2]

    def checkpoint(carry):
        eqx.tree_serialise_leaves(tmp_path / "state.eqx", carry)
        return eqx.tree_deserialise_leaves(tmp_path / "state.eqx", carry)

    carry = resumes(step, (start, state), checkpoint)
    assert carry[0].dtype == jnp.bfloat16
    assert (carry[0] != start).any()


@needs("equinox", "diffrax")
def test_a_neural_ode_of_equinox_and_diffrax_resumes_to_the_bit(tmp_path):
    import diffrax
    import equinox as eqx

    model = eqx.nn.MLP(4, 4, width_size=8, depth=1, dtype=jnp.bfloat16, key=jax.random.key(0))
    # eqx.tree_serialise_leaves cannot read floats of 8 bits; these codes are integers.
    tx = hs.adamw(1e-2, recipe="one_pass", param_storage="split8")

    def loss(model, x):
        def field(t, y, args):
            return jax.vmap(model)(y.astype(jnp.bfloat16)).astype(jnp.float32)

        start = x.astype(jnp.float32)
        ends = diffrax.diffeqsolve(diffrax.ODETerm(field), diffrax.Euler(), 0.0, 1.0, 0.25, start)
        return (ends.ys**2).mean()

    @eqx.filter_jit
    def step(carry):
        model, state = carry
        grads = eqx.filter_grad(loss)(model, X)
        params, rest = eqx.partition(model, eqx.is_inexact_array)
        updates, state = tx.update(grads, state, params)
        return eqx.combine(optax.apply_updates(params, updates), rest), state

    def checkpoint(carry):
        eqx.tree_serialise_leaves(tmp_path / "run.eqx", carry)
        return eqx.tree_deserialise_leaves(tmp_path / "run.eqx", carry)

    state = tx.init(eqx.filter(model, eqx.is_inexact_array))
    last = resumes(step, (model, state), checkpoint)
    assert (last[0].layers[0].weight != model.layers[0].weight).any()


@needs("haiku")
def test_haiku_under_multi_steps_resumes_to_the_bit_between_two_steps(tmp_path):
    import haiku as hk

    net = hk.without_apply_rng(hk.transform(lambda x: hk.nets.MLP([8, 2])(x)))
    params = jax.tree.map(lambda p: p.astype(jnp.bfloat16), net.init(jax.random.key(0), X))
    tx = optax.MultiSteps(hs.adamw(optax.warmup_cosine_decay_schedule(1e-3, 1e-2, 2, 10), **CODES), 3)

    @jax.jit
    def step(carry):
        params, state = carry
        grads = jax.grad(lambda p: (net.apply(p, X) ** 2).mean().astype(jnp.float32))(params)
        updates, state = tx.update(grads, state, params)
        return optax.apply_updates(params, updates), state

    last, _ = resumes(step, (params, tx.init(params)), functools.partial(pickled, folder=tmp_path))
    assert any((a != b).any() for a, b in zip(*map(jax.tree.leaves, (last, params)), strict=True))


@needs("tunix")
def test_the_trainer_of_tunix_resumes_to_the_bit(tmp_path):
    """Its checkpoints have the weights alone: the state of the optimizer goes beside them."""
    import orbax.checkpoint as ocp
    from flax import nnx
    from tunix.sft import peft_trainer

    def trained(folder, steps, more=()):
        model = nnx.Linear(4, 4, param_dtype=jnp.bfloat16, rngs=nnx.Rngs(0))
        saves = ocp.CheckpointManagerOptions(save_interval_steps=1)
        config = peft_trainer.TrainingConfig(
            eval_every_n_steps=100,
            max_steps=steps,
            checkpoint_root_directory=str(folder),
            checkpointing_options=saves,
        )
        trainer = peft_trainer.PeftTrainer(model, hs.adamw(1e-2, **CODES), config)
        trainer = trainer.with_loss_fn(lambda model, x: (model(x) ** 2).mean().astype(jnp.float32))
        for state in more:
            nnx.update(trainer.optimizer, state)
        trainer.train([{"x": X}] * steps)
        return trainer

    whole = trained(tmp_path / "whole", 3)
    first = trained(tmp_path / "part", 2)
    moments = pickled(nnx.state(first.optimizer), tmp_path)
    resumed = trained(tmp_path / "part", 3, [moments])
    assert bits(nnx.state(resumed.model)) == bits(nnx.state(whole.model))
    assert bits(nnx.state(resumed.optimizer)) == bits(nnx.state(whole.optimizer))


@needs("orbax")
@pytest.mark.parametrize("recipe", [None, "one_pass", "eight_bit", "four_bit", "near_float32"])
def test_the_checkpoint_manager_of_orbax_resumes_to_the_bit(recipe, tmp_path):
    import orbax.checkpoint as ocp

    tx = hs.adamw(1e-2, recipe=recipe)
    params = {"w": jnp.ones((64, 128), jnp.bfloat16), "b": jnp.zeros(4, jnp.bfloat16)}

    @jax.jit
    def step(carry):
        params, state = carry
        updates, state = tx.update(jax.tree.map(lambda p: p + 1, params), state, params)
        return optax.apply_updates(params, updates), state

    def checkpoint(carry):
        with ocp.CheckpointManager(tmp_path) as manager:
            manager.save(2, args=ocp.args.StandardSave(carry))
            manager.wait_until_finished()
        with ocp.CheckpointManager(tmp_path) as manager:
            target = jax.eval_shape(lambda: (params, tx.init(params)))
            return manager.restore(manager.latest_step(), args=ocp.args.StandardRestore(target))

    last, _ = resumes(step, (params, tx.init(params)), checkpoint)
    assert (last["w"] != 1).any()

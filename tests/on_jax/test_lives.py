"""What a transform lives through: donation, caches, restarts, `disable_jit`."""

import functools
import importlib
import inspect
import io
import pickle
import types
import typing

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import halfstep_jax as hs
import halfstep_spec as spec
from on_jax.steps import assert_trees_same, gradients, run, take_step, weights

P = {"w": weights((6, 4))}
G = {"w": gradients(1, (6, 4))[0]}


def makers():
    yield "round_stochastically", hs.round_stochastically
    yield "adamw", functools.partial(hs.adamw, 1e-3)
    yield "split8", functools.partial(hs.adamw, 1e-3, param_storage="split8")
    yield "store_state", lambda seed=0: hs.store_state(optax.adam(1e-3), "bfloat16", seed=seed)


MAKERS = [pytest.param(make, id=name) for name, make in makers()]


@pytest.mark.parametrize("make", MAKERS)
def test_a_transform_outlives_a_donated_state(make):
    tx = make()
    donated = jax.jit(lambda state: jax.tree.map(jnp.copy, state), donate_argnums=0)
    first = jax.tree.map(np.asarray, tx.init(P))
    donated(tx.init(P))
    assert_trees_same(tx.init(P), first)


def makes_a_transform(function) -> bool:
    returned = typing.get_type_hints(function).get("return") if inspect.isfunction(function) else None
    return inspect.isclass(returned) and issubclass(returned, optax.GradientTransformation)


# For the parameters without a default.
GIVEN = {
    "config": {"name": "adamw", "learning_rate": 1e-3},
    "decay": 0.9,
    "every_k": 2,
    "format": "bfloat16",
    "inner": optax.sgd(1e-3, momentum=0.9),
    "learning_rate": 1e-3,
    "links": hs.adam(1e-3),
    "max_norm": 1.0,
    "specs": jax.sharding.PartitionSpec(),
    "threshold": 1.0,
}
TRANSFORMS = [name for name in hs.__all__ if name != "as_transform" and makes_a_transform(getattr(hs, name))]


@pytest.mark.parametrize("name", TRANSFORMS)
def test_weights_and_first_state_share_no_buffer(name):
    """With the weights: two leaves of one buffer would be donated twice."""
    fields = inspect.signature(getattr(hs, name)).parameters.values()
    needed = [x.name for x in fields if x.default is x.empty and x.kind != x.VAR_KEYWORD]
    tx = getattr(hs, name)(*(GIVEN[x] for x in needed))
    params = {"w": jnp.copy(P["w"]), "v": P["w"].astype(jnp.float32)}
    buffers = [x.unsafe_buffer_pointer() for x in jax.tree.leaves((params, tx.init(params)))]
    assert len(set(buffers)) == len(buffers)


inside_wrappers = pytest.mark.parametrize(
    "make",
    [
        lambda rate: hs.adamw(rate, recipe="near_float32"),
        lambda rate: hs.adamw(rate, recipe="full_precision"),
        lambda rate: hs.adamw(rate, param_storage="master"),
        lambda rate: hs.store_state(hs.adamw(rate), "bfloat16", select=lambda name, x: "mu" in name),
        lambda rate: hs.accumulate_gradients(hs.adamw(rate), 1),
    ],
    ids=["split8", "split16", "master", "store_state", "accumulate_gradients"],
)


@inside_wrappers
def test_counts_and_moments_inside_wrappers_are_set_by_name(make):
    """`optax.tree.set` stops at the first NamedTuple that has one of the names."""
    tx = make(lambda count: jnp.where(count < 3, 1e-2, 0.0))
    params, state = run(tx, P, {"w": gradients(3, (6, 4))})
    zeros = jax.tree.map(jnp.zeros_like, optax.tree.get(state, "mu"))
    again = optax.tree.set(state, count=jnp.int32(0), mu=zeros)
    assert not np.asarray(optax.tree.get(again, "mu")["w"]).any()
    moved, stopped = (take_step(tx, params, s, G)[0]["w"] for s in (again, state))
    assert (np.asarray(moved) != np.asarray(params["w"])).any()
    assert (np.asarray(stopped) == np.asarray(params["w"])).all()


@inside_wrappers
def test_seeds_inside_wrappers_are_set_by_name(make):
    state = optax.tree.set(make(1e-2).init(P), seed=jnp.array([0, 9], jnp.uint32))
    assert {(0, 9)} == {tuple(x.tolist()) for _, x in optax.tree.get_all_with_path(state, "seed")}


def test_a_donated_step_begins_a_sum_of_gradients():
    tx = hs.accumulate_gradients(hs.adamw(1e-3), every_k=2)
    state = jax.jit(tx.update, donate_argnums=1)(G, tx.init(P), P)[1]
    assert state.mini_step == state.outer_count == 1


@pytest.mark.parametrize("make", MAKERS)
def test_a_seed_given_as_an_array_stays_the_users(make):
    seed = jnp.array([0, 7], jnp.uint32)
    tx, same = make(seed=seed), make(seed=7)
    step = jax.jit(functools.partial(take_step, tx), donate_argnums=(0, 1))
    params, state = step(jax.tree.map(jnp.copy, P), tx.init(P), G)
    assert_trees_same((params, state), take_step(same, P, same.init(P), G))
    assert seed.tolist() == [0, 7]


@pytest.mark.parametrize("make", MAKERS)
def test_a_transform_made_under_jit_works_outside(make):
    made = functools.cache(make)
    under = jax.jit(lambda p: made().init(p))(P)
    assert_trees_same(made().init(P), under)


@pytest.mark.slow
@pytest.mark.parametrize("make", MAKERS)
def test_a_seed_can_be_batched(make):
    def first(seed):
        tx = make(seed=seed)
        return take_step(tx, P, tx.init(P), G)

    both = jax.vmap(first)(jnp.array([[0, 3], [0, 4]], jnp.uint32))
    for k, seed in enumerate((3, 4)):
        assert_trees_same(jax.tree.map(lambda x, k=k: x[k], both), first(seed))


def test_injected_hyperparameters_give_the_bits_of_numbers():
    inject = functools.partial(
        optax.inject_hyperparams, hyperparam_dtype=jnp.float32, static_args=("b1", "b2")
    )
    rows = {"w": gradients(3, (6, 4))}
    params, _ = run(inject(hs.adamw)(1e-2), P, rows)
    assert_trees_same(params, run(hs.adamw(1e-2), P, rows)[0])


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (hs.recipes.one_pass | {"b1": 0.5}, r"mu reaches 18\.3 roots of nu at b1=0\.5"),
        (hs.recipes.one_pass | {"b1": lambda count: 0.5}, r"mu reaches 18\.3 roots of nu at b1=0\.5"),
        ({"nu_dtype": "bfloat16", "nu_rounding": "nearest", "b2": 0.999}, r"freezes at b2=0\.999"),
    ],
)
def test_injected_rates_are_refused_as_numbers_are(options, message):
    inject = functools.partial(optax.inject_hyperparams, hyperparam_dtype=jnp.float32)
    given = {name: x(0) if callable(x) else x for name, x in options.items()}
    with pytest.raises(ValueError, match=message):
        hs.adamw(1e-3, **given)
    with pytest.raises(ValueError, match=message):
        inject(hs.adamw)(1e-3, **options).init(P)


@pytest.mark.parametrize("rule", spec.PARAM_STORAGES)
def test_weights_that_became_float32_are_refused(rule):
    tx = hs.adamw(1e-3, param_storage=rule)
    state = tx.init(P)
    updates, state = jax.jit(tx.update)(G, state, P)
    wide = jax.tree.map(lambda p, u: p + u, P, updates)  # as `eqx.apply_updates` adds them
    with pytest.raises((TypeError, ValueError), match=r"eqx\.apply_updates does not"):
        tx.update(G, state, wide)


def as_mappings(state):
    """Return a state as it is after a checkpoint without a target: dicts in place of named tuples."""
    if hasattr(state, "_fields"):
        return {name: as_mappings(value) for name, value in state._asdict().items()}
    return [as_mappings(x) for x in state] if isinstance(state, tuple | list) else state


@pytest.mark.parametrize(
    "rule", [name for name in spec.PARAM_STORAGES if name not in ("nearest", "stochastic")]
)
def test_a_state_without_types_keeps_what_it_knows_of_the_weights(rule):
    tx = hs.adamw(1e-2, param_storage=rule)
    params, state = run(tx, P, {"w": gradients(3, (6, 4))})
    known = hs.float32_params(params, state)
    assert (known["w"] != params["w"]).any()
    assert_trees_same(hs.float32_params(params, as_mappings(state)), known)
    values = jax.tree.map(lambda x: x * np.float32(1.01), known)
    expected, actual = (hs.set_float32_params(params, s, values) for s in (state, as_mappings(state)))
    assert_trees_same(actual[0], expected[0])
    assert_trees_same(actual[1], as_mappings(expected[1]))


@pytest.mark.slow
def test_without_jit_altogether_the_bits_are_the_same():
    tx = hs.adamw(1e-3, nesterov=True)
    rows = {"w": gradients(2, (6, 4))}
    expected = run(tx, P, rows)
    with jax.disable_jit():
        assert_trees_same(run(tx, P, rows), expected)


class ByValue(pickle.Pickler):
    """Takes of functions inside of functions what cloudpickle takes: closures, and globals that they read."""

    def reducer_override(self, x):
        if isinstance(x, types.ModuleType):
            return importlib.import_module, (x.__name__,)
        if not isinstance(x, types.FunctionType) or "<" not in x.__qualname__:
            return NotImplemented
        read = {name: x.__globals__[name] for name in names_in(x.__code__) if name in x.__globals__}
        cells = [cell.cell_contents for cell in x.__closure__ or ()]
        return print, (x.__qualname__, cells, read, x.__defaults__, x.__kwdefaults__)


def names_in(code) -> set[str]:
    inner = (names_in(c) for c in code.co_consts if isinstance(c, types.CodeType))
    return set(code.co_names).union(*inner)


PICKLED = {
    "adamw": lambda: hs.adamw(1e-3),
    "eight_bit": lambda: hs.adamw(1e-3, recipe="eight_bit", param_storage="split8"),
    "a schedule": lambda: hs.lion(optax.cosine_decay_schedule(1e-3, 10)),
    "muon": lambda: hs.muon(1e-3),
    "lamb": lambda: hs.lamb(1e-3),
    "adafactor": lambda: hs.adafactor(1e-3),
    "schedule_free": lambda: hs.schedule_free_adamw(1e-3),
    "store_state": lambda: hs.store_state(optax.adam(1e-3), "bfloat16"),
    "master": lambda: hs.store_params(optax.sgd(1e-3), "master"),
    "in_shard_map": lambda: hs.in_shard_map(hs.skip_nonfinite(hs.sgd(0.1)), jax.sharding.PartitionSpec()),
    "accumulate": lambda: hs.accumulate_gradients(hs.chain(hs.clip_by_global_norm(1.0), hs.adam(1e-3)), 4),
    "ema_params": lambda: hs.ema_params(0.9),
}


@pytest.mark.parametrize("name", PICKLED)
def test_a_transform_is_pickled_by_value(name):
    """As Ray and submitit send it: the functions inside of functions read no global that is not pickled."""
    ByValue(io.BytesIO()).dump(PICKLED[name]())


def test_a_transform_out_of_a_pickle_takes_the_same_step():
    cloudpickle = pytest.importorskip("cloudpickle")
    tx = hs.adamw(1e-3, recipe="eight_bit")
    assert_trees_same(
        run(pickle.loads(cloudpickle.dumps(tx)), P, {"w": G["w"][None]}), run(tx, P, {"w": G["w"][None]})
    )

"""Optax transforms on torch parameters: the bits of the same run in JAX, and torch's ways around it."""

import io
import unittest.mock

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
import torch

import halfstep_jax
import halfstep_torch
from halfstep_torch.bridge import OptaxOptimizer

_TRANSFORMS = {
    "adamw": lambda: optax.adamw(1e-2),
    "lion": lambda: optax.lion(1e-2),
    "adafactor": lambda: optax.adafactor(1e-2, min_dim_size_to_factor=2),
    "sgd": lambda: optax.sgd(1e-2, momentum=0.9),
    "rmsprop": lambda: optax.rmsprop(1e-2),
    "yogi": lambda: optax.yogi(1e-2),
    "lamb": lambda: optax.lamb(1e-2),
    "novograd": lambda: optax.novograd(1e-2),
    "muon": lambda: optax.contrib.muon(1e-2),
    "prodigy": lambda: optax.contrib.prodigy(),
    "schedule_free": lambda: optax.contrib.schedule_free_adamw(1e-2),
    "ademamix": lambda: optax.contrib.ademamix(1e-2),
    "halfstep": lambda: halfstep_jax.adamw(1e-2, param_storage="split16", seed=5),
    "low-bit muon": lambda: halfstep_jax.store_state(optax.contrib.muon(1e-2), "bfloat16", seed=5),
}


def model_of(dtype=torch.float32):
    torch.manual_seed(3)
    return torch.nn.Sequential(torch.nn.Linear(5, 6), torch.nn.Linear(6, 4)).to(dtype)


def gradients(model, steps):
    generator = torch.Generator().manual_seed(4)
    return [
        [torch.randn(p.shape, generator=generator).to(p.dtype) for p in model.parameters()]
        for _ in range(steps)
    ]


def take(model, optimizer, grads):
    for step in grads:
        for p, g in zip(model.parameters(), step, strict=True):
            p.grad = g.clone()
        optimizer.step()


def as_numpy(tensor):
    x = tensor.detach()
    return x.view(torch.int16).numpy() if x.dtype == torch.bfloat16 else x.numpy()


def as_jax(tensor):
    x = jnp.asarray(as_numpy(tensor).copy())
    return jax.lax.bitcast_convert_type(x, jnp.bfloat16) if tensor.dtype == torch.bfloat16 else x


def in_jax(model, tx, grads):
    """Return the weights of the same run, in JAX alone."""
    names = [name.replace(".", "/") for name, _ in model.named_parameters()]
    params = dict(zip(names, map(as_jax, model.parameters()), strict=True))

    @jax.jit
    def step(params, state, grads):
        updates, state = tx.update(grads, state, params)
        return optax.apply_updates(params, updates), state

    state = jax.jit(tx.init)(params)
    for one in grads:
        params, state = step(params, state, dict(zip(names, map(as_jax, one), strict=True)))
    return [np.asarray(params[name]) for name in names]


def cases():
    for name in _TRANSFORMS:
        for dtype in (torch.float32, torch.bfloat16):
            quick = name == "yogi"
            # Half of the grid shows all of it: every transform, and both dtypes.
            if (dtype == torch.float32) == (name not in ("adamw", "low-bit muon", "halfstep")):
                yield pytest.param(name, dtype, marks=[] if quick else [pytest.mark.slow])


@pytest.mark.parametrize(("name", "dtype"), list(cases()))
def test_the_bits_are_those_of_the_same_run_in_jax(name, dtype):
    model = model_of(dtype)
    before = [p.detach().clone() for p in model.parameters()]
    grads = gradients(model, 5)
    expected = in_jax(model, _TRANSFORMS[name](), grads)
    optimizer = OptaxOptimizer(model.named_parameters(), _TRANSFORMS[name]())
    take(model, optimizer, grads)
    for p, start, due in zip(model.parameters(), before, expected, strict=True):
        np.testing.assert_array_equal(as_numpy(p), due.view(np.int16) if p.dtype == torch.bfloat16 else due)
        assert not torch.equal(p, start)


@pytest.fixture(scope="module")
def run():
    """Return a model, its optimizer after three steps, two param groups, a live rate in the first."""
    model = model_of()
    groups = [
        {"params": list(model[0].named_parameters("0"))},
        {"params": list(model[1].named_parameters("1"))},
    ]
    first = optax.inject_hyperparams(optax.sgd)(0.5)
    optimizer = OptaxOptimizer(groups, [first, optax.sgd(0.25, momentum=0.5)])
    take(model, optimizer, gradients(model, 3))
    return model, optimizer


def test_groups_have_their_transforms_and_the_rate_is_live(run):
    model, optimizer = run
    assert optimizer.param_groups[0]["lr"] == 0.5
    assert "lr" not in optimizer.param_groups[1]
    optimizer.param_groups[0]["lr"] = 2.0
    before = model[0].weight.detach().clone()
    take(model, optimizer, [[torch.ones_like(p) for p in model.parameters()]])
    torch.testing.assert_close(before - model[0].weight, torch.full_like(before, 2.0), rtol=0, atol=1e-6)
    optimizer.param_groups[0]["lr"] = 0.5


def rates(optimizer, model, steps, scheduler=None):
    """Return by how much each step of gradients of 1 lowers a weight."""
    found = []
    for _ in range(steps):
        before = model[0].bias.detach().clone()
        take(model, optimizer, [[torch.ones_like(p) for p in model.parameters()]])
        found.append((before - model[0].bias).mean().item())
        if scheduler is not None:
            scheduler.step()
    return found


def test_schedules_of_either_framework_set_the_rate():
    """A schedule inside of the transform, and torch's scheduler where the rate is injected."""
    model = model_of()
    inside = OptaxOptimizer(model.named_parameters(), optax.sgd(optax.linear_schedule(1.0, 0.0, 4)))
    np.testing.assert_allclose(rates(inside, model, 3), [1.0, 0.75, 0.5], rtol=1e-5)
    live = OptaxOptimizer(model.named_parameters(), optax.inject_hyperparams(optax.sgd)(1.0))
    scheduler = torch.optim.lr_scheduler.StepLR(live, 1, 0.5)
    np.testing.assert_allclose(rates(live, model, 3, scheduler), [1.0, 0.5, 0.25], rtol=1e-5)


def test_weights_and_gradients_are_read_where_they_are(run):
    """XLA takes memory that is aligned; torch's allocator aligns it. One that is not row-major is copied."""
    model, optimizer = run
    take(model, optimizer, gradients(model, 1))
    assert optimizer.shares_memory is True
    for layer in model:
        layer.weight.grad = torch.ones(layer.weight.shape[::-1]).T
    optimizer.step()
    assert optimizer.shares_memory is False


def test_a_state_dict_goes_on_with_the_same_bits(run):
    model, optimizer = run
    file = io.BytesIO()
    torch.save(optimizer.state_dict(), file)
    weights, grads = [p.detach().clone() for p in model.parameters()], gradients(model, 2)
    take(model, optimizer, grads)
    after = [p.detach().clone() for p in model.parameters()]
    file.seek(0)
    optimizer.load_state_dict(torch.load(file, weights_only=True))
    with torch.no_grad():
        for p, w in zip(model.parameters(), weights, strict=True):
            p.copy_(w)
    take(model, optimizer, grads)
    for p, due in zip(model.parameters(), after, strict=True):
        assert torch.equal(p, due)


def test_state_is_not_changed_by_what_is_written_to_weights(monkeypatch):
    """A transform may keep weights. Op by op, JAX returns the very arrays: the tensors' own memory."""
    monkeypatch.setattr(jax, "jit", lambda function: function)
    model = model_of()
    tx = optax.GradientTransformation(
        lambda params: params, lambda updates, state, params=None: (updates, params)
    )
    optimizer = OptaxOptimizer(model.named_parameters(), tx)
    take(model, optimizer, gradients(model, 1))
    before = jax.tree.map(np.array, optimizer.optax_state)
    with torch.no_grad():
        for p in model.parameters():
            p.fill_(7.0)
    assert jax.tree.all(jax.tree.map(lambda a, b: bool((a == b).all()), before, optimizer.optax_state))


@pytest.mark.slow
def test_a_native_optimizer_goes_on_from_an_optax_one(tmp_path):
    model, grads = model_of(torch.bfloat16), None
    optimizer = OptaxOptimizer(model.named_parameters(), halfstep_jax.adamw(1e-2, weight_decay=0.1, seed=9))
    grads = gradients(model, 4)
    take(model, optimizer, grads[:2])
    optimizer.save_state(tmp_path / "run")
    take(model, optimizer, grads[2:])
    other = model_of(torch.bfloat16)
    native = halfstep_torch.AdamW(other.named_parameters(), 1e-2, weight_decay=0.1, compile=False)
    halfstep_torch.load_state(tmp_path / "run", other, native)
    take(other, native, grads[2:])
    for p, due in zip(other.parameters(), model.parameters(), strict=True):
        assert torch.equal(p, due)


def test_what_cannot_be_stepped_is_refused():
    model, tx = model_of(), optax.sgd(1.0)
    with pytest.raises(TypeError, match="have no names"):
        OptaxOptimizer([torch.nn.Parameter(torch.ones(1))], tx)
    with pytest.raises(TypeError, match="is not an Optax transform"):
        OptaxOptimizer(model.named_parameters(), 1e-3)
    with pytest.raises(ValueError, match="2 transforms for 1 param groups"):
        OptaxOptimizer(model.named_parameters(), [tx, tx])
    with pytest.raises(ValueError, match="is on meta, which JAX does not see"):
        OptaxOptimizer(model_of().to("meta").named_parameters(), tx)
    optimizer = OptaxOptimizer(model.named_parameters(), tx)
    with pytest.raises(ValueError, match=r"'0/weight' has no gradient"):
        optimizer.step()
    with pytest.raises(TypeError, match="has one structure"):
        optimizer.add_param_group({"params": [("c", torch.nn.Parameter(torch.ones(1)))]})
    other = OptaxOptimizer(model.named_parameters(), optax.sgd(1.0, momentum=0.5))
    with pytest.raises(ValueError, match="lacks the arrays 'optax/0/trace/0/bias'"):
        other.load_state_dict(optimizer.state_dict())
    with pytest.raises(TypeError, match="this is no state dict of an OptaxOptimizer"):
        other.load_state_dict(torch.optim.SGD(model.parameters(), 1.0).state_dict())


_WRONG = {
    "state of another structure": lambda updates, state: (updates, (*state, 0.0)),
    "state of another structure, shape or dtype": lambda updates, state: (updates, (jnp.zeros(2),)),
    "updates of another structure": lambda updates, state: ({"0/bias": updates["0/bias"]}, state),
    "updates of another structure, shape": lambda updates, state: (
        jax.tree.map(lambda u: u[None], updates),
        state,
    ),
}


@pytest.mark.parametrize("what", _WRONG)
def test_a_transform_of_another_structure_changes_nothing(what):
    model = model_of()
    tx = optax.GradientTransformation(
        lambda params: (jnp.ones(3),), lambda updates, state, params=None: _WRONG[what](updates, state)
    )
    optimizer, before = OptaxOptimizer(model.named_parameters(), tx), [p.clone() for p in model.parameters()]
    with pytest.raises(ValueError, match=f"returned {what}"):
        take(model, optimizer, gradients(model, 1))
    np.testing.assert_array_equal(optimizer.optax_state[0], np.ones(3))
    assert all(torch.equal(p, b) for p, b in zip(model.parameters(), before, strict=True))


def test_a_file_of_another_run_or_a_damaged_one_changes_nothing(run, tmp_path):
    model, optimizer = run
    path, bad = tmp_path / "run", tmp_path / "bad"
    OptaxOptimizer(model.named_parameters(), optax.sgd(1.0)).save_state(path)
    bad.write_bytes(path.read_bytes()[:-1])
    before = [p.detach().clone() for p in model.parameters()]
    state = jax.tree.map(np.array, optimizer.optax_state)
    for wrong, message in ((path, "lacks the arrays 'optax/"), (bad, "damaged")):
        with pytest.raises(ValueError, match=message):
            optimizer.load_state(wrong)
    assert all(torch.equal(p, b) for p, b in zip(model.parameters(), before, strict=True))
    assert jax.tree.all(jax.tree.map(lambda a, b: bool((a == b).all()), state, optimizer.optax_state))


def test_steps_saves_and_loads_of_several_threads_come_one_after_the_other(tmp_path):
    model = model_of()
    optimizer = OptaxOptimizer(model.named_parameters(), optax.sgd(0.5))
    lock = optimizer._lock = unittest.mock.MagicMock()
    take(model, optimizer, gradients(model, 1))
    optimizer.save_state(tmp_path / "run")
    optimizer.load_state(tmp_path / "run")
    optimizer.load_state_dict(optimizer.state_dict())
    assert lock.__enter__.call_count == 5


@pytest.mark.parametrize("change", ["tied", "replaced", "removed"])
def test_parameters_that_change_after_the_start_are_refused(change):
    """A tied weight lost one of two updates, and a replaced one was not stepped."""
    pairs = [(name, torch.nn.Parameter(torch.ones(3))) for name in "ab"]
    optimizer = OptaxOptimizer(pairs, optax.sgd(0.5))
    group, (a, b) = optimizer.param_groups[0], [p for _, p in pairs]
    for p in (a, b):
        p.grad = torch.ones(3)
    optimizer.step()
    if change == "tied":
        b.data = a.data
    else:
        group["params"] = [a] if change == "removed" else [a, torch.nn.Parameter(torch.ones(3))]
    before = a.detach().clone()
    wrong = "weights .* share memory" if change == "tied" else "parameters of the groups are not those"
    with pytest.raises(ValueError, match=rf"^OptaxOptimizer: the {wrong}"):
        optimizer.step()
    assert torch.equal(a, before)
    if change == "tied":
        with pytest.raises(ValueError, match=r"^OptaxOptimizer: the weights 'a' and 'b' share memory"):
            OptaxOptimizer(pairs, optax.sgd(0.5))

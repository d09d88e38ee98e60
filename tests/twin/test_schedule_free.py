"""Schedule-free AdamW against the paper's formula and Optax's, its average in 16 bits, and both packages."""

import copy
import unittest.mock

import jax
import jax.numpy as jnp
import numpy as np
import optax
import optax.contrib
import pytest
import torch

import halfstep_jax
import halfstep_spec
import halfstep_torch
from halfstep_spec.rules.learning_rate import ScaleByLearningRate
from halfstep_spec.rules.weight_decay import AddDecayedWeights
from twin.moving import assert_both_end_alike, jax_run, torch_run

LR, B1, B2, EPS, DECAY = 1e-2, 0.9, 0.999, 1e-8, 0.1


def paper(gradients, y, warmup: int):
    """Return y and x of algorithm 1 in float64, with the authors' weights of the average."""
    b1, b2 = (float(np.float32(b)) for b in (B1, B2))
    z, x, v, largest, total = y, y, np.zeros_like(y), 0.0, 0.0
    for t, g in enumerate(gradients, 1):
        rate = LR * min(t / max(warmup, 1), 1)
        largest = max(largest, rate)
        total += largest**2
        c = largest**2 / total
        v = b2 * v + (1 - b2) * g**2
        z = z - rate * (g / (np.sqrt(v / (1 - b2**t)) + EPS) + DECAY * y)
        x = (1 - c) * x + c * z
        y = (1 - b1) * z + b1 * x
    return y, x


@pytest.mark.parametrize("warmup", [0, 7])
def test_the_reference_follows_the_paper(warmup):
    """Each of 30 steps rounds y, below 4, and what it adds to it, by 2^-24 of 4 each; x likewise."""
    rng = np.random.default_rng(0)
    gradients, start = rng.normal(size=(30, 50)), rng.normal(size=50)
    links = (
        halfstep_spec.RULES["rms"](B2, EPS, False, True),
        AddDecayedWeights(DECAY),
        ScaleByLearningRate(LR),
        halfstep_spec.RULES["schedule_free"](B1, float(warmup)),
    )
    states, p = [link.init((50,)) for link in links], start.astype(np.float32)
    for u in gradients:
        for i, link in enumerate(links):
            u, states[i] = link.step(u, states[i], "w", p)
        p = p + u
    lead = links[-1].moments["lead"].decode(states[-1].moments["lead"], 30, "w")
    for found, due in zip((p, p - lead), paper(gradients, start, warmup), strict=True):
        np.testing.assert_allclose(found, due, rtol=0, atol=30 * 2 * 4 * 2.0**-24)


@pytest.mark.parametrize("warmup", [0, 4])
def test_float32_follows_optax(warmup):
    """Optax takes 1 - b2^t from powers, off by 2^-23 of 1 in 1 - b2 = 0.001, and updates by half of that.

    Of 10 steps each is at most 10 at a rate of 1e-2. Optax warms up from 0: its rate is told the next count.
    """
    rng = np.random.default_rng(1)
    start = {"w": jnp.asarray(rng.normal(size=(8, 8)), jnp.float32)}
    gradients = [{"w": jnp.asarray(rng.normal(size=(8, 8)), jnp.float32)} for _ in range(10)]
    rate = lambda count: LR * jnp.minimum(count / max(warmup, 1), 1.0)  # noqa: E731
    base = optax.chain(
        optax.scale_by_rms(B2, EPS, eps_in_sqrt=False, bias_correction=True),
        optax.add_decayed_weights(DECAY),
        optax.scale_by_learning_rate(lambda count: rate(count + 1)),
    )
    theirs = optax.contrib.schedule_free(base, rate if warmup else LR, B1)
    ours = halfstep_jax.schedule_free_adamw(LR, warmup, B1, B2, EPS, DECAY)
    ends = []
    for tx in (ours, theirs):
        params, state, update = start, tx.init(start), jax.jit(tx.update)
        for g in gradients:
            updates, state = update(g, state, params)
            params = optax.apply_updates(params, updates)
        of_optax = optax.contrib.schedule_free_eval_params
        average = of_optax(state, params) if tx is theirs else _averages(state, params, tx)
        ends.append(np.stack([params["w"], average["w"]]))
    np.testing.assert_allclose(*ends, rtol=0, atol=10 * LR * 10 * 0.5 * 2.0**-23 / 0.001)


def _averages(state, params, tx):
    return halfstep_jax.schedule_free_eval_params(state, params, tx)


def test_a_lead_of_16_bits_averages_where_nearest_rounding_freezes():
    """Under updates of -1/1000, x after t steps is the mean of z so far: -(t + 1) / 2000.

    Bits rounded stochastically leave the mean over 4,096 elements within 1 % of that. To nearest the lead
    stands at about 2^8 = 256 steps, where it changes by less than half a gap, and x leaves with z.
    """
    with pytest.raises(ValueError, match="lead_rounding='nearest' freezes the average"):
        halfstep_jax.scale_by_schedule_free(lead_rounding="nearest")
    g = {"w": jnp.full((64, 64), -1e-3)}
    ratios = []
    for rounding in ({}, {"lead_rounding": "nearest_unchecked"}):
        tx = halfstep_jax.scale_by_schedule_free(lead_dtype="bfloat16", **rounding)
        state = tx.init(g)

        def step(carry, _, tx=tx):
            params, state = carry
            updates, state = tx.update(g, state)
            return (optax.apply_updates(params, updates), state), None

        start = {"w": jnp.zeros((64, 64))}, state
        params, state = jax.jit(lambda start, step=step: jax.lax.scan(step, start, None, 3000)[0])(start)
        ratios.append(float(_averages(state, params, tx)["w"].mean()) / -(3001 / 2000))
    assert abs(ratios[0] - 1) < 0.01
    assert abs(ratios[1] - 1) > 0.1


@pytest.mark.parametrize("lead", ["bfloat16", "int8"])
def test_jax_and_torch_agree_to_the_bit(lead):
    def make(package, chain):
        lead_dtype = lead if lead == "bfloat16" else package.scaled(lead, 8, 0, 0)
        return chain(
            package.scale_by_rms(nu_dtype="bfloat16"),
            package.add_decayed_weights(0.1),
            package.scale_by_learning_rate(0.01),
            package.scale_by_schedule_free(0.8, 3, lead_dtype=lead_dtype),
            package.round_stochastically(3),
        )

    draws = np.random.default_rng(1).normal(size=(7, 16, 24)).astype(np.float32)
    assert_both_end_alike(make, draws)


def _torch_run(draws, **options):
    """Return the parameter and the optimizer after steps from draws[0] by the others."""
    options = {"weight_decay": 0.1, "warmup_steps": 2, **options}
    _, optimizer = torch_run(
        lambda named: halfstep_torch.AdamWScheduleFree(named, LR, **options), draws[0], draws[1:]
    )
    return optimizer.param_groups[0]["params"][0], optimizer


DRAWS = np.random.default_rng(2).normal(size=(5, 16, 24)).astype(np.float32)


@pytest.mark.parametrize("storage", ["stochastic", "split16"])
def test_alias_and_class_agree_and_so_do_their_averages(storage):
    options = {"param_storage": storage, "seed": 5}
    tx = halfstep_jax.schedule_free_adamw(LR, 2, weight_decay=0.1, **options)
    w, state = jax_run(tx, DRAWS[0], DRAWS[1:])
    params = {"w": jnp.asarray(w, jnp.bfloat16)}
    p, optimizer = _torch_run(DRAWS, **options)
    np.testing.assert_array_equal(w, p.detach().float().numpy())
    average = halfstep_torch.schedule_free_eval_params(optimizer)["w"].numpy()
    np.testing.assert_array_equal(np.asarray(_averages(state, params, tx)["w"]), average)
    assert not np.array_equal(average, p.detach().float().numpy())


def test_eval_shows_the_averages_and_train_gives_the_weights_back_to_the_bit():
    p, optimizer = _torch_run(DRAWS, param_storage="master")
    before, average = p.detach().clone(), halfstep_torch.schedule_free_eval_params(optimizer)["w"]
    optimizer.train()
    assert torch.equal(p, before)
    optimizer.eval()
    optimizer.eval()
    assert torch.equal(p, average.bfloat16())
    assert not torch.equal(p, before)
    with pytest.raises(RuntimeError, match=r"AdamWScheduleFree: the model has the averaged.*train\(\)"):
        optimizer.step()
    optimizer.train()
    assert torch.equal(p, before)
    optimizer.step()


def test_a_run_goes_on_from_a_checkpoint_of_the_averaged_model():
    """As from one of the trained weights; a state that is refused leaves all as it was."""
    p, optimizer = _torch_run(DRAWS, param_storage="split8")
    trained = p.detach().clone()
    optimizer.eval()
    copied, saved = copy.deepcopy((p, optimizer)), copy.deepcopy(optimizer.state_dict())
    again, other = _torch_run(DRAWS[:2], param_storage="split8")
    with torch.no_grad():
        again.copy_(p)
    other.load_state_dict(saved)
    for param, run in ((p, optimizer), copied, (again, other)):
        with pytest.raises(TypeError, match="state dict"):
            run.load_state_dict("no state")
        run.train()
        assert torch.equal(param, trained)
        param.grad = torch.from_numpy(DRAWS[1]).bfloat16()
        run.step()
    assert torch.equal(again, p)
    assert torch.equal(copied[0], p)


class Interrupt(BaseException):
    """A signal, for the tests alone."""


@pytest.mark.parametrize("interrupted", ["eval", "train"])
@pytest.mark.parametrize("after", range(4))
def test_an_interrupted_change_of_weights_loses_none(interrupted, after):
    """At the first, second, ... of the weights that are copied; also where putting them back is, too."""
    torch.manual_seed(0)
    model = torch.nn.Sequential(torch.nn.Linear(3, 2), torch.nn.Linear(2, 1)).bfloat16()
    optimizer = halfstep_torch.AdamWScheduleFree(model.named_parameters(), lr=0.1)
    for _ in range(3):
        model(torch.ones(1, 3, dtype=torch.bfloat16)).sum().backward()
        optimizer.step(zero_grad=True)
    trained = [p.detach().clone() for p in model.parameters()]
    if interrupted == "train":
        optimizer.eval()
    copy_, copied = torch.Tensor.copy_, []

    def copy_until_a_signal(x, *args, **options):
        copied.append(x)
        if len(copied) > after:
            raise Interrupt
        return copy_(x, *args, **options)

    with unittest.mock.patch.object(torch.Tensor, "copy_", copy_until_a_signal), pytest.raises(Interrupt):
        getattr(optimizer, interrupted)()
    with pytest.raises(RuntimeError, match=r"Call train\(\) first"):
        optimizer.step()
    optimizer.train()
    assert all(map(torch.equal, model.parameters(), trained))


def test_after_an_interrupted_train_eval_shows_averages_alone():
    model = torch.nn.Linear(3, 2, dtype=torch.bfloat16)
    optimizer = halfstep_torch.AdamWScheduleFree(model.named_parameters(), lr=0.1)
    for _ in range(3):
        model(torch.ones(1, 3, dtype=torch.bfloat16)).sum().backward()
        optimizer.step(zero_grad=True)
    optimizer.eval()
    averaged = [p.detach().clone() for p in model.parameters()]
    copy_ = torch.Tensor.copy_

    def copy_to_matrices(x, *args):
        if x.dim() < 2:
            raise Interrupt
        return copy_(x, *args)

    with unittest.mock.patch.object(torch.Tensor, "copy_", copy_to_matrices), pytest.raises(Interrupt):
        optimizer.train()
    assert not torch.equal(model.weight, averaged[0])
    optimizer.eval()
    assert all(map(torch.equal, model.parameters(), averaged))


@pytest.mark.parametrize(
    ("wrong", "message"),
    [
        (torch.ones(1, dtype=torch.bfloat16), r"is torch.strided, torch.bfloat16\[1\]; the parameter"),
        (torch.ones(4, 3), r"is torch.strided, torch.float32\["),
        (torch.ones(0, device="meta"), "is torch.strided, torch.float32"),
        (None, "is not there"),
        ("weights", "is a str"),
    ],
    ids=["shape", "dtype", "meta", "missing", "text"],
)
def test_trained_weights_that_do_not_fit_are_refused_and_nothing_changes(wrong, message):
    optimizer = _torch_run(DRAWS)[1]
    optimizer.eval()
    saved = copy.deepcopy(optimizer.state_dict())
    saved["state"][0]["trained"] = wrong
    again, other = _torch_run(DRAWS[:2])
    before, count = again.detach().clone(), int(other.state[again]["step"])
    with pytest.raises(ValueError, match=f"load_state_dict: 'trained' of '.*', the weights .* {message}"):
        other.load_state_dict(saved)
    assert int(other.state[again]["step"]) == count
    other.train()
    assert torch.equal(again, before)


def test_a_class_names_the_argument_that_it_was_given():
    named = [("w", torch.nn.Parameter(torch.zeros(2)))]
    for betas, message in (((1.0, 0.9), r"betas\[0\]=1.0 is outside"), ((0.9, -1), r"betas\[1\]=-1 is")):
        with pytest.raises(ValueError, match="AdamWScheduleFree: " + message):
            halfstep_torch.AdamWScheduleFree(named, betas=betas)


def test_averages_of_another_run_are_refused():
    params = {"w": jnp.ones((4, 4))}
    tx = halfstep_jax.schedule_free_adamw(LR)
    other = {"v": jnp.ones((4, 4))}
    with pytest.raises(
        ValueError, match=r"eval_params: the state is of other params: .*'v'.*Pass the tree that init saw"
    ):
        _averages(tx.init(params), other, tx)
    wide = {"w": jnp.ones((4, 5))}
    with pytest.raises(ValueError, match=r"eval_params: the state is of other params: .*\(4, 4\)"):
        _averages(tx.init(params), wide, tx)
    adam = halfstep_jax.adamw(LR)
    with pytest.raises(ValueError, match=r"tx averages no weights\. Pass schedule_free_adamw"):
        _averages(adam.init(params), params, adam)
    optimizer = halfstep_torch.AdamW([("w", torch.nn.Parameter(torch.zeros(2)))])
    with pytest.raises(ValueError, match=r"averages no weights\. Pass an AdamWScheduleFree"):
        halfstep_torch.schedule_free_eval_params(optimizer)


@pytest.mark.parametrize("switches", [{}, {"eps_in_sqrt": False, "bias_correction": True}])
def test_rms_follows_optax(switches):
    """Both round nu and what follows some ten times; the error of Optax's powers is as above."""
    rng = np.random.default_rng(3)
    ours, theirs = (x.scale_by_rms(0.99, 0.01, **switches) for x in (halfstep_jax, optax))
    g = {"w": jnp.asarray(rng.normal(size=(8, 8)), jnp.float32)}
    states = [tx.init(g) for tx in (ours, theirs)]
    for _ in range(5):
        g = {"w": jnp.asarray(rng.normal(size=(8, 8)), jnp.float32)}
        (u, states[0]), (v, states[1]) = (
            jax.jit(ours.update)(g, states[0]),
            jax.jit(theirs.update)(g, states[1]),
        )
    np.testing.assert_allclose(u["w"], v["w"], rtol=10 * 2.0**-24 + 0.5 * 2.0**-23 / 0.01)


@pytest.mark.parametrize("change", ["reversed", "removed", "saved"])
def test_trained_weights_follow_their_parameters_when_groups_change(change):
    model = torch.nn.Sequential(
        torch.nn.Linear(2, 2, bias=False), torch.nn.Linear(2, 2, bias=False)
    ).bfloat16()
    optimizer = halfstep_torch.AdamWScheduleFree(model.named_parameters(), lr=0.1)
    for _ in range(3):
        model(torch.ones(1, 2, dtype=torch.bfloat16)).sum().backward()
        optimizer.step(zero_grad=True)
    trained = [p.detach().clone() for p in model.parameters()]
    optimizer.eval()
    listed = optimizer.param_groups[0]["params"]
    if change == "removed":
        listed.pop(0)
    else:
        listed.reverse()
    if change == "saved":
        optimizer.load_state_dict(copy.deepcopy(optimizer.state_dict()))
    optimizer.train()
    assert all(map(torch.equal, model.parameters(), trained))

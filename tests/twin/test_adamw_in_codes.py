"""AdamW whose weights are kept in codes: against its formula, in both packages, and what it refuses."""

import math
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
import torch

import halfstep_jax
import halfstep_spec
import halfstep_torch
from halfstep.rules.adamw_in_codes import AdamWInCodes
from halfstep_spec.rules.adamw_in_codes import InCodes
from on_torch.steps import step_by_ones
from twin.moving import jax_run, torch_run

B1, B2, EPS, DECAY = 0.9, 0.999, 1e-8, 0.1
SHAPE = (64, 96)


def adamw(gradients, p, rates):
    """Return the weights in float64: AdamW of the paper."""
    b1, b2 = (float(np.float32(b)) for b in (B1, B2))
    mu = nu = np.zeros_like(p)
    for t, (g, rate) in enumerate(zip(gradients, rates, strict=True), 1):
        mu, nu = b1 * mu + (1 - b1) * g, b2 * nu + (1 - b2) * g**2
        p = p - rate * (mu / (1 - b1**t) / (np.sqrt(nu / (1 - b2**t)) + EPS) + DECAY * p)
    return p


def draws(steps: int, shape=SHAPE, seed: int = 0):
    """Return weights near 0.05, and a gradient for each step, in float32."""
    rng = np.random.default_rng(seed)
    return (rng.normal(size=shape) * 0.05).astype(np.float32), rng.normal(size=(steps, *shape)).astype("f4")


def on_grid(p):
    """Return the numbers of codes that are nearest to weights."""
    state = halfstep_jax.adamw(0.0, param_storage="int8").init(jnp.asarray(p))
    return np.asarray(halfstep_jax.decode_params(halfstep_jax.stored_params(state)))


def run_jax(p, gradients, rate=1e-3, **options):
    """Return weights and state after steps in JAX."""
    tx = halfstep_jax.adamw(rate, weight_decay=DECAY, param_storage="int8", seed=7, **options)
    return jax_run(tx, p, gradients, "float32")


def run_torch(p, gradients, rate=1e-3, **options):
    """Return weights and state after steps in torch."""
    options = {"compile": False, "param_storage": "int8", "seed": 7, "weight_decay": DECAY} | options
    w, made = torch_run(lambda named: halfstep_torch.AdamW(named, rate, **options), p, gradients, "float32")
    return w, next(iter(made.state.values()))


def test_a_first_rate_of_zero_feeds_nothing_back():
    """As a linear warm-up of torch's schedulers begins: its later rates are not known."""
    p, gradients = draws(4)
    rates = [0.0, 1e-5, 2e-5, 3e-5]
    make = lambda named: halfstep_torch.AdamW(named, 0.0, param_storage="int8", seed=7, compile=False)  # noqa: E731
    w = torch.nn.Parameter(torch.from_numpy(p.copy()))
    optimizer = make([("w", w)])
    for g, rate in zip(gradients, rates, strict=True):
        optimizer.param_groups[0]["lr"], w.grad = rate, torch.from_numpy(g)
        optimizer.step()
    tx = optax.inject_hyperparams(halfstep_jax.adamw, hyperparam_dtype=jnp.float32)(
        0.0, param_storage="int8", seed=7, weight_decay=0.01
    )
    params = {"w": jnp.asarray(p)}
    state = tx.init(params)
    for g, rate in zip(gradients, rates, strict=True):
        state.hyperparams["learning_rate"] = jnp.float32(rate)
        updates, state = jax.jit(tx.update)({"w": jnp.asarray(g)}, state, params)
        params = optax.apply_updates(params, updates)
    # Rows end at 0.2, and two steps of their codes apart are further than all rates together.
    for end in (w.detach().numpy(), np.asarray(params["w"])):
        assert abs(end - p).max() < 2 * 0.2 / 127 + sum(rates)


@pytest.mark.parametrize("constant", [True, False])
def test_in_float32_it_is_adamw(constant):
    """An array too small for codes. 30 steps round p, below 4, and what is added, by 2^-24 of 4 each."""
    rng = np.random.default_rng(0)
    gradients, start = rng.normal(size=(30, 50)), rng.normal(size=50)
    rates = np.full(30, np.float32(1e-2)) if constant else np.float32(1e-2) * np.linspace(0, 1, 30) ** 2
    rule = halfstep_spec.RULES["adamw_in_codes"](b1=B1, b2=B2, eps=EPS)
    step = InCodes(rule, DECAY, "decoupled", "float32", "nearest")
    p = start.astype(np.float32).view(np.uint32)
    state = step.init(p)
    for g, rate in zip(gradients, rates, strict=True):
        p, state = step.step(p, g.astype(np.float32), state, "w", np.float32(rate))
    np.testing.assert_array_equal(state.rule.moments["param"].codes, p)
    decay = float(np.float32(DECAY)) / DECAY  # of the formula's 0.1, which float32 does not hold
    assert abs(decay - 1) < 2.0**-24
    due = adamw(gradients, start, rates)
    np.testing.assert_allclose(p.view(np.float32), due, rtol=0, atol=30 * 2 * 4 * 2.0**-24)


def test_errors_are_fed_back_once():
    """One gradient, and then none: codes, less what the average still owes, are weights that nothing rounds.

    After 10,000 steps corrections of bias are 1. The root falls by a factor of 0.9995 a step, and so errors
    that are fed back some 10 steps later are up to half a hundredth off: at most 21 of them, of a gap each.
    """
    p, (g,) = draws(1)
    p, late = on_grid(p), 10_000
    tx = halfstep_jax.adamw(1e-3, weight_decay=0.0, param_storage="int8")
    params, state = jnp.asarray(p), tx.init(jnp.asarray(p))._replace(count=jnp.int32(late))
    update, unrounded, average, square = jax.jit(tx.update), p.astype(np.float64), 0.0, 0.0
    for t in range(21):
        now = g if t == 0 else np.zeros_like(g)
        updates, state = update(jnp.asarray(now), state, params)
        params = optax.apply_updates(params, updates)
        average, square = B1 * average + (1 - B1) * now, B2 * square + (1 - B2) * now**2.0
        unrounded = unrounded - 1e-3 * average / (np.sqrt(square) + EPS)
    mu, nu, later = np.asarray(state.mu, np.float64), np.asarray(state.nu, np.float64), range(1, 400)
    coming = 1e-3 * sum(B1**k * average / (np.sqrt(square * B2**k) + EPS) for k in later)
    owed = 1e-3 * sum(B1**k * mu / (np.sqrt(nu * B2**k) + EPS) for k in later)
    gap = np.abs(p).max(1, keepdims=True) / 127 * 1.25
    fed_back, added_up = (
        np.abs(np.asarray(params) - x - (unrounded - y)) / gap for x, y in ((owed, coming), (0.0, 0.0))
    )
    assert fed_back.max() < 21 * 0.005
    assert np.median(added_up) > 0.2


@pytest.mark.slow
def test_movement_at_a_rate_far_below_a_gap_is_that_of_float32():
    """300 steps of 1e-6 are a fifth of a gap, which nearest rounding would not take at all.

    Errors of 262,144 elements are at most two gaps of 1.6e-3 each, and their mean is within 5 2 gap / 512.
    """
    p, (g,) = draws(1, (512, 512))
    p, steps = on_grid(p), 300
    tx = halfstep_jax.adamw(1e-6, weight_decay=0.0, param_storage="int8")
    g = jnp.asarray(np.abs(g))

    def step(carry, _):
        params, state = carry
        updates, state = tx.update(g, state, params)
        return (optax.apply_updates(params, updates), state), None

    start = jnp.asarray(p), tx.init(jnp.asarray(p))
    params, _ = jax.jit(lambda start: jax.lax.scan(step, start, None, steps)[0])(start)
    moved = float(np.mean(np.asarray(params, np.float64) - p))
    assert abs(moved + steps * 1e-6) < 5 * 2 * 2e-3 / 512
    assert len(np.unique(np.asarray(params)[0])) <= 255


FORMATS = {
    "float32": lambda package: {},
    "bfloat16": lambda package: {"mu_dtype": "bfloat16", "nu_dtype": "bfloat16"},
    "four bits": lambda package: {
        "mu_dtype": package.relative("int4", 32),
        "nu_dtype": package.scaled("uroot8"),
    },
    "feedback": lambda package: {"mu_dtype": package.relative("int8", 128), "mu_rounding": "feedback"},
    "recipe": lambda package: {"recipe": "four_bit", "param_storage": "int8"},
}


@pytest.mark.parametrize(
    "name", [name if name == "bfloat16" else pytest.param(name, marks=pytest.mark.slow) for name in FORMATS]
)
def test_alias_and_class_agree_to_the_bit_and_weights_are_the_numbers_of_the_codes(name):
    p, gradients = draws(4)
    p = on_grid(p)
    options, others = (FORMATS[name](x) for x in (halfstep_jax, halfstep_torch))
    options.pop("param_storage", None)
    w, state = run_jax(p, gradients, **options)
    theirs, kept = run_torch(p, gradients, **others)
    np.testing.assert_array_equal(w, theirs)
    np.testing.assert_array_equal(state.param["w"], kept["param"].numpy())
    np.testing.assert_array_equal(state.param_scale["w"], kept["param_scale"].numpy().reshape(64, 1))
    np.testing.assert_array_equal(w, halfstep_jax.decode_params(halfstep_jax.stored_params(state))["w"])
    assert not np.array_equal(w, p)


@pytest.mark.slow
def test_a_state_alone_goes_on_as_a_state_with_weights_does():
    p, gradients = draws(4)
    tx = halfstep_jax.adamw(1e-3, param_storage="int8", seed=7, weight_decay=DECAY)

    @jax.jit
    def step(state, g):
        params = halfstep_jax.decode_params(halfstep_jax.stored_params(state))
        return tx.update({"w": g}, state, params)[1]

    state = tx.init({"w": jnp.asarray(p)})
    for g in gradients:
        state = step(state, jnp.asarray(g))
    w, expected = run_jax(on_grid(p), gradients)
    assert all(np.array_equal(*x) for x in zip(*map(jax.tree.leaves, (state, expected)), strict=True))
    np.testing.assert_array_equal(halfstep_jax.decode_params(halfstep_jax.stored_params(state))["w"], w)


def test_a_weight_that_is_changed_from_outside_wins():
    p, gradients = draws(2)
    w, kept = run_jax(on_grid(p), gradients[:1])
    tx = halfstep_jax.adamw(1e-3, param_storage="int8", seed=7, weight_decay=DECAY)
    moved = {"w": jnp.asarray(on_grid(w + 1))}
    updates, kept = jax.jit(tx.update)({"w": jnp.asarray(gradients[1])}, kept, moved)
    decoded = halfstep_jax.decode_params(halfstep_jax.stored_params(kept))["w"]
    np.testing.assert_array_equal(optax.apply_updates(moved, updates)["w"], decoded)
    assert float(jnp.abs(decoded - moved["w"]).max()) < 0.05


def test_what_the_whole_step_has_not_is_refused():
    for options in ({"nesterov": True}, {"mask": {"w": True}}):
        (name,) = options
        with pytest.raises(ValueError, match=f'adamw: param_storage="int8" takes the whole .*without {name}'):
            halfstep_jax.adamw(1e-3, param_storage="int8", **options)
    with pytest.raises(ValueError, match=r"param_rounding='nearest' loses small updates"):
        AdamWInCodes(1e-3, param_rounding="nearest")
    with pytest.raises(ValueError, match="param_dtype=bfloat16 is not a format that weights are kept in"):
        halfstep_jax.as_transform(AdamWInCodes(1e-3, param_dtype="bfloat16"))


def test_torch_reads_codes_by_the_names_of_parameters_and_decodes_them():
    p, (g,) = draws(1)
    model = torch.nn.ModuleDict({"a": torch.nn.Linear(96, 64), "b": torch.nn.Linear(96, 64)})
    model["a"].weight.data, model["b"].weight.data = (torch.from_numpy(x.copy()) for x in (on_grid(p), p))
    model["a"].weight.grad = torch.from_numpy(g)
    optimizer = halfstep_torch.AdamW(model.named_parameters(), 1e-3, param_storage="int8", compile=False)
    optimizer.step()
    stored = halfstep_torch.stored_params(optimizer)
    assert stored.keys() == dict(model.named_parameters()).keys()
    w = model["a"].weight.detach()
    assert torch.equal(stored["a.weight"].decode(), w)
    assert torch.equal(stored["a.weight"].decode(torch.bfloat16), w.bfloat16())
    assert torch.equal(stored["a.bias"].decode(), model["a"].bias)
    # Never stepped: the codes nearest to the weights.
    np.testing.assert_array_equal(stored["b.weight"].decode().numpy(), on_grid(p))
    assert sum(x.nbytes for x in (stored["b.weight"].codes, stored["b.weight"].scale)) == p.size + len(p)


def test_torch_reads_the_weights_that_the_model_has_now():
    """A checkpoint of codes had the weights from before a last pruning."""
    p, gradients = draws(3)
    w, small = torch.nn.Parameter(torch.from_numpy(p.copy())), torch.nn.Parameter(torch.ones(7))
    optimizer = halfstep_torch.AdamW([("w", w), ("s", small)], 1e-3, param_storage="int8", compile=False)
    for g in gradients:
        w.grad, small.grad = torch.from_numpy(g), torch.ones(7)
        optimizer.step()
        before = halfstep_torch.stored_params(optimizer)
        assert before["w"].codes.data_ptr() == optimizer.state[w]["param"].data_ptr()
        torch.testing.assert_close(before["w"].decode(), w.detach(), rtol=2.0**-23, atol=2.0**-26)
    with torch.no_grad():
        w[:16], small[2] = 0, 0.3
        w[20, 5], w[21], w[22, 0] = 3.0, w[21] * 1e-3, math.nan
    after = halfstep_torch.stored_params(optimizer)
    gaps = w.detach().abs().amax(1, keepdim=True) / 127 * 1.25
    given, rest = after["w"].decode(), [i for i in range(len(w)) if i not in (20, 21, 22)]
    assert torch.equal(given[:16], w[:16])
    assert torch.equal(given[rest[16:]], before["w"].decode()[rest[16:]])
    assert ((given - w).abs() <= gaps / 2)[20:22].all()
    assert given[22].isnan().all()
    assert torch.equal(after["s"].decode(), small)
    assert torch.equal(optimizer.state[w]["param"], before["w"].codes)


def test_a_param_group_alone_may_have_weights_in_codes():
    p, (g,) = draws(1)
    coded, plain, alone = (torch.nn.Parameter(torch.from_numpy(on_grid(p).copy())) for _ in range(3))
    groups = [{"params": [("a", coded)], "param_storage": "int8"}, {"params": [("b", plain)]}]
    mixed, other = (halfstep_torch.AdamW(x, 1e-3, compile=False) for x in (groups, [("b", alone)]))
    for param in (coded, plain, alone):
        param.grad = torch.from_numpy(g)
    mixed.step()
    other.step()
    assert halfstep_torch.stored_params(mixed).keys() == {"a"}
    assert torch.equal(plain, alone)
    assert not torch.equal(coded, plain)


def test_a_state_without_codes_is_refused():
    params = {"w": jnp.ones(SHAPE)}
    with pytest.raises(ValueError, match="stored_params: the state has no parts that hold weights in codes"):
        halfstep_jax.stored_params(halfstep_jax.adamw(1e-3).init(params))
    tx = halfstep_jax.adamw(1e-3, param_storage="int8")
    with pytest.raises(ValueError, match="the state has 2 parts"):
        halfstep_jax.stored_params((tx.init(params), tx.init(params)))
    linear = torch.nn.Linear(2, 2)
    with pytest.raises(ValueError, match=r"stored_params: .* holds no weights in codes\. Pass AdamW"):
        halfstep_torch.stored_params(halfstep_torch.AdamW(linear.named_parameters()))
    other: Any = torch.optim.AdamW(linear.parameters())
    with pytest.raises(TypeError, match=r"stored_params: optimizer is AdamW\. Pass a halfstep_torch"):
        halfstep_torch.stored_params(other)


@pytest.mark.parametrize("run", [run_jax, run_torch])
def test_rows_without_gradients_stay_numbers(run):
    """What is fed back went past the largest scale of `mu`: half of the weights were NaN at step 2."""
    p, gradients = draws(4)
    gradients[:, ::2] = 0
    weights = np.asarray(run(p, gradients, recipe="four_bit")[0])
    assert np.isfinite(weights).all()
    assert np.abs(weights - on_grid(p))[::2].max() < 0.01


@pytest.mark.parametrize("shape", [SHAPE, (3,)])
def test_a_decoded_weight_is_a_copy(shape):
    """Also of a weight too small for codes, which the state has in float32."""
    w = torch.nn.Parameter(torch.ones(shape))
    optimizer = halfstep_torch.AdamW([("w", w)], param_storage="int8", compile=False)
    step_by_ones(optimizer)
    before = halfstep_torch.stored_params(optimizer)["w"].decode()
    halfstep_torch.stored_params(optimizer)["w"].decode().zero_()
    assert torch.equal(halfstep_torch.stored_params(optimizer)["w"].decode(), before)
    assert before.any()


@pytest.mark.parametrize("writer", ["jax", "torch"])
def test_a_state_file_has_the_codes_of_weights_that_were_changed(writer, tmp_path):
    """A loop in JAX reads codes alone: rows that were pruned between two steps must not come back."""
    p, gradients = draws(1)
    tx = halfstep_jax.adamw(1e-3, weight_decay=DECAY, param_storage="int8")
    file, options = tmp_path / "run", {"param_storage": "int8", "weight_decay": DECAY, "compile": False}
    if writer == "jax":
        params = {"weight": jnp.asarray(p)}
        updates, state = tx.update({"weight": gradients[0]}, tx.init(params), params)
        before = np.asarray(optax.apply_updates(params, updates)["weight"])
        after = np.where(np.arange(SHAPE[0])[:, None] < 8, np.float32(0), before)
        halfstep_jax.save_state(file, {"weight": jnp.asarray(after)}, state, tx)
    else:
        model = torch.nn.Linear(SHAPE[1], SHAPE[0], bias=False)
        model.weight.data = torch.tensor(p)
        optimizer = halfstep_torch.AdamW(model.named_parameters(), lr=1e-3, **options)
        model.weight.grad = torch.tensor(gradients[0])
        optimizer.step()
        model.weight.data[:8] = 0
        after = model.weight.detach().numpy()
        halfstep_torch.save_state(file, model, optimizer)
    params, state = halfstep_jax.load_state(file, {"weight": jnp.asarray(p)}, tx)
    codes = halfstep_jax.decode_params(halfstep_jax.stored_params(state))["weight"]
    np.testing.assert_array_equal(params["weight"], after)
    assert not codes[:8].any()
    # The other rows keep their codes: some weights are a unit in the last place beside them.
    np.testing.assert_allclose(codes, after, rtol=2.0**-20)

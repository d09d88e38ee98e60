"""AdamW whose errors of rounding weights are fed back: its formula, both packages, and what it refuses."""

import functools
import itertools

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
import torch

import halfstep_jax
import halfstep_spec
import halfstep_torch
from halfstep import monitor
from halfstep.rules.adamw_fed_back import AdamWFedBack
from halfstep.rules.fed_back import emitted
from halfstep_jax.numbers.op import JaxOp
from halfstep_jax.numbers.schedules import coming, peak_of
from halfstep_jax.rule import RoundedWeight as JaxWeight
from halfstep_jax.transform import say_once as say_once_of_jax
from halfstep_jax.xla.exact import opaque_zero
from halfstep_spec.rules.adamw_fed_back import FedBackRule
from halfstep_torch.links.bound_rule import RoundedWeight as TorchWeight
from halfstep_torch.numbers.op import TorchOp
from halfstep_torch.numbers.schedules import Schedule
from halfstep_torch.say_once import say_once
from on_torch.steps import step_by_ones
from twin.moving import jax_run, torch_run

B1, B2, EPS, DECAY = 0.9, 0.999, 1e-8, 0.1
SHAPE = (64, 96)


def draws(steps: int, seed: int = 0):
    """Return weights of a binade or its negative, and a gradient for each step, all as bfloat16 has them."""
    rng = np.random.default_rng(seed)
    sizes = rng.uniform(1.3, 1.7, SHAPE) * 0.25
    arrays = (np.where(rng.random(SHAPE) < 0.5, sizes, -sizes), rng.normal(size=(steps, *SHAPE)))
    return [np.asarray(jnp.asarray(x, jnp.bfloat16), np.float32) for x in arrays]


def run_jax(p, gradients, rate=1e-3, dtype="bfloat16", **options):
    """Return weights in float32, and the state, after steps in JAX."""
    tx = halfstep_jax.adamw(rate, param_storage="feedback", seed=7, weight_decay=DECAY, **options)
    return jax_run(tx, p, gradients, dtype)


def run_torch(p, gradients, rate=1e-3, dtype="bfloat16", optimizer="AdamW", schedule=None, **options):
    """Return weights in float32, and the optimizer, after steps in torch."""
    options = {"compile": False, "param_storage": "feedback", "seed": 7, "weight_decay": DECAY} | options

    def make(named):
        made = getattr(halfstep_torch, optimizer)(named, rate, **options)
        if schedule:
            scheduler = torch.optim.lr_scheduler.LambdaLR(made, schedule)
            made.register_step_post_hook(lambda *_: scheduler.step())
        return made

    return torch_run(make, p, gradients, dtype)


def exact(p, gradients, rates):
    """Return the weights of AdamW in float64, at each step."""
    p, mu, nu = p.astype(np.float64), 0.0, 0.0
    b1, b2 = (float(np.float32(b)) for b in (B1, B2))
    for t, (g, rate) in enumerate(zip(gradients, rates, strict=True), 1):
        mu, nu = b1 * mu + (1 - b1) * g, b2 * nu + (1 - b2) * g.astype(np.float64) ** 2
        p = p - rate * (mu / (1 - b1**t) / (np.sqrt(nu / (1 - b2**t)) + EPS) + DECAY * p)
    return p


def gaps(p):
    """Return the gap between each weight and the next number of bfloat16."""
    return np.exp2(np.floor(np.log2(np.abs(p) + 1e-30)) - 7)


def error(weights, due):
    """Return the root mean square of the distance from the exact run, in gaps."""
    return float(np.sqrt((((weights - due) / gaps(due)) ** 2).mean()))


OPTIONS = {
    "default": {},
    "float32 moments": {"mu_dtype": "float32", "nu_dtype": "float32"},
    "eight_bit": {"recipe": "eight_bit"},
    "four_bit": {"recipe": "four_bit"},
}


@pytest.mark.parametrize("dtype", ["bfloat16", "float16", "float32"])
@pytest.mark.parametrize(
    "name", [name if name == "default" else pytest.param(name, marks=pytest.mark.slow) for name in OPTIONS]
)
def test_alias_and_class_agree_to_the_bit(name, dtype):
    p, gradients = draws(4)
    (w, state), (theirs, made) = (
        run(p, gradients, dtype=dtype, **OPTIONS[name]) for run in (run_jax, run_torch)
    )
    np.testing.assert_array_equal(w, theirs)
    kept = next(iter(made.state.values()))
    np.testing.assert_array_equal(np.asarray(state.mu["w"], np.float32), kept["exp_avg"].float().numpy())
    assert not np.array_equal(w, p)


def test_l2_decay_stands_in_front():
    p, gradients = draws(3)
    torch_weights, made = run_torch(p, gradients, optimizer="Adam")
    assert [link.name for link in made._choices[0].chain.links] == ["add_decayed_weights", "adamw_fed_back"]
    tx = optax.chain(
        halfstep_jax.add_decayed_weights(DECAY), halfstep_jax.adam(1e-3, param_storage="feedback", seed=7)
    )
    np.testing.assert_array_equal(jax_run(tx, p, gradients)[0], torch_weights)


def test_in_float32_it_is_adamw():
    """30 steps round p, below 1, and what is added, by 2^-24 each."""
    p, gradients = draws(30)
    w, _ = run_torch(p, gradients, dtype="float32")
    np.testing.assert_allclose(w, exact(p, gradients, [1e-3] * 30), rtol=0, atol=30 * 2 * 2.0**-24)


def test_errors_do_not_add_up():
    """Independent errors grow with the root of the steps, to 5 gaps; those fed back stay below 0.94 gaps."""
    p, gradients = draws(300)
    due = exact(p, gradients, [1e-3] * 300)
    formats = {"mu_dtype": "float32", "nu_dtype": "float32"}
    fed_back = error(run_torch(p, gradients, **formats)[0], due)
    alone = error(run_torch(p, gradients, param_storage="stochastic", **formats)[0], due)
    assert fed_back < 0.94 < 4 < alone


def test_small_rates_move_weights_by_the_right_amount():
    """Of equal gradients 400 steps of 1e-6 move a weight by two gaps at most; the mean has 6,144 elements.

    What is fed back is bounded by 16 roots there. A bound on errors themselves would move weights too far.
    """
    p, (g,) = draws(1)
    gradients = np.broadcast_to(np.abs(g) + 0.1, (400, *SHAPE))
    w, _ = run_torch(p, gradients, rate=1e-6, weight_decay=0.0)
    moved = float((w.astype(np.float64) - p).mean())
    spread = float(gaps(p).max()) * 2 / np.sqrt(p.size)
    assert abs(moved + 400e-6) < 5 * spread < 400e-6


def test_the_end_of_eight_bits_swallows_no_errors_in_the_first_steps():
    """Of equal gradients mu is near its end at once: 7.5 roots of nu, without a correction of bias.

    In roots with that correction, 10 times as much at step 10, the bound let a quarter of the way be lost.
    """
    p, (g,) = draws(1)
    gradients = np.broadcast_to(np.abs(g) + 0.1, (40, *SHAPE))
    w, _ = run_torch(p, gradients, rate=1e-4, weight_decay=0.0, recipe="eight_bit")
    moved = float((w.astype(np.float64) - p).mean())
    spread = float(gaps(p).max()) * 2 / np.sqrt(p.size)
    assert abs(moved + 40e-4) < 5 * spread < 0.1 * 40e-4


def restarts(t: int) -> float:
    """Return a rate, relative to its largest: it falls to 0 in 100 steps, and starts again."""
    return 0.5 * (1 + np.cos(np.pi * (t % 100) / 100))


def test_a_rate_that_starts_again_releases_no_large_errors():
    """The group knows the largest rate, by its first lr or by a scheduler: 1/8 of it is what divides errors.

    Without it, errors that were divided by a rate near 0 would be multiplied by the largest.
    """
    p, gradients = draws(130)
    due = exact(p, gradients, [1e-3 * restarts(t) for t in range(130)])
    formats = {"mu_dtype": "float32", "nu_dtype": "float32"}
    known = error(run_torch(p, gradients, schedule=restarts, **formats)[0], due)
    rule = AdamWFedBack(1e-3, weight_decay=DECAY, seed=7, **formats)
    w = torch.nn.Parameter(torch.from_numpy(p).bfloat16())
    optimizer = halfstep_torch.Optimizer([("w", w)], halfstep_torch.chain(rule), compile=False)
    optimizer._choices[0].first_lr = None
    for t, g in enumerate(gradients):
        optimizer.param_groups[0]["lr"] = 1e-3 * restarts(t)
        w.grad = torch.from_numpy(g).bfloat16()
        optimizer.step()
    assert known < 1.5 < 4 < error(w.detach().float().numpy(), due)


def test_a_schedule_and_a_scheduler_agree_to_the_bit():
    p, gradients = draws(12)
    table = jnp.asarray([1e-3 * restarts(t * 16) for t in range(64)], jnp.float32)
    w, _ = run_jax(p, gradients, rate=lambda count: table[count % 64])
    theirs, made = run_torch(p, gradients, rate=lambda t: float(table[t % 64]))
    np.testing.assert_array_equal(w, theirs)
    assert made._group(0).values[0].peak_lr == np.float32(1e-3) == peak_of(lambda count: table[count % 64])


def test_the_largest_rate_of_schedules_is_found():
    warmup = optax.warmup_cosine_decay_schedule(0.0, 1e-3, 333, 10_000)
    assert 0.99e-3 < peak_of(warmup) <= 1e-3
    assert peak_of(optax.constant_schedule(1e-4)) == np.float32(1e-4)

    def traced(rate):
        tx = halfstep_jax.adamw(lambda count: rate, param_storage="feedback")
        return tx.update(jnp.ones(3), tx.init(jnp.ones(3)), jnp.ones(3))[0]

    assert jax.jit(traced)(1e-3).shape == (3,)


def test_a_function_of_the_step_that_ends_is_asked_up_to_its_end():
    table = [1e-4, 3e-4, 1e-4]
    w = torch.nn.Parameter(torch.ones(3))
    made = halfstep_torch.AdamW([("w", w)], lambda t: table[t], param_storage="feedback", compile=False)
    assert made._group(0).values[0].peak_lr == pytest.approx(3e-4)


def test_schedulers_say_the_largest_rate_of_a_group():
    w = torch.nn.Parameter(torch.ones(3))
    made = halfstep_torch.AdamW([("w", w)], 1e-5, param_storage="feedback", compile=False)
    torch.optim.lr_scheduler.OneCycleLR(made, 1e-3, total_steps=10, cycle_momentum=False)
    assert made._group(0).values[0].peak_lr == pytest.approx(1e-3)


def test_the_bound_by_a_gap_is_exact_for_every_exponent():
    p = np.float32(2.0) ** np.arange(-126, 127, dtype=np.float32)
    for dtype, bits, least in (("bfloat16", 7, -126), ("float16", 10, -14)):
        words = np.zeros(p.shape, np.uint32)
        weight = halfstep_spec.rule.StepWeight(p, dtype, words)
        for gaps_ in (-1, 4):
            exponent = np.maximum(np.log2(p).astype(int), least) - bits
            due = np.minimum(np.exp2(np.float64(gaps_) - exponent), 2.0**127).astype(np.float32)
            np.testing.assert_array_equal(weight.bound(np.float32(np.inf), gaps_), due)


def test_the_bound_and_the_update_are_the_references_in_every_corner():
    """Of zeros of both signs, numbers below float16's, ends of the range and infinities."""
    few = np.float32([0, 2.0**-126, 2.0**-30, 2.0**-24, 1, 1 + 2.0**-7, 65504, 2.0**127, np.inf])
    few = np.concatenate([few, -few])
    p, down, q = (x.ravel() for x in np.meshgrid(few, few, few))
    with np.errstate(invalid="ignore", over="ignore"):
        w = p - down
        can_be = (np.signbit(q) == np.signbit(w)) & (np.isfinite(w) | (q == w))
        p, down, q, w = (x[can_be] for x in (p, down, q, w))
        due = FedBackRule.emitted(p, down, w, q)

    def in_jax(*arrays):
        op = JaxOp("rule", opaque_zero())
        return op.bare(emitted(*map(op.wrap, arrays), op))

    torchs = emitted(*map(torch.from_numpy, (p, down, w, q)), TorchOp()).numpy()
    for made in (np.asarray(jax.jit(in_jax)(p, down, w, q)), torchs):
        np.testing.assert_array_equal(made, due)
        np.testing.assert_array_equal(np.signbit(made)[made == 0], np.signbit(due)[due == 0])
    for dtype, gaps_, x in itertools.product(("bfloat16", "float16"), (-1, 4), few[few > 0]):
        of_jax = JaxWeight(jnp.asarray(few), dtype, None, JaxOp("rule"))
        of_torch = TorchWeight(torch.from_numpy(few), dtype, ["words"])
        bound = halfstep_spec.rule.StepWeight(few, dtype, np.zeros(few.shape, np.uint32)).bound(x, gaps_)
        np.testing.assert_array_equal(np.asarray(of_jax.bound(x, gaps_).value), bound)
        np.testing.assert_array_equal(of_torch.bound(torch.tensor(x), gaps_).numpy(), bound)


def test_export_in_float32_owes_what_rounding_left_out():
    """AdamW in float32 that goes on at the same rate without gradients pays it within some steps.

    What stays is what the first steps, whose second moments still changed, have paid too little or too much.
    """
    p, gradients = draws(200)
    formats = {"mu_dtype": "float32", "nu_dtype": "float32", "weight_decay": 0.0}
    w, made = run_torch(p, gradients, **formats)
    wide = torch.nn.Parameter(torch.from_numpy(w))
    theirs = torch.optim.AdamW([wide], 1e-3, weight_decay=0.0)
    theirs.load_state_dict(halfstep_torch.float32_state_dict(made))
    reference = torch.nn.Parameter(torch.from_numpy(p.copy()))
    plain = torch.optim.AdamW([reference], 1e-3, weight_decay=0.0)
    for g in gradients:
        reference.grad = torch.from_numpy(g)
        plain.step()
    before = error(w, reference.detach().numpy().astype(np.float64))
    for optimizer, param in ((theirs, wide), (plain, reference)):
        param.grad = torch.zeros_like(param)
        for _ in range(60):
            optimizer.step()
    after = error(wide.detach().numpy(), reference.detach().numpy().astype(np.float64))
    assert after < 0.6 * before


def test_a_state_goes_into_another_storage_and_back():
    """Its moments are those of AdamW: a run may take the storage up, or leave it, by float32 states."""
    p, gradients = draws(3)
    _, made = run_torch(p, gradients, param_storage="stochastic")
    w = torch.nn.Parameter(torch.from_numpy(p).bfloat16())
    other = halfstep_torch.AdamW([("w", w)], 1e-3, param_storage="feedback", compile=False)
    halfstep_torch.load_float32_state_dict(other, halfstep_torch.float32_state_dict(made))
    mine, theirs = other.state[w], next(iter(made.state.values()))
    assert torch.equal(mine["exp_avg"], theirs["exp_avg"])
    assert int(mine["step"]) == 3


def test_reports_say_it():
    shapes = {"w": jax.ShapeDtypeStruct(SHAPE, jnp.bfloat16), "f": jax.ShapeDtypeStruct(SHAPE, jnp.float32)}
    found = halfstep_jax.describe(halfstep_jax.adamw(1e-3, param_storage="feedback"), shapes)
    assert (found.of("w").rounding, found.of("w").why) == ("feedback", "adamw_fed_back")
    assert found.of("f").rounding == "none"
    p, gradients = draws(2)
    _, made = run_torch(p, gradients)
    assert "feedback" in str(halfstep_torch.describe(made))
    w = made.param_groups[0]["params"][0]
    assert halfstep_torch.diagnose([("w", w)], made).updates_lost == 0
    grads = {"w": jnp.asarray(gradients[0], jnp.bfloat16)}
    tx = halfstep_jax.adamw(1e-6, param_storage="feedback")
    assert halfstep_jax.diagnose(tx, {"w": jnp.asarray(p, jnp.bfloat16)}, grads).updates_lost == 0


def test_what_stands_behind_it_is_refused():
    params = {"w": jnp.ones(3, jnp.bfloat16)}
    tx = halfstep_jax.adamw(1e-3, param_storage="feedback")
    halfstep_jax.check_chain(tx, params)
    halfstep_jax.check_chain(optax.chain(halfstep_jax.clip_by_global_norm(1.0), tx), params)
    with pytest.raises(ValueError, match="scale changes the updates that adamw_fed_back applies to 'w'"):
        halfstep_jax.check_chain(optax.chain(tx, optax.scale(0.5)), params)
    rule = AdamWFedBack(1e-3)
    with pytest.raises(
        ValueError, match=r"adamw_fed_back applies updates to the weights\. Make it the last link"
    ):
        halfstep_torch.chain(rule, halfstep_torch.scale_by_trust_ratio())


@pytest.mark.parametrize("storage", ["feedback", "int8"])
def test_a_first_moment_that_keeps_nothing_is_refused_whenever_it_is_known(storage):
    """Errors are divided by b1: at 0, moments in fine codes and then weights were NaN at step 2."""
    dtype = {"feedback": "bfloat16", "int8": "float32"}[storage]
    message = (
        "puts what rounding leaves out of weights into .* and {}=.* keeps nothing of it. Use a number above"
    )
    of_jax, of_torch = message.format("b1"), message.format(r"betas\[0\]")
    params = {"w": jnp.ones(SHAPE, dtype)}
    for zero in (0.0, 1e-46, np.float32(0), jnp.float32(0)):  # the second is 0 in float32
        with pytest.raises(ValueError, match=of_jax):
            halfstep_jax.adamw(1e-3, b1=zero, param_storage=storage)
    injected = optax.inject_hyperparams(halfstep_jax.adamw, hyperparam_dtype=jnp.float32)
    tx = injected(1e-3, b1=lambda count: jnp.where(count < 1, 0.9, 0.0), param_storage=storage)
    _, state = tx.update(params, tx.init(params), params)
    with pytest.raises(ValueError, match=of_jax):
        tx.update(params, state, params)
    w = torch.nn.Parameter(torch.ones(SHAPE, dtype=getattr(torch, dtype)))
    for given in ({"betas": (0.0, B2)}, {"betas": (torch.tensor(0.0), B2)}):
        with pytest.raises(ValueError, match=of_torch):
            halfstep_torch.AdamW([("w", w)], 1e-3, param_storage=storage, **given)
    optimizer = halfstep_torch.AdamW([("w", w)], 1e-3, param_storage=storage, compile=False)
    for _ in range(3):
        step_by_ones(optimizer)
    before = w.detach().clone()
    optimizer.param_groups[0]["betas"] = (0.0, B2)
    with pytest.raises(ValueError, match=of_torch):
        optimizer.step()
    assert torch.equal(w, before)


def test_a_mask_is_refused():
    with pytest.raises(ValueError, match="takes the whole step of AdamW by one rule, without mask"):
        halfstep_jax.adamw(1e-3, param_storage="feedback", mask={"w": True})


def test_rules_of_users_round_no_weights():
    class Lands(halfstep_jax.Rule):
        rounds_weights = True

        def update(self, g, p, n, m, op):
            return g

    with pytest.raises(ValueError, match="lands: rounds_weights=True is for rules of halfstep"):
        halfstep_jax.as_transform(Lands())


@pytest.mark.parametrize("given", [{}, {"peak_lr": 1e-3}, {"static_args": ("learning_rate",)}])
def test_an_injected_rate_feeds_errors_back_where_the_largest_is_known(given, caplog):
    """Without one the first moment is that of stochastic rounding, and it is logged."""
    say_once_of_jax.cache_clear()
    p, gradients = draws(12)
    static = given.get("static_args", ())
    inject = functools.partial(optax.inject_hyperparams, static_args=static, hyperparam_dtype=jnp.float32)
    schedule = optax.linear_schedule(1e-4, 1e-3, 20)
    peak = {name: x for name, x in given.items() if name == "peak_lr"}
    states = (
        jax_run(inject(halfstep_jax.adamw)(schedule, param_storage=name, seed=7, **peak), p, gradients)[1]
        for name in ("feedback", "stochastic")
    )
    fed_back, alone = (np.asarray(optax.tree.get(state, "mu")["w"], np.float32) for state in states)
    assert np.array_equal(fed_back, alone) != bool(given)
    assert ("Pass peak_lr, the largest rate" in caplog.text) != bool(given)


@pytest.mark.parametrize("known", [{}, {"max_lr": 1e-4}])
def test_a_rate_that_rises_unseen_is_spoken_of_in_torch(known, caplog):
    """Of a group that has the largest rate as max_lr, as the message asks, nothing is said."""
    say_once.cache_clear()
    p = torch.nn.Parameter(torch.ones(4, dtype=torch.bfloat16))
    p.grad = torch.ones_like(p)
    group = {"params": [("w", p)], "lr": 1e-7, **known}
    optimizer = halfstep_torch.AdamW([group], param_storage="feedback", compile=False)
    for rate in (1e-7, 7e-7, 1e-4, 1e-4):
        optimizer.param_groups[0]["lr"] = rate
        optimizer.step()
    lines = [record.getMessage() for record in caplog.records]
    assert len(lines) == (0 if known else 1)
    assert all("the learning rate is 0.0001, more than 8 times the largest" in line for line in lines)


def test_a_rate_that_rises_unseen_is_spoken_of_by_the_monitor(caplog):
    """Of a schedule, or of its largest rate, as the message asks, nothing is said."""

    def said(make, rates) -> list[str]:
        monitor.SAID.clear()
        caplog.clear()
        params = {"w": jnp.ones(8, jnp.bfloat16)}
        watch, state = halfstep_jax.Monitor(make, 1), make.init(params)
        for rate in rates:
            if rate:
                state.hyperparams["learning_rate"] = jnp.float32(rate)
            updates, state = make.update(params, state, params)
            params = optax.apply_updates(params, updates)
            watch.read(params, state)
        return [x.getMessage() for x in caplog.records if "the learning rate" in x.getMessage()]

    def fed_back(learning_rate, peak_lr=None):
        return halfstep_jax.adamw(learning_rate, param_storage="feedback", peak_lr=peak_lr)

    inject = optax.inject_hyperparams(fed_back, hyperparam_dtype=jnp.float32)
    assert not said(inject(learning_rate=1e-6, peak_lr=1e-3), (1e-6, 1e-6, 1e-3, 1e-3))
    (line,) = said(inject(learning_rate=1e-6, peak_lr=1e-6), (1e-6, 1e-6, 1e-3, 1e-3))
    assert line.startswith(
        "Monitor: the learning rate is 0.001, more than 8 times the largest that was known"
    )
    rising = optax.schedules.join_schedules([lambda _: 1e-6, lambda _: 1e-3], [2])
    assert not said(fed_back(rising), (None,) * 4)


def test_a_function_of_the_step_is_asked_once_for_each_count_that_comes():
    """Past its end its last number stays; one that changes its mind is asked again."""
    asked, factor = [], [1.0]

    def rate(count):
        asked.append(count)
        return [0.1, 0.2, 0.3, 0.4][count] * factor[0]

    schedule = Schedule(rate)
    np.testing.assert_array_equal(schedule.ahead(1, 4), np.float32([0.2, 0.3, 0.4, 0.4]))
    asked.clear()
    np.testing.assert_array_equal(schedule.ahead(2, 4), np.float32([0.3, 0.4, 0.4, 0.4]))
    assert sorted(asked) == [1, 2, 5]  # two to compare
    factor[0] = 2.0
    np.testing.assert_array_equal(schedule.ahead(2, 3), np.float32([0.6, 0.8, 0.8]))


def test_schedules_of_the_host_and_of_branches_are_read_ahead():
    table = np.float32([0.5, 0.25, 0.125, 0.0625])

    def on_the_host(count):
        number = jax.ShapeDtypeStruct((), "float32")
        return jax.pure_callback(lambda t: table[min(int(t), 3)], number, count)

    def branching(count):  # op by op alone
        return table[int(count)]

    np.testing.assert_array_equal(coming("rule", "rate", branching, jnp.int32(1), 3), table[1:])
    np.testing.assert_array_equal(jax.jit(lambda t: coming("rule", "rate", on_the_host, t, 3))(1), table[1:])
    assert peak_of(on_the_host) == 0.5

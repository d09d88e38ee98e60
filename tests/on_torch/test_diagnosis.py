"""What `diagnose` says of torch's own optimizers and of ours, held against a step that is really taken."""

import pytest
import torch

import halfstep_torch as hs
from halfstep_torch.say_once import say_once

STEPS = 12


def trained(make, dtype=torch.bfloat16):
    """Return a model and its optimizer after some steps, with the gradients of the next."""
    torch.manual_seed(0)
    model = torch.nn.Sequential(torch.nn.Linear(48, 48), torch.nn.ReLU(), torch.nn.Linear(48, 48)).to(dtype)
    optimizer = make(model)
    for step in range(STEPS):
        x = torch.randn(8, 48, generator=torch.Generator().manual_seed(step)).to(dtype)
        optimizer.zero_grad()
        model(x).square().mean().backward()
        if step < STEPS - 1:
            optimizer.step()
    return model, optimizer


def torchs(lr: float, **options):
    return lambda model: torch.optim.AdamW(model.parameters(), lr=lr, weight_decay=0.1, **options)


def ours(lr: float, **options):
    return lambda model: hs.AdamW(model.named_parameters(), lr=lr, weight_decay=0.1, compile=False, **options)


MAKERS = {
    "AdamW, slow": torchs(1e-5),
    "AdamW, fast": torchs(1e-3),
    "AdamW, fused": torchs(1e-4, fused=True),
    "SGD": lambda model: torch.optim.SGD(model.parameters(), lr=1e-2, momentum=0.9),
    "nearest": ours(1e-4, param_storage="nearest"),
}


@pytest.mark.parametrize("name", MAKERS)
def test_the_predicted_share_is_that_of_the_step_that_follows(name):
    model, optimizer = trained(MAKERS[name])
    before = [p.detach().clone() for p in model.parameters()]
    predicted = hs.diagnose(model, optimizer).updates_lost
    optimizer.step()
    after = [p.detach() for p in model.parameters()]
    still = sum(int((a == b).sum()) for a, b in zip(before, after, strict=True))
    counted = still / sum(p.numel() for p in before)
    # Elements whose update is zero, of units that are off, are not lost; here there are few.
    assert abs(predicted - counted) < 0.01
    assert 0.05 < predicted


def test_nothing_of_the_run_is_changed():
    model, optimizer = trained(torchs(1e-4))
    torch.optim.lr_scheduler.StepLR(optimizer, 1)  # which patches step
    optimizer.register_step_pre_hook(lambda *_: pytest.fail("a step of the run was taken"))
    state = {k: v.clone() for p in model.parameters() for k, v in optimizer.state[p].items()}
    arrays = [[p.detach().clone(), p.grad.clone()] for p in model.parameters()]
    generator = torch.get_rng_state()
    hs.diagnose(model, optimizer)
    assert torch.equal(generator, torch.get_rng_state())
    for p, (weight, grad) in zip(model.parameters(), arrays, strict=True):
        assert torch.equal(p, weight)
        assert torch.equal(p.grad, grad)
    last = list(model.parameters())[-1]
    assert all(torch.equal(state[key], x) for key, x in optimizer.state[last].items())


class Noisy(torch.optim.SGD):
    """Draws a number of torch's global generator for every weight."""

    @torch.no_grad()
    def step(self, closure=None):
        for group in self.param_groups:
            for p in group["params"]:
                p.add_(torch.randn(p.shape).to(p.dtype), alpha=-group["lr"])


def test_an_optimizer_that_draws_random_numbers_draws_the_same_afterwards():
    model, optimizer = trained(lambda model: Noisy(model.parameters(), lr=1e-2))
    generator = torch.get_rng_state()
    hs.diagnose(model, optimizer)
    assert torch.equal(generator, torch.get_rng_state())


def test_the_stall_is_told_with_its_warning():
    diagnosis = hs.diagnose(*trained(torchs(1e-5)))
    assert diagnosis.updates_lost > 0.9
    assert diagnosis.decay_lost == 1
    assert diagnosis.leaves["0.weight"] > 0.9
    assert diagnosis.moments["exp_avg_sq"].frozen == 1
    assert diagnosis.moments["exp_avg"].frozen == 0
    assert diagnosis.moments["exp_avg"].dtypes == {"bfloat16": 2 * 48 * 49}
    text = " ".join(str(diagnosis).split())
    for phrase in ("updates lost", "exp_avg_sq cannot shrink", "too high once they move", "0.weight"):
        assert phrase in text


def test_decay_that_is_lost_is_told_where_updates_are_not():
    """A decay of 1e-6 of a weight, beside updates that move every weight."""
    p = torch.nn.Parameter(torch.ones(8, 8, dtype=torch.bfloat16))
    p.grad = torch.ones_like(p)
    diagnosis = hs.diagnose([("p", p)], torch.optim.AdamW([p], lr=1e-1, weight_decay=1e-5))
    assert (diagnosis.updates_lost, diagnosis.decay_lost) == (0, 1)
    assert any("0% of the updates and 100% of the decay" in line for line in diagnosis.advice)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("make", "dtype"),
    [
        (torchs(1e-5), torch.float32),
        (ours(1e-5), torch.bfloat16),
        (ours(1e-5, param_storage="split16"), torch.bfloat16),
        (ours(1e-5, **hs.recipes.one_pass), torch.bfloat16),
    ],
)
def test_there_is_no_false_alarm(make, dtype):
    diagnosis = hs.diagnose(*trained(make, dtype))
    assert diagnosis.advice == ()
    assert diagnosis.updates_lost == 0
    assert "Nothing is lost." in str(diagnosis)


def test_a_nearest_second_moment_of_ours_is_seen_to_freeze():
    make = ours(1e-5, nu_rounding="nearest_unchecked")
    assert hs.diagnose(*trained(make)).moments["exp_avg_sq"].frozen == 1


def test_second_moments_that_underflow_are_told():
    diagnosis = hs.diagnose(*trained(torchs(1e-5, eps=1e-4), torch.float16))
    assert diagnosis.moments["exp_avg_sq"].zero > 0.5
    assert any("is zero where exp_avg is not" in line for line in diagnosis.advice)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_sums_of_micro_batches_in_16_bits_are_told(dtype):
    model, optimizer = trained(torchs(1e-3), dtype)
    quiet = hs.diagnose(model, optimizer)
    torch.nn.utils.clip_grad_norm_(model.parameters(), 1e-3)
    assert hs.diagnose(model, optimizer).sums_rounded == quiet.sums_rounded == 0

    def after_four_backwards():
        optimizer.zero_grad()
        for _ in range(4):
            model(torch.ones(8, 48, dtype=dtype)).square().mean().backward()
        return hs.diagnose(model, optimizer)

    loud = after_four_backwards()
    told = any("they lose small addends" in line for line in loud.advice)
    assert (loud.sums_rounded, told) == ((1, True) if dtype == torch.bfloat16 else (0, False))
    assert f"rounded to nearest {loud.sums_rounded:.1%}" in str(loud)
    handle = hs.accumulate_gradients(optimizer)
    assert after_four_backwards().sums_rounded == 0
    handle.remove()


@pytest.mark.slow
def test_a_format_that_does_nothing_is_told():
    model, optimizer = trained(ours(1e-4, nu_dtype=hs.scaled("ufloat8_e5m3")))
    diagnosis = hs.diagnose(model, optimizer)
    assert diagnosis.moments["exp_avg_sq"].not_as_asked == 1
    assert diagnosis.moments["exp_avg"].not_as_asked == 0
    assert diagnosis.advice[-1].startswith(
        "100% of exp_avg_sq is not kept as was asked for: asked for ufloat8_e5m3, blocks of 128, but 2304 "
        "elements are fewer than min_size=4096."
    )
    small = ours(1e-4, nu_dtype=hs.scaled("ufloat8_e5m3", min_size=48))
    share = hs.diagnose(*trained(small)).moments["exp_avg_sq"].not_as_asked
    assert share == 2 * 48 / (2 * 48 * 49)  # the biases, which have one axis
    assert "2.0% not in the format asked for" in str(hs.diagnose(*trained(small)))


def test_a_state_of_another_dtype_than_a_fresh_one_is_told():
    model, optimizer = trained(lambda model: torch.optim.SGD(model.parameters(), lr=1e-2, momentum=0.9))
    for p in model.parameters():
        p.data, p.grad = p.data.float(), p.grad.float()
    moment = hs.diagnose(model, optimizer).moments["momentum_buffer"]
    assert moment.not_as_asked == 1
    assert moment.why == "it is bfloat16, and float32 where fresh"


def test_the_norm_is_that_of_float32():
    params = [torch.nn.Parameter(torch.ones(4, dtype=torch.bfloat16)) for _ in range(1000)]
    for p in params:
        p.grad = torch.ones_like(p)
    diagnosis = hs.diagnose(params, torch.optim.SGD(params, lr=1.0))
    assert diagnosis.norm == pytest.approx(4000**0.5)
    # torch's own takes the norm of norms, which in bfloat16 is right to within a gap or two.
    assert diagnosis.plain_norm == pytest.approx(4000**0.5, rel=2**-7)
    assert (diagnosis.updates_lost, diagnosis.advice) == (0, ())


def test_what_cannot_be_diagnosed_is_refused():
    model, optimizer = trained(torchs(1e-4))
    optimizer.zero_grad()
    with pytest.raises(ValueError, match="no parameter has a gradient"):
        hs.diagnose(model, optimizer)
    with pytest.raises(TypeError, match=r"LBFGS.step needs a closure"):
        hs.diagnose(model, torch.optim.LBFGS(model.parameters()))
    with pytest.raises(TypeError, match="optimizer is Sequential"):
        hs.diagnose(model, model)


def _stepped(scale=1.0, **options):
    torch.manual_seed(0)
    model = torch.nn.Linear(128, 64).bfloat16()
    optimizer = hs.AdamW(model.named_parameters(), **options)
    x = torch.randn(8, 128).bfloat16()
    for _ in range(2):
        optimizer.zero_grad()
        (scale * model(x).square().mean()).backward()
        optimizer.step()
    return model, optimizer


@pytest.mark.slow
@pytest.mark.parametrize("options", [{}, {"nu_dtype": "ufloat16_e7m9"}], ids=["default", "ufloat16_e7m9"])
def test_what_is_not_finite_comes_first(options):
    model, optimizer = _stepped(**options)
    with torch.no_grad():
        model.weight[:32] = torch.nan
        model.bias.grad.fill_(torch.inf)
    found = hs.diagnose(model, optimizer)
    assert found.nonfinite["weights"] == 32 * 128 / (129 * 64)
    assert found.nonfinite["gradients"] == 1 / 129
    assert found.advice[0].startswith("49.6% of the weights, 0.8% of the gradients are infinite or NaN")
    assert "Nothing is lost" not in str(found)
    model, optimizer = _stepped(scale=1e6, **options)
    keys = ("weights", "gradients", "exp_avg", "exp_avg_sq")
    expected = {"weights": 1.0, "gradients": 1.0, "exp_avg": 1.0, "exp_avg_sq": 1.0}
    assert hs.diagnose(model, optimizer).nonfinite == (expected if options else dict.fromkeys(keys, 0.0))


def test_a_spike_that_the_second_moment_does_not_hold_leaves_everything_finite():
    found = hs.diagnose(*_stepped(scale=1e6, **hs.recipes.one_pass))
    assert not any(found.nonfinite.values())
    assert found.advice[0].startswith(
        "Gradients of 'bias' are so large that squares of 98% of them are above what uroot4_e4m4"
    )


@pytest.mark.slow
@pytest.mark.parametrize(("scale", "what"), [(1e-9, "small"), (1e4, "large")])
def test_gradients_outside_the_range_of_a_format_are_told(scale, what):
    found = hs.diagnose(*_stepped(scale, **hs.recipes.one_pass))
    assert any(f"are so {what} that squares of" in line for line in found.advice)
    assert hs.diagnose(*_stepped(scale, **hs.recipes.eight_bit)).advice == ()


def test_a_second_moment_of_18_binades_is_told():
    found = hs.diagnose(*_stepped(nu_dtype=hs.scaled("float8_e4m3fn")))
    assert [line[:50] for line in found.advice] == ["exp_avg_sq in float8_e4m3fn holds 18 binades of a "]


def test_a_run_whose_second_moments_stand_at_an_end_is_warned_once(caplog):
    say_once.cache_clear()
    _, optimizer = _stepped(1e7, lr=1e-6, **hs.recipes.one_pass)
    for _ in range(100):
        optimizer.step()
    told = [
        line for line in caplog.messages if "exp_avg_sq at the largest, so that steps are too long" in line
    ]
    assert len(told) == 1


@pytest.mark.parametrize(("share", "lost"), [(0.75, 1.0), (1.5, 0.0)])
def test_an_update_is_lost_by_compensation_below_2_to_the_minus_18_of_a_weight(share, lost):
    p = torch.nn.Parameter(torch.ones(8, dtype=torch.bfloat16))
    p.grad = torch.ones_like(p)
    optimizer = hs.SGD([("w", p)], lr=share * 2.0**-18, param_storage="compensated", compile=False)
    assert hs.diagnose([("w", p)], optimizer).updates_lost == lost


def test_one_backward_that_is_unscaled_and_clipped_is_no_sum():
    model, optimizer = trained(torchs(1e-3))
    for p in model.parameters():
        p.grad = p.grad.clone()  # of which nothing was written yet
        p.grad.mul_(2.0**-4)
    torch.nn.utils.clip_grad_norm_(model.parameters(), 1e-3)
    assert hs.diagnose(model, optimizer).sums_rounded == 0


class Weighted(torch.optim.SGD):
    """Has a number of its own, which a pickle of torch's optimizers leaves out."""

    def __init__(self, params, lr, weight):
        super().__init__(params, lr)
        self.weight = weight

    @torch.no_grad()
    def step(self, closure=None):
        for group in self.param_groups:
            for p in group["params"]:
                p.sub_(p.grad, alpha=group["lr"] * self.weight)


def test_a_trial_has_what_a_subclass_has_added():
    model, optimizer = trained(lambda model: Weighted(model.parameters(), 1.0, weight=1e-9))
    assert hs.diagnose(model, optimizer).updates_lost > 0.99

"""Learning rates: torch's schedulers write them, tensors carry them, functions of the step give them."""

import copy

import pytest
import torch
from torch.distributed.checkpoint.state_dict import get_optimizer_state_dict, set_optimizer_state_dict
from torch.optim import lr_scheduler

import halfstep_torch as hs
from halfstep_torch.say_once import say_once
from on_torch.steps import step_by_ones

SCHEDULERS = {
    "LambdaLR": lambda o: lr_scheduler.LambdaLR(o, lambda t: 1 / (t + 1)),
    "MultiplicativeLR": lambda o: lr_scheduler.MultiplicativeLR(o, lambda t: 0.9),
    "StepLR": lambda o: lr_scheduler.StepLR(o, 2),
    "MultiStepLR": lambda o: lr_scheduler.MultiStepLR(o, [1, 3]),
    "ConstantLR": lambda o: lr_scheduler.ConstantLR(o, total_iters=2),
    "LinearLR": lambda o: lr_scheduler.LinearLR(o, total_iters=4),
    "ExponentialLR": lambda o: lr_scheduler.ExponentialLR(o, 0.9),
    "PolynomialLR": lambda o: lr_scheduler.PolynomialLR(o, 4),
    "CosineAnnealingLR": lambda o: lr_scheduler.CosineAnnealingLR(o, 5),
    "CosineAnnealingWarmRestarts": lambda o: lr_scheduler.CosineAnnealingWarmRestarts(o, 2),
    "CyclicLR": lambda o: lr_scheduler.CyclicLR(o, 1e-3, 1e-2, step_size_up=2),
    "OneCycleLR": lambda o: lr_scheduler.OneCycleLR(o, 1e-2, total_steps=7),
    "ReduceLROnPlateau": lambda o: lr_scheduler.ReduceLROnPlateau(o, patience=0),
    "SequentialLR": lambda o: lr_scheduler.SequentialLR(
        o, [lr_scheduler.ConstantLR(o), lr_scheduler.ExponentialLR(o, 0.5)], [2]
    ),
    "ChainedScheduler": lambda o: lr_scheduler.ChainedScheduler(
        [lr_scheduler.ConstantLR(o), lr_scheduler.ExponentialLR(o, 0.5)]
    ),
}


def params(groups: int = 2):
    return [{"params": [(f"w{i}", torch.nn.Parameter(torch.ones(20)))]} for i in range(groups)]


def drive(optimizer, scheduler, steps=6):
    """Step, and return what the scheduler wrote into the groups."""
    rates = []
    for step in range(steps):
        for group in optimizer.param_groups:
            for p in group["params"]:
                p.grad = torch.full_like(p, 0.1 * (step + 1))
        optimizer.step()
        rates.append([(float(g["lr"]), tuple(g.get("betas", ()))) for g in optimizer.param_groups])
        scheduler.step(1.0) if isinstance(scheduler, lr_scheduler.ReduceLROnPlateau) else scheduler.step()
    return rates


@pytest.mark.parametrize("tensor", [False, True], ids=["number", "tensor"])
@pytest.mark.parametrize("name", SCHEDULERS)
def test_schedulers_drive_it_as_they_drive_torch_s_own(name, tensor):
    def rate():
        return torch.tensor(1e-2) if tensor else 1e-2

    mine = hs.AdamW(params(), lr=rate())
    theirs = torch.optim.AdamW(params(), lr=rate(), foreach=False)
    assert drive(mine, SCHEDULERS[name](mine)) == drive(theirs, SCHEDULERS[name](theirs))
    for ours, other in zip(mine.param_groups, theirs.param_groups, strict=True):
        # Both follow Adam in float32, each rounding in its own order: the bound of tests/spec/test_adam.py.
        torch.testing.assert_close(ours["params"][0], other["params"][0], rtol=1e-5, atol=0)


def test_parameters_of_different_age_read_a_schedule_at_their_own_count():
    p, q = (torch.nn.Parameter(torch.ones(3)) for _ in range(2))
    optimizer = hs.SGD([p, q], lr=lambda count: 0.5 ** (count + 1))
    p.grad = torch.ones(3)
    optimizer.step()
    q.grad = torch.ones(3)
    optimizer.step()
    assert (p[0].item(), q[0].item()) == (1 - 0.5 - 0.25, 1 - 0.5)
    assert optimizer.param_groups[0]["lr"] == 0.25  # of the oldest


def test_a_schedule_decides_over_a_scheduler_and_says_so(caplog):
    say_once.cache_clear()
    model = params()
    optimizer = hs.SGD(model, lr=lambda count: 0.5 ** (count + 1))
    scheduler = lr_scheduler.StepLR(optimizer, 1, gamma=0.1)
    rates = drive(optimizer, scheduler, steps=3)
    assert {type(rate) for rate in scheduler.state_dict()["base_lrs"]} == {float}  # as torch.load takes it
    assert [rate for (rate, _), _ in rates] == [0.5, 0.25, 0.125]
    assert [record.getMessage() for record in caplog.records] == [
        f"SGD: a learning rate was written into param group {i}, whose lr is a function of the step: the "
        "function decides. Pass lr as a number to use a scheduler."
        for i in range(2)
    ]


def test_a_schedule_obeys_a_zero_that_was_written():
    """As torch.distributed.checkpoint writes it, to make state by a step that moves nothing."""
    p = torch.nn.Parameter(torch.ones(3))
    optimizer = hs.AdamW([p], lr=lambda count: 0.5, weight_decay=0.5)
    shown = optimizer.param_groups[0]["lr"]
    p.grad = torch.zeros(3)
    optimizer.param_groups[0]["lr"] = 0.0
    optimizer.step()
    assert (p == 1).all()
    assert optimizer.param_groups[0]["lr"] == 0
    optimizer.param_groups[0]["lr"] = shown
    optimizer.step()
    assert (p == 0.75).all()


def test_checkpointing_a_model_moves_no_weight_where_lr_is_a_schedule():
    model = torch.nn.Linear(3, 2)
    before = copy.deepcopy(model.state_dict())
    optimizer = hs.AdamW(model.named_parameters(), lr=lambda count: 0.1, weight_decay=0.5)
    saved = get_optimizer_state_dict(model, optimizer)
    assert all(torch.equal(before[name], p) for name, p in model.named_parameters())
    set_optimizer_state_dict(model, optimizer, saved)
    assert optimizer.param_groups[0]["lr"] == 0.1
    model(torch.ones(1, 3)).sum().backward()
    optimizer.step()
    assert any((before[name] != p).any() for name, p in model.named_parameters())


def test_a_schedule_that_starts_below_zero_is_refused_at_once():
    with pytest.raises(ValueError, match=r"^SGD: lr\(0\)=-1 is negative\. Use a schedule of numbers >= 0\.$"):
        hs.SGD(params(), lr=lambda count: -1)


def test_a_tensor_lr_is_read_at_every_step():
    lr, p = torch.tensor(0.0), torch.nn.Parameter(torch.ones(3))
    optimizer = hs.AdamW([p], lr=lr, weight_decay=0.0)
    for rate in (0.0, 0.5):
        lr.fill_(rate)
        step_by_ones(optimizer)
        # Of equal gradients the update is 1, to 1e-6 for each correction, 1e-8 for eps, and ten roundings.
        assert abs(p.detach()[0].item() - (1 - rate)) <= rate * (2e-6 + 1e-8 + 10 * 2.0**-24)
    assert optimizer.param_groups[0]["lr"] is lr


def test_a_zero_of_a_scheduler_beside_a_schedule_stops_nothing():
    p = torch.nn.Parameter(torch.ones(20))
    optimizer = hs.SGD([("w", p)], lr=lambda count: 0.125)
    scheduler = lr_scheduler.LambdaLR(optimizer, lambda t: max(0, 1 - t / 2))
    for count in range(1, 6):
        step_by_ones(optimizer)
        scheduler.step()
        assert (p == 1 - 0.125 * count).all()


def test_checkpointing_moves_no_weight_where_a_scheduler_stands_beside_a_schedule():
    model = torch.nn.Linear(3, 2)
    before = copy.deepcopy(model.state_dict())
    optimizer = hs.AdamW(model.named_parameters(), lr=lambda count: 0.1, weight_decay=0.5)
    lr_scheduler.LambdaLR(optimizer, lambda t: 0.0)
    get_optimizer_state_dict(model, optimizer)
    assert all(torch.equal(before[name], p) for name, p in model.named_parameters())


@pytest.mark.parametrize("cycle", ["OneCycleLR", "CyclicLR"])
@pytest.mark.parametrize("recipe", ["one_pass", "eight_bit"])
def test_momentum_that_leaves_a_format_later_is_refused_at_the_first_step(cycle, recipe):
    """A cycle reaches its smallest beta in the middle of a run; the group says both ends from the start."""
    p = torch.nn.Parameter(torch.ones(256, dtype=torch.bfloat16))
    optimizer = hs.AdamW([("p", p)], recipe=recipe)

    def cycled(least):
        if cycle == "OneCycleLR":
            return lr_scheduler.OneCycleLR(optimizer, 1e-2, total_steps=1000, base_momentum=least)
        return lr_scheduler.CyclicLR(optimizer, 1e-4, 1e-2, base_momentum=least, max_momentum=0.95)

    cycled(0.85)
    p.grad = torch.ones_like(p)
    with pytest.raises(
        ValueError, match=r"b1=0\.85.* use b1 from 0\.9 to 0\.99, constant .*base_momentum=0\.85"
    ):
        optimizer.step()
    assert (p == 1).all()
    assert not optimizer.state
    cycled(0.9)
    optimizer.step()
    assert (p != 1).any()


def test_preheat_rises_to_its_top_and_then_falls():
    schedule = hs.preheat(1e-2, 10, -0.25)
    assert max(map(schedule, range(100))) == schedule(9) == pytest.approx(1e-2)
    assert schedule(0) == pytest.approx(1e-3)
    assert schedule(159) == pytest.approx(1e-2 / 2)
    p = torch.nn.Parameter(torch.ones(2))
    p.grad = torch.ones(2)
    hs.SGD([("p", p)], lr=schedule).step()
    torch.testing.assert_close(p.detach(), torch.full((2,), 1 - 1e-3))


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ((1e-3, 0), "preheat_steps=0 is no rise"),
        ((1e-3, 10, 0.5), r"-decay_power=-0\.5 is negative"),
        ((-1, 10), "=-1 is negative"),
    ],
)
def test_schedules_that_do_not_rise_or_fall_are_refused(arguments, message):
    with pytest.raises(ValueError, match=message):
        hs.preheat(*arguments)

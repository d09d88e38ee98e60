"""Rates that a scheduler is about to write, which feedback of rounding errors reads ahead."""

import copy
import pickle
from typing import Any

import numpy as np
import pytest
import torch
from torch.optim import lr_scheduler

import halfstep_torch as hs
from halfstep_torch.say_once import say_once

STEPS, AHEAD = 24, 128
SCHEDULERS = {
    "LambdaLR": lambda o: lr_scheduler.LambdaLR(o, lambda t: min((t + 1) / 10, 0.98**t)),
    "SequentialLR": lambda o: lr_scheduler.SequentialLR(
        o,
        [lr_scheduler.LinearLR(o, 0.05, total_iters=10), lr_scheduler.CosineAnnealingLR(o, 50)],
        [10],
    ),
    "ChainedScheduler": lambda o: lr_scheduler.ChainedScheduler(
        [lr_scheduler.LinearLR(o, 0.05, total_iters=10), lr_scheduler.ExponentialLR(o, 0.97)]
    ),
    "OneCycleLR": lambda o: lr_scheduler.OneCycleLR(
        o, 1e-2, total_steps=50, pct_start=0.2, cycle_momentum=False
    ),
    "StepLR": lambda o: lr_scheduler.StepLR(o, 15),
}


def built(lr: object = 1e-2, **options):
    """Return an AdamW with two weights that feeds errors back."""
    torch.manual_seed(0)
    options = {"param_storage": "feedback", "betas": (0.9, 0.99), "compile": False, **options}
    w = [torch.nn.Parameter(torch.randn(64, dtype=torch.bfloat16)) for _ in range(2)]
    make: Any = hs.AdamW
    return make([("a", w[0]), ("b", w[1])], lr, **options)


def trained(optimizer, scheduler=None, steps=range(STEPS)):
    """Take steps, after each of which a scheduler moves; return the bits of weights and first moments."""
    for t in steps:
        for i, p in enumerate(optimizer.param_groups[0]["params"]):
            rng = np.random.default_rng([t, i])
            p.grad = torch.from_numpy(rng.standard_normal(p.shape)).to(p.dtype)
        optimizer.step()
        if scheduler:
            scheduler.step()
    return bits(optimizer)


def bits(optimizer):
    """Return the bits of weights and first moments."""
    weights = optimizer.param_groups[0]["params"]
    kept = [x for p in weights for x in (p, optimizer.state[p]["exp_avg"])]
    return torch.cat([x.detach().view(torch.int16) for x in kept])


def read(name, **options):
    """Return an optimizer and its scheduler, which was read."""
    optimizer = built(**options)
    scheduler = SCHEDULERS[name](optimizer)
    optimizer.read_rates(scheduler)
    return optimizer, scheduler


@pytest.fixture(autouse=True)
def _heard():
    say_once.cache_clear()


@pytest.mark.parametrize("name", SCHEDULERS)
def test_a_scheduler_that_is_read_has_the_bits_of_lr_as_a_function(name, caplog):
    plain = torch.optim.SGD([torch.zeros(1)], 1e-2)
    writes, table = SCHEDULERS[name](plain), []
    for t in range(STEPS + AHEAD):
        table.append(plain.param_groups[0]["lr"])
        plain.step()
        if t < 50 or name != "OneCycleLR":  # which then ends
            writes.step()
    read_ahead = trained(*read(name))
    assert torch.equal(read_ahead, trained(built(table.__getitem__)))
    unread = built()
    assert not torch.equal(read_ahead, trained(unread, SCHEDULERS[name](unread)))
    assert not caplog.records


def test_a_scheduler_of_epochs_is_left_with_one_line(caplog):
    """Its rates come later than its copy gave them: from the second step on they are unknown."""
    optimizer, scheduler = read("SequentialLR")
    trained(optimizer, steps=range(1))
    unread = copy.deepcopy(optimizer)
    for epoch in range(4):
        steps = range(5 * epoch + 1, 5 * epoch + 5)
        assert torch.equal(trained(optimizer, steps=steps), trained(unread, steps=steps))
        scheduler.step()
        unread.param_groups[0]["lr"] = optimizer.param_groups[0]["lr"]
    (line,) = (x.getMessage() for x in caplog.records)
    assert "it is not stepped once after each step" in line


def test_a_scheduler_that_moves_twice_is_unknown_for_one_step(caplog):
    """As where a GradScaler skips a step: rates are known again from the next on."""
    optimizer, scheduler = read("LambdaLR")
    trained(optimizer, scheduler, range(3))
    scheduler.step()
    trained(optimizer, scheduler, range(3, 4))
    assert len(caplog.records) == 1
    made = optimizer._group(0).values[0].learning_rate
    assert optimizer._group(0).knows_rates
    assert made.ahead(5, 3) is not None


def test_a_rate_that_is_written_beside_a_scheduler_is_said_once(caplog):
    optimizer, scheduler = read("StepLR")
    trained(optimizer, scheduler, range(3))
    optimizer.param_groups[0]["lr"] = 3e-3
    trained(optimizer, scheduler, range(3, 6))
    (line,) = (x.getMessage() for x in caplog.records)
    assert "0.003 was written where it was to give 0.01" in line


def test_a_resumed_run_that_reads_its_scheduler_again_keeps_its_bits():
    whole, scheduler = read("SequentialLR")
    trained(whole, scheduler, range(12))
    saved = copy.deepcopy((whole.state_dict(), scheduler.state_dict()))
    weights = [p.detach().clone() for p in whole.param_groups[0]["params"]]
    due = trained(whole, scheduler, range(12, 30))
    resumed, again = read("SequentialLR")
    for later in range(2):  # also where the same objects load again
        with torch.no_grad():
            for p, saved_p in zip(resumed.param_groups[0]["params"], weights, strict=True):
                p.copy_(saved_p)
        again.load_state_dict(copy.deepcopy(saved[1]))
        resumed.load_state_dict(saved[0])
        assert torch.equal(trained(resumed, again, range(12, 30)), due), later


def test_a_parameter_that_rests_hides_no_rates(caplog):
    """Counts of parameters differ then, and one scheduler tells the rates of both."""
    optimizer, scheduler = read("LambdaLR")
    a, b = optimizer.param_groups[0]["params"]
    for rests in (a, a, b, None):
        for p in (a, b):
            p.grad = None if p is rests else torch.ones_like(p)
        optimizer.step()
        scheduler.step()
    assert not caplog.records
    assert optimizer._group(0).knows_rates


def test_a_pickle_and_a_forgotten_scheduler_have_unknown_rates():
    optimizer, scheduler = read("LambdaLR", seed=3)
    trained(optimizer, scheduler, range(3))
    assert pickle.loads(pickle.dumps(optimizer))._rates is None
    unread = copy.deepcopy(optimizer)
    del scheduler
    assert torch.equal(trained(optimizer, steps=range(3, 6)), trained(unread, steps=range(3, 6)))


def test_what_is_no_scheduler_of_the_optimizer_is_refused():
    optimizer = built()
    others: list[tuple[Any, type[Exception], str]] = [
        (lr_scheduler.ReduceLROnPlateau(optimizer), TypeError, "follow a metric"),
        (lambda step: 1e-3, TypeError, "function is no LRScheduler"),
        (SCHEDULERS["StepLR"](built()), ValueError, "writes into another optimizer"),
    ]
    for other, kind, message in others:
        with pytest.raises(kind, match=message):
            optimizer.read_rates(other)

"""Rules that see means of a whole parameter, in pieces: with the bits of whole arrays."""

import functools

import pytest
import torch

import halfstep_torch as hs
from halfstep.kernels import build
from halfstep_torch.engine import lazy_arrays, lazy_step, plain, run
from on_torch.steps import assert_same_snapshots, snapshot
from on_torch.test_temporaries import peak_bytes

COMPILED = build.find_cc() is not None
MAKES = {
    "Adafactor": hs.Adafactor,
    "with decay, upwards": functools.partial(hs.Adafactor, weight_decay=0.1, maximize=True),
}
# Odd and even numbers of rows, shorter and longer than a piece, further axes, and one that is not factored.
SHAPES = [(70, 41), (41, 103), (129, 3, 5), (64, 64), (200, 2), (900,)]


def after_steps(make, compile):
    generator = torch.Generator().manual_seed(0)
    params = [torch.nn.Parameter(torch.randn(s, generator=generator).bfloat16()) for s in SHAPES]
    optimizer = make([(f"w{i}", p) for i, p in enumerate(params)], compile=compile)
    for _ in range(2):
        for p in params:
            p.grad = torch.randn(p.shape, generator=generator).bfloat16()
        optimizer.step()
    return snapshot(optimizer)


@pytest.mark.parametrize("name", MAKES)
@pytest.mark.parametrize("compile", sorted({False, COMPILED}))
def test_pieces_have_the_bits_of_whole_arrays(name, compile, monkeypatch):
    whole, stepped, step = after_steps(MAKES[name], compile), [], lazy_step.step_lazily
    monkeypatch.setattr(lazy_step, "PIECES", 1)
    for module in (lazy_step, lazy_arrays):
        monkeypatch.setattr(module, "piece_length", lambda device: 64)

    def noted(batch, place, g):
        stepped.append(step(batch, place, g))
        return stepped[-1]

    monkeypatch.setattr(run, "step_lazily", noted)
    assert_same_snapshots(after_steps(MAKES[name], compile), whole)
    assert stepped.count(True) == 6  # of the others, rows and columns are too long, or there are none


class Normed(hs.Rule):
    name, scope = "normed", "parameter"

    def update(self, g, p, n, m, op):
        return op.scaled(g, op.norm(g))


class Compared(hs.Rule):
    name, scope = "compared", "parameter"

    def update(self, g, p, n, m, op):
        return op.where(g > 0, g, op.mean(g) * p)


@pytest.mark.parametrize("rule", [Normed(), Compared()])
def test_other_rules_get_whole_arrays(rule, monkeypatch):
    def make(params, compile):
        links = rule, hs.scale_by_learning_rate(0.5), hs.round_stochastically()
        return hs.Optimizer(params, hs.chain(*links), compile=compile)

    whole = after_steps(make, False)
    monkeypatch.setattr(lazy_step, "PIECES", 1)
    for module in (lazy_step, lazy_arrays, plain):
        monkeypatch.setattr(module, "piece_length", lambda device: 64)
    assert_same_snapshots(after_steps(make, False), whole)


def test_a_step_keeps_pieces_and_reports_them():
    model = torch.nn.Linear(1024, 2048, bias=False).bfloat16()
    model.weight.grad = torch.ones_like(model.weight)
    optimizer = hs.Adafactor(model.named_parameters(), compile=COMPILED)
    optimizer.step()
    report, peak = hs.memory_report(model, optimizer), peak_bytes(optimizer.step)
    assert peak < 1.5 * report.size  # as whole arrays 20 bytes for each element
    if COMPILED:  # plain steps round longer pieces
        assert abs(peak - report.temporaries) < 0.25 * peak

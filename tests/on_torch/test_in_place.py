"""Kernels that round what no rule steps: sums of gradients, weights of other optimizers, averages."""

import numpy as np
import pytest
import torch
from torch.optim.swa_utils import AveragedModel

import halfstep_torch as hs
from halfstep_torch.engine.in_place import LeafWords, words_of
from halfstep_torch.engine.kernels.kernel import Kernel
from halfstep_torch.integrations import weight_averages
from on_torch.steps import values

SHAPES = {"long": (70_001,), "matrix": (33, 40), "number": (), "short": (3,), "empty": (0, 4)}


@pytest.fixture
def calls(monkeypatch):
    """Return how many parameters each call of a kernel has updated, but for calls that try a new kernel."""
    made, call, trial = [], Kernel.__call__, Kernel._has_same_bits

    def called(kernel, table, *rest):
        made.append(len(table))
        call(kernel, table, *rest)

    def tried(kernel):
        before = len(made)
        same = trial(kernel)
        del made[before:]
        return same

    monkeypatch.setattr(Kernel, "__call__", called)
    monkeypatch.setattr(Kernel, "_has_same_bits", tried)
    return made


def drawn(step: int, dtype: torch.dtype, shapes=SHAPES) -> list[torch.Tensor]:
    """Return an array of each shape, with infinities, NaN and numbers of many binades."""
    sizes = {name: torch.Size(shape).numel() for name, shape in shapes.items()}
    arrays = [torch.from_numpy(values(name, step, size, 40)) for name, size in sizes.items()]
    return [x.to(dtype).view(shape) for x, shape in zip(arrays, shapes.values(), strict=True)]


def same_bits(xs, ys) -> bool:
    """Whether arrays have the same bits. torch's cast of a NaN has other bits in vectors."""
    for x, y in zip(xs, ys, strict=True):
        bits = {2: torch.int16, 4: torch.int32}[x.element_size()]
        patterns = [z.detach().contiguous().view(-1).view(bits) for z in (x, y)]
        nan = (x.isnan() & y.isnan()).reshape(-1)
        if not bool(((patterns[0] == patterns[1]) | nan).all()):
            return False
    return True


def summed(compile: bool, dtype: torch.dtype) -> list[torch.Tensor]:
    """Return sums of three gradients of each parameter."""
    params = [torch.nn.Parameter(torch.zeros(shape, dtype=dtype)) for shape in SHAPES.values()]
    handle = hs.accumulate_gradients(list(zip(SHAPES, params, strict=True)), compile=compile, seed=3)
    for step in range(3):
        torch.autograd.backward(params, drawn(step, dtype))
    handle.remove()
    return [p.grad for p in params]


def test_words_that_are_made_for_many_steps_are_those_of_each_step():
    words = LeafWords(3, "w", hs.Role.ACCUMULATOR)
    for step in (*range(1, 131), 5, 1 << 20, 2**31 - 1):
        np.testing.assert_array_equal(words.at(step), words_of(3, [step], ["w"], hs.Role.ACCUMULATOR))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_sums_of_gradients_are_rounded_by_a_kernel_with_the_same_bits(calls, dtype):
    plain = summed(False, dtype)
    assert calls == []
    assert same_bits(summed(True, dtype), plain)
    assert calls == [1] * 8  # two sums of each array that has elements


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_weights_of_other_optimizers_are_rounded_by_one_call_of_a_kernel(calls, dtype):
    """Also weights in another order of memory."""
    runs = []
    for compile in (False, True):
        params = [torch.nn.Parameter(x) for x in drawn(0, dtype)]
        params[1].data = params[1].detach().t().contiguous().t()
        optimizer = hs.round_weights(
            torch.optim.SGD(list(zip(SHAPES, params, strict=True)), lr=2.0**-9), compile=compile
        )
        for step in range(1, 3):
            for p, g in zip(params, drawn(step, dtype), strict=True):
                p.grad = g
            optimizer.step()
        runs.append(params)
        assert calls == [len(SHAPES)] * 2 * compile
    assert same_bits(*runs)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_averages_of_weights_are_rounded_by_a_kernel_with_the_same_bits(calls, dtype, monkeypatch):
    runs = []
    for compile in (False, True):
        monkeypatch.setattr(weight_averages._CHOICE, "choice", compile)
        model = torch.nn.Module()
        for name, x in zip(SHAPES, drawn(0, dtype), strict=True):
            model.register_parameter(name, torch.nn.Parameter(x))
        averaged = AveragedModel(model, multi_avg_fn=hs.ema_params(model, 0.9))
        for step in range(3):
            for p, x in zip(model.parameters(), drawn(step, dtype), strict=True):
                p.data = x
            averaged.update_parameters(model)
        runs.append(list(averaged.parameters()))
        assert calls == [1] * 8 * compile
    assert same_bits(*runs)


def test_autograd_learns_that_a_kernel_has_changed_a_tensor():
    p = torch.nn.Parameter(torch.ones(300, dtype=torch.bfloat16))
    handle = hs.accumulate_gradients([("p", p)], compile=True)
    p.backward(torch.ones_like(p))
    before = p.grad._version
    p.backward(torch.ones_like(p))
    handle.remove()
    assert p.grad._version > before
    optimizer = hs.round_weights(torch.optim.SGD([("p", p)], lr=0.5), compile=True)
    squares = (p * p).sum()
    optimizer.step()
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        squares.backward()

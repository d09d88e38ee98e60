"""What a step sends to a device goes by one copy, and nothing is read back: a device would be waited for."""

import numpy as np
import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

import halfstep_torch as hs
from halfstep_torch.engine import step_numbers
from halfstep_torch.numbers import op, rounding
from halfstep_torch.weights import weight_rule
from on_torch.steps import assert_same_snapshots, reals, snapshot


class Noted(TorchDispatchMode):
    """The operations that were called, each with its tensors."""

    def __init__(self):
        super().__init__()
        self.calls = []

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        self.calls.append((func.overloadpacket.__name__, args))
        return func(*args, **(kwargs or {}))

    def of(self, *names) -> list:
        return [args for name, args in self.calls if name in names]


def test_arrays_are_sent_in_one_memory_to_places_that_kernels_can_read(monkeypatch):
    monkeypatch.setattr(step_numbers, "is_elsewhere", lambda device: True)
    rng = np.random.default_rng(0)
    shapes = [(3, 5), (7,), (2, 1), (0,), (9, 2)]
    arrays = [rng.integers(-9, 9, shape).astype(np.int32) for shape in shapes]
    arrays += [rng.normal(size=shape).astype(np.float32) for shape in shapes]
    sent = step_numbers.as_sent(arrays, torch.device("cpu"))
    assert len({x.untyped_storage().data_ptr() for x in sent}) == 1
    for x, array in zip(sent, arrays, strict=True):
        assert x.numpy().dtype == array.dtype
        assert x.storage_offset() % 4 == 0
        np.testing.assert_array_equal(x.numpy(), array)


def clipped(params):
    links = hs.clip_by_global_norm(1.0), hs.scale_by_adam(), hs.scale_by_learning_rate(1e-2)
    return hs.Optimizer(params, hs.chain(*links, hs.round_stochastically()), compile=False)


MAKES = {
    "AdamW": lambda params: hs.AdamW(params, lr=1e-2, compile=False),
    "four_bit": lambda params: hs.AdamW(params, lr=1e-2, compile=False, recipe="four_bit"),
    "LAMB": lambda params: hs.Lamb(params, lr=1e-2, compile=False),
    "clipped": clipped,
}


def stepped(make, elsewhere: bool) -> tuple[list, list, int]:
    """Return the state after some steps, what was read back in the last two, and how often was sent."""
    sent, send = [], step_numbers.as_sent
    read, tolist = [], torch.Tensor.tolist
    with pytest.MonkeyPatch.context() as patch:
        # Which no mode sees on a CPU.
        patch.setattr(torch.Tensor, "tolist", lambda x: read.append((x,)) or tolist(x))
        if elsewhere:
            patch.setattr(step_numbers, "is_elsewhere", lambda device: True)
            for module in (rounding, weight_rule):  # which look at numbers on a CPU alone
                patch.setattr(module, "is_tame", lambda x: False)
            patch.setattr(op, "_is_one", lambda scale: False)
        patch.setattr(step_numbers, "as_sent", lambda *args: sent.append(1) or send(*args))
        shapes = [(16, 16), (64, 300), (5,), (4, 4, 4), (9, 9)]
        pairs = [(f"w{i}", torch.nn.Parameter(reals(s, seed=i).bfloat16())) for i, s in enumerate(shapes)]
        wide = torch.nn.Parameter(reals((40, 8), seed=9))
        optimizer = make([*pairs, ("wide", wide)])
        for step in range(5):
            for i, (_, p) in enumerate([*pairs, ("wide", wide)]):
                late = step == 1 and i % 2
                p.grad = None if late else reals(p.shape, seed=10 * step + i).to(p.dtype)
            if step == 3:
                sent.clear()
                read.clear()
            with Noted() as noted:
                optimizer.step()
            read += noted.of("_local_scalar_dense", "is_nonzero") if step >= 3 else []
    counts = {id(state["step"]) for state in optimizer.state.values()}
    return snapshot(optimizer), [args for args in read if id(args[0]) not in counts], len(sent)


@pytest.mark.parametrize("name", MAKES)
def test_a_step_sends_once_and_reads_nothing_back(name):
    beside, _, _ = stepped(MAKES[name], False)
    there, read, sent = stepped(MAKES[name], True)
    assert sent == 2
    assert read == []
    assert_same_snapshots(there, beside)

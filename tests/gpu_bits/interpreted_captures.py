"""Captured steps by the Triton text, in its interpreter: `python -m gpu_bits.interpreted_captures NAME...`

Prints, of each case, how many launches a batch has in a step, and how its arrays differ from those of plain
steps. And for how many counts the words of a step were compared with the host's. TRITON_INTERPRET=1 must be
set before Triton is imported.
"""

import contextlib
import json
import sys
import unittest.mock
import warnings
from collections.abc import Iterator

import torch

import halfstep_torch as hs
from gpu_bits import interpreted_steps
from halfstep_torch.engine import capture
from halfstep_torch.engine.kernels import ahead_kernel, kernel, triton_kernel
from on_torch.emulated_device import Graph, recorded
from on_torch.kernel_steps import MAKES, parameters
from on_torch.steps import assert_same_but_for_nan, snapshot

SHAPES = [(15,), (9, 456), (1,)]
COUNTS = 1000
_patch = unittest.mock.patch.object


@contextlib.contextmanager
def _interpreted() -> Iterator[None]:
    with contextlib.ExitStack() as patches:
        for patch in (
            _patch(kernel.Kernel, "_has_same_bits", return_value=True),
            _patch(triton_kernel, "triton_source", interpreted_steps._source),
            _patch(kernel, "generated", interpreted_steps._generated),
            _patch(capture, "may_capture", return_value=True),
            *(
                _patch(kind, "_launch", recorded(kind._launch))
                for kind in (interpreted_steps.Interpreted, ahead_kernel.AheadKernel)
            ),
        ):
            patches.enter_context(patch)
        yield


def _give(params, step: int) -> None:
    generator = torch.Generator().manual_seed(step)
    for _, p in params:
        p.grad = torch.zeros_like(p) if p.grad is None else p.grad
        p.grad.copy_(torch.randn(p.shape, generator=generator))


def compared(name: str) -> dict:
    """Return the launches of a captured step, and the first difference after replays, or ""."""
    ours, plain = (parameters(shapes=SHAPES) for _ in "ab")
    a, b, graph = MAKES[name](ours, compile=True), MAKES[name](plain, compile=False), Graph()
    a.param_groups[0]["capturable"] = True
    with _interpreted():
        for step in range(3):
            _give(ours, step)
            _give(plain, step)
            b.step()
            if step == 1:
                with graph.capture():
                    a.step()
            (graph.replay if step else a.step)()
    launches = len(graph.launches) // len(a._launches[None].batches)
    try:
        assert_same_but_for_nan(snapshot(a), snapshot(b))
    except AssertionError as error:
        return {"launches": launches, "difference": str(error)}
    return {"launches": launches, "difference": ""}


def counts() -> int:
    """Return how many counts were compared: a capturable step is refused where a word differs."""
    params = [(f"w{i}", torch.nn.Parameter(torch.zeros(1))) for i in range(COUNTS)]
    optimizer = hs.AdamW(params, compile=False, nu_dtype="bfloat16")
    _give(params, 0)
    optimizer.step()
    for i, state in enumerate(optimizer.state.values()):
        state["step"].fill_(i)
    optimizer.param_groups[0]["capturable"] = True
    optimizer._compile.choice = True
    with _interpreted(), _patch(interpreted_steps.Interpreted, "_launch"):
        optimizer.step()
    return sum(int(state["step"]) == i + 1 for i, state in enumerate(optimizer.state.values()))


if __name__ == "__main__":
    warnings.simplefilter("ignore")
    found = {name: compared(name) for name in sys.argv[1:]}
    print(json.dumps(found | {"counts": counts()}))

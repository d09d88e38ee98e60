"""Steps by the Triton text itself, in Triton's interpreter: `python -m gpu_bits.interpreted_steps NAME...`

Prints of each case in `on_torch.kernel_steps`, and of `round_weights`, how many launches there were, and how
its arrays differ from those of plain steps. Weights are bfloat16, or float16 if "NAME of float16" is given.
TRITON_INTERPRET=1 must be set before Triton is imported. That interpreter converts two things otherwise than
a GPU, so they are not in this comparison:

- float32 to bfloat16 is truncated. Here integers round to nearest instead.
- infinities and NaN to float8 become numbers. Steps with float8 have neither.
"""

import contextlib
import functools
import json
import re
import sys
import unittest.mock
import warnings

import torch

import halfstep_torch as hs
from halfstep.kernels.simplify import simplified
from halfstep.kernels.triton_source import triton_source
from halfstep_torch.engine.kernels import kernel, norm_kernel, triton_kernel
from halfstep_torch.engine.kernels.trace import measured, trace
from on_torch.kernel_steps import MAKES, after_steps
from on_torch.steps import assert_same_but_for_nan

# Whole and short blocks in two chunks, ends of vectors, and an array that is not aligned.
SHAPES = [(15,), (65, 128), (9, 456), (1,), (9_001,)]
_NEAREST = """
@triton.jit
def nearest(x):
    b = x.to(tl.uint32, bitcast=True)
    b = tl.where(x != x, 0x7FC0, (b + 0x7FFF + ((b >> 16) & 1)) >> 16)
    return b.to(tl.uint16).to(tl.bfloat16, bitcast=True)
"""


def copies(params, compile):
    return hs.round_weights(torch.optim.SGD(params, lr=0.1), compile=compile)


def clipped_exactly(params, compile):
    links = hs.clip_by_global_norm(1e-3, exact=True), hs.scale_by_learning_rate(0.5)
    return hs.Optimizer(params, hs.chain(*links), compile=compile)


CASES = MAKES | {
    "copies": copies,
    "exact clipped": clipped_exactly,
    "exact Lamb": functools.partial(hs.Lamb, lr=1e-2, exact=True),
}


class Interpreted(triton_kernel.TritonKernel):
    """A kernel that Triton interprets on the CPU."""

    launches = 0

    def _launch(self, *arguments):
        Interpreted.launches += 1
        super()._launch(*arguments)


def _source(graph, **options):
    text = re.sub(r"(\w+)\.to\(tl\.bfloat16\)", r"nearest(\1)", triton_source(graph, **options))
    return text.replace("import triton.language as tl", "import triton.language as tl\n" + _NEAREST)


def _generated(stage, places, incoming, device, sums=""):
    graph = trace(triton_kernel.in_powers_of_two(stage), places, incoming)
    return Interpreted(simplified(measured(graph, sums) if sums else graph), stage, device)


@contextlib.contextmanager
def as_on_gpu():
    """Let steps of tensors on the CPU take kernels of a GPU, which are interpreted."""
    # The trial of a kernel is another comparison with plain steps.
    patch = unittest.mock.patch.object
    of_norms, of_steps = (
        patch(kind, "_has_same_bits", return_value=True) for kind in (norm_kernel.NormKernel, kernel.Kernel)
    )
    source = patch(triton_kernel, "triton_source", _source)
    with of_norms, of_steps, source, patch(kernel, "generated", _generated):
        yield


def compared(name: str) -> dict:
    """Return the launches of a case, and the first difference or ""."""
    options, before = (
        {"shapes": SHAPES, "steps": 2, "special": name not in ("fp8", "rows", "Lamb16")},
        Interpreted.launches,
    )
    name, _, dtype = name.partition(" of ")
    case, options["dtype"] = CASES[name], getattr(torch, dtype or "bfloat16")
    with as_on_gpu():
        ours = after_steps(case, True, **options)
    try:
        assert_same_but_for_nan(ours, after_steps(case, False, **options))
    except AssertionError as error:
        return {"launches": Interpreted.launches - before, "difference": str(error)}
    return {"launches": Interpreted.launches - before, "difference": ""}


if __name__ == "__main__":
    warnings.simplefilter("ignore")
    print(json.dumps({name: compared(name) for name in sys.argv[1:]}))

"""A plan as one compiled kernel over flat memory, and whether there is a compiler to make it.

One kernel serves every length from two elements up, every number and every seed: lengths are dynamic, numbers
and keys are tensors. It is compiled on scratch memory before any weight is touched, so that a compiler that
fails leaves everything as it was.
"""

import functools
import os
import platform
import shutil
import sys
import types
import warnings
from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from halfstep_torch.bound_rule import flat, unflat
from halfstep_torch.engine.step import Plan

# Long enough that Inductor, which decides on the lengths it is first shown, runs the kernel in parallel.
_SCRATCH = 1 << 20
# Elements from which half a minute of compilation pays on a CPU.
_WORTH_COMPILING = 1_000_000


def find_cxx() -> str | None:
    """Return the C++ compiler that Inductor will use on CPU, or None if there is none."""
    default = "clang++" if sys.platform == "darwin" else "cl" if sys.platform == "win32" else "g++"
    cxx = os.environ.get("CXX", default)
    return cxx if shutil.which(cxx) else None


class Compile:
    """The choice whether steps run compiled.

    Attributes:
        choice: True, False or "auto". It becomes False where "auto" tried and torch.compile failed.
    """

    def __init__(self, function: str, choice: bool | str) -> None:
        if choice not in (True, False, "auto"):
            raise ValueError(f'{function}: compile={choice!r} is not a choice. Use True, False or "auto".')
        self.choice = choice

    def check(self, function: str, device: torch.device) -> None:
        """Raise RuntimeError if compilation is demanded on a CPU without a compiler."""
        if self.choice is True and device.type == "cpu" and not find_cxx():
            raise RuntimeError(
                f"{function}: compile=True, but no C++ compiler is found. "
                "Install g++ (or name one in CXX), or use compile=False: the bits are the same."
            )

    def wanted(self, device: torch.device, elements: int) -> bool:
        """Return whether steps on `device`, where parameters have that many elements, are to be compiled."""
        if self.choice != "auto":
            return bool(self.choice)
        if device.type != "cpu":
            return device.type in ("cuda", "xpu")
        return elements >= _WORTH_COMPILING and find_cxx() is not None

    def prepare(
        self, function: str, device: torch.device, elements: int, make: Callable[[int], None]
    ) -> int | None:
        """Compile, and return the number of elements from which a leaf is stepped compiled; None: never.

        Args:
            function: for messages.
            device: of the parameters.
            elements: of all parameters on it.
            make: compiles the kernel for leaves from that number up.

        Raises:
            RuntimeError: if compilation is demanded and fails.
        """
        if not self.wanted(device, elements):
            return None
        # One element would be a graph of its own; on CPU a short leaf costs less in eager mode, among others.
        shortest = 1 << 12 if self.choice == "auto" and device.type == "cpu" else 2
        try:
            make(shortest)
        except Exception as error:
            if self.choice is True:
                raise RuntimeError(
                    f"{function}: torch.compile failed ({type(error).__name__}). "
                    "Use compile=False: the bits are the same."
                ) from error
            self.choice = False
            warnings.warn(
                f"{function}: torch.compile failed, steps run in eager mode: slower, with the same bits. "
                f"Use compile=False to silence this. ({type(error).__name__}: {error})",
                RuntimeWarning,
                stacklevel=2,
            )
            return None
        return shortest


def kernel_dtype(dtype: torch.dtype, device: torch.device) -> torch.dtype:
    """Return the dtype in which a kernel wants a state array: its own, or one that Inductor can vectorise."""
    return torch.int32 if dtype == torch.int16 and device.type == "cpu" else dtype


@functools.cache
def compiled_kernel(plan: Plan, layouts: tuple, device: torch.device, grad_dtype: torch.dtype) -> Callable:
    """Return a function (p, g, u, state, numbers, keys, offsets) that steps flat tensors in place.

    Args:
        plan: of the leaf, or a stage of it; all its blocks are whole.
        layouts: of the numbers of its rules (`rule.layout`).
        device: of its memory.
        grad_dtype: of what comes in: of the gradient, or float32.

    Returns:
        The function: p, g, u and each of the list `state` 1-D, or of a plan with blocks in rows of its unit,
        but scales 1-D; state arrays in their `kernel_dtype`; u what a stage leaves to the next, or None where
        the stage changes p; `numbers` a float32 vector of the numbers of all its rules; `keys` an int32
        vector; `offsets` another, of a number for each unit of the plan that is added to the index of its
        elements, or None for a plan without blocks. Compiled already.

    Raises:
        Exception: whatever torch.compile raises where it cannot compile.
    """
    names, unit = list(plan.arrays), plan.unit

    def step_in_place(
        p: Tensor,
        g: Tensor,
        u: Tensor | None,
        state: Sequence[Tensor],
        numbers: Tensor,
        keys: Tensor,
        offsets: Tensor | None,
    ) -> None:
        old = dict(zip(names, state, strict=True))
        first, *others = keys.unbind()
        if offsets is not None:
            first = (first + offsets)[:, None]
        out, new = plan.run(p, g, old, unflat(layouts, numbers.unbind()), [first, *others])
        (p if u is None else u).copy_(out)
        for name, array in new.items():
            old[name].copy_(array)

    kernel = torch.compile(_own_code(step_in_place), dynamic=True, fullgraph=True, options=_options(device))
    units = max(_SCRATCH // unit, 4)

    def scratch(dtype: torch.dtype, width: int, rows: bool) -> Tensor:
        x = torch.zeros(units * width, dtype=dtype, device=device)
        if rows:
            x = alias(x, 0, x.numel(), width)
            torch._dynamo.mark_static(x, 1)
        return x

    rows = bool(plan.blocks)
    state = [
        scratch(kernel_dtype(kept.dtype, device), kept.size(unit), rows and not kept.scale_of)
        for kept in plan.arrays.values()
    ]
    p, g = (scratch(dtype, unit, rows) for dtype in (plan.dtype, grad_dtype))
    offsets = torch.zeros(units, dtype=torch.int32, device=device) if plan.blocks else None
    numbers = torch.ones(len(flat(layouts)), dtype=torch.float32, device=device)
    u = None if plan.lands else scratch(torch.float32, unit, rows)
    keys = torch.zeros(1 + sum(1 + len(roles) for roles in plan.roles), dtype=torch.int32, device=device)
    with warnings.catch_warnings():
        # Inductor's modules warn, as they are imported, of what torch itself has deprecated.
        warnings.simplefilter("ignore", DeprecationWarning)
        # Inductor says that it runs such a kernel more slowly.
        warnings.filterwarnings("ignore", "bf16 and fp16 are mixed", UserWarning)
        # Lengths are dynamic; what the plan says (bits of mantissa, elements of a block) is constant.
        with torch._dynamo.config.patch(specialize_int=True):
            kernel(p, g, u, state, numbers, keys, offsets)
    return kernel


def alias(x: Tensor, start: int, length: int, width: int | None = None) -> Tensor:
    """Return an alias of a stretch of a row-major tensor: 1-D, or in rows of `width` elements.

    Not a view: a view has a base, and Dynamo, where it is shown one, compiles once for every rank of bases.
    """
    shape, strides = ((length,), (1,)) if width is None else ((length // width, width), (width, 1))
    same = torch.empty(0, dtype=x.dtype, device=x.device)
    return same.set_(x.untyped_storage(), x.storage_offset() + start, shape, strides)


def _own_code(function: Callable) -> Callable:
    # Dynamo keeps its graphs, and limits their number, per code object; every plan needs its own.
    return types.FunctionType(
        function.__code__.replace(),
        function.__globals__,
        function.__name__,
        function.__defaults__,
        function.__closure__,
    )


def _options(device: torch.device) -> dict:
    """Return options of Inductor for one function; the global configuration is left alone."""
    from torch._inductor import config

    if device.type != "cpu" or platform.machine() != "x86_64" or sys.platform != "linux":
        return {}
    if not hasattr(config.cpp, "march") or config.cpp.march is not None or "clang" in (find_cxx() or ""):
        return {}
    # Inductor passes -fno-tree-loop-vectorize to g++, which leaves its bit casts (float32 to int32 and back)
    # as scalar loops and makes this kernel more than twice as slow. This is the one option that can carry the
    # flag that undoes it; it changes no bit.
    return {"cpp.march": "native -ftree-loop-vectorize"}

"""What torch.compile makes of whole steps for GPUs that are not here: their programs, and what is in them.

    make compiled

Inductor writes Triton code for tensors on the CPU as well, and Triton compiles for any target. Nothing runs.
A step keeps the contract's bits if no product is fused with a sum, quotients and roots are rounded correctly
and nothing is flushed: then its program has no fma, no approximate operation and no `.ftz`.
"""

import argparse
import json
import pathlib
import re
import sys
import unittest.mock
import warnings
from collections.abc import Callable
from typing import Any, NamedTuple

import torch

TARGETS = {"sm_80": ("cuda", 80, 32), "sm_90": ("cuda", 90, 32), "sm_100": ("cuda", 100, 32)}
_ELEMENTS = 1 << 21


class Program(NamedTuple):
    """One compiled kernel.

    Attributes:
        target: what for.
        kernel: its place among those of the step.
        ptx: its text.
        elements: that a program instance steps.
        threads: of an instance.
        spills: registers that did not fit.
    """

    target: str
    kernel: int
    ptx: str
    elements: int
    threads: int
    spills: int

    @property
    def faults(self) -> dict[str, int]:
        """What rounds otherwise than the contract has it, and how often."""
        patterns = {"fma": r"\bfma\.", "approximate": r"\.(approx|full)\b", "flushed": r"\.ftz\b"}
        found = {name: len(re.findall(pattern, self.ptx)) for name, pattern in patterns.items()}
        return {name: count for name, count in found.items() if count}

    @property
    def instructions(self) -> float:
        """Per element: lines of PTX that are instructions, of a thread, over the elements of a thread."""
        lines = [line for line in self.ptx.splitlines() if re.match(r"\t+[@a-z].*;$", line)]
        body = [line for line in lines if not re.match(r"\t+(\.|@?%?p?\d*\s*bra|ret)", line)]
        return len(body) * self.threads / max(self.elements, 1)


class _Driver:
    """Stands for the driver of a GPU: says what it is, and can launch nothing."""

    def __init__(self, target: Any) -> None:
        self._target = target

    def get_current_target(self) -> Any:
        return self._target

    def __getattr__(self, name: str) -> Any:
        return unittest.mock.MagicMock()


def compile_step(make: Callable[[], torch.optim.Optimizer]) -> list[Program]:
    """Return the kernels of one step of an optimizer, compiled for every target.

    Args:
        make: returns an optimizer over parameters that have gradients, with `compile=True`.
    """
    import torch._inductor.runtime.triton_heuristics as heuristics
    import triton
    from torch._inductor import config
    from triton.backends.compiler import GPUTarget
    from triton.runtime import driver

    from halfstep_torch.engine import kernel

    sources: list[tuple[Any, Any]] = []
    compile_for = triton.compile

    def record(source: Any, target: Any, options: Any) -> Any:
        sources.append((source, options))
        return compile_for(source, target=GPUTarget(*TARGETS["sm_90"]), options=options)

    driver.set_active(_Driver(GPUTarget(*TARGETS["sm_90"])))
    torch._dynamo.reset()
    kernel.compiled_kernel.cache_clear()
    of_gpu = kernel._options(torch.device("cuda"))
    options = {"cpu_backend": "triton", "triton_disable_device_detection": True, "compile_threads": 1}
    with (
        config.patch(**options, fx_graph_cache=False),
        unittest.mock.patch.object(triton, "compile", record),
        unittest.mock.patch.object(kernel, "_options", return_value=of_gpu),
        unittest.mock.patch.object(heuristics.CachingAutotuner, "_make_launchers"),
        unittest.mock.patch.object(heuristics.CachingAutotuner, "run", _precompile),
    ):
        make().step()
    # Inductor offers several shapes of one kernel, of which a GPU would try all; the first is its guess.
    kernels = {source.fn.cache_key: (source, options) for source, options in reversed(sources)}
    programs = []
    for i, (source, options) in enumerate(reversed(kernels.values())):
        for name, target in TARGETS.items():
            try:
                binary = compile_for(source, target=GPUTarget(*target), options=options)
            except triton.CompilationError as error:
                if "not supported in this architecture" not in str(error):
                    raise
                continue
            programs.append(_program(name, i, binary, source))
    return programs


def _precompile(autotuner: Any, *arguments: Any, **options: Any) -> None:
    """Stand for a launch: compile the kernel, and run nothing."""
    autotuner.precompile()


def _program(target: str, kernel: int, binary: Any, source: Any) -> Program:
    names = {source.fn.arg_names[place[0]]: value for place, value in source.constants.items()}
    # A block's maximum is taken over an axis whose length is a constant of the kernel's text.
    reduced = re.search(r"R0_BLOCK: tl.constexpr = (\d+)", source.fn.src)
    elements = names["XBLOCK"] * (int(reduced[1]) if reduced else 1)
    threads = 32 * binary.metadata.num_warps
    return Program(target, kernel, binary.asm["ptx"], elements, threads, getattr(binary, "n_spills", 0) or 0)


def step_of(name: str, **options: Any) -> Callable[[], torch.optim.Optimizer]:
    """Return what makes an optimizer of this package over one bfloat16 parameter."""

    def make() -> torch.optim.Optimizer:
        import halfstep_torch as hs

        p = torch.nn.Parameter(torch.zeros(_ELEMENTS // 1024, 1024, dtype=torch.bfloat16))
        p.grad = torch.zeros_like(p)
        return getattr(hs, name)([("w", p)], compile=True, **options)

    return make


def cases() -> dict[str, Callable[[], torch.optim.Optimizer]]:
    """Return what is compiled: rules, formats, weight storages."""
    import halfstep_torch as hs

    def moments(mu: Any, nu: Any) -> Callable[[], torch.optim.Optimizer]:
        return step_of("AdamW", mu_dtype=mu, nu_dtype=nu)

    found = {
        "AdamW": step_of("AdamW"),
        "AdamW, fp8 moments": moments(hs.scaled("float8_e4m3fn"), hs.scaled("ufloat8_e5m3")),
        "AdamW, int8 and ufloat8_e4m4": moments(hs.scaled("int8"), hs.scaled("ufloat8_e4m4")),
        "AdamW, ufloat8_e6m2": moments("bfloat16", "ufloat8_e6m2"),
        "AdamW, 8-bit codebooks": moments(hs.codebook("dynamic8"), hs.codebook("udynamic8")),
        **{
            f"AdamW, {name}": step_of("AdamW", param_storage=name)
            for name in ("nearest", "compensated", "split8", "split16", "master")
        },
        **{name: step_of(name) for name in ("Lion", "Lamb", "Lamb16")},
        "SGD, momentum": step_of("SGD", momentum=0.9),
    }
    return found


def main(argv: list[str] | None = None) -> int:
    """Print the table; return 1 if a program rounds otherwise than the contract has it."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--json", type=pathlib.Path, help="where to write the figures")
    parser.add_argument("--only", default="", help="cases whose name contains this")
    arguments = parser.parse_args(argv)
    warnings.simplefilter("ignore")
    rows = []
    print(f"{'step':34s}{'kernels':>8s}" + "".join(f"{name:>9s}" for name in TARGETS) + "  PTX per element")
    for name, make in cases().items():
        if arguments.only not in name:
            continue
        programs = compile_step(make)
        counts = {p.target: 0.0 for p in programs}
        for p in programs:
            counts[p.target] += p.instructions
        faults = [f"{p.target}: {p.faults}" for p in programs if p.faults]
        faults += [f"{p.target}: {p.spills} spilled" for p in programs if p.spills]
        kernels = 1 + max(p.kernel for p in programs)
        print(
            f"{name:34s}{kernels:8d}"
            + "".join(f"{counts[t]:9.0f}" if t in counts else f"{'-':>9s}" for t in TARGETS),
            *faults,
            flush=True,
        )
        rows.append({"step": name, "kernels": kernels, "instructions": counts, "faults": faults})
    if arguments.json:
        record = {"torch": torch.__version__, "rows": rows}
        arguments.json.write_text(json.dumps(record, indent=1) + "\n")
    return int(any(row["faults"] for row in rows))


if __name__ == "__main__":
    sys.exit(main())

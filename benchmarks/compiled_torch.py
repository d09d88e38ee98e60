"""What torch.compile makes of whole steps for GPUs that are not here: their programs, and what is in them.

    make compiled          # a few steps for one GPU
    make compiled-all      # every rule, format and weight storage, for all of them

Inductor writes Triton code for tensors on the CPU as well, and Triton compiles for any target. Nothing runs.
For each step: how many kernels it is; what in them rounds otherwise than the contract has it, or does not fit
into registers; instructions per element, those of PTX and those that NVIDIA's assembler makes of them, with
those apart that the integer pipe runs: twice these bound a step too. Exits with 1 if a step does not keep the
contract's bits, or has more kernels or instructions than it should.
"""

import argparse
import contextlib
import json
import math
import pathlib
import re
import sys
import unittest.mock
import warnings
from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple

import torch
import torch._inductor.graph as inductor_graph
import torch._inductor.runtime.triton_heuristics as heuristics
import triton
from gpu_programs import faults, faults_of_llvm, instructions, machine_code
from torch._inductor import codecache, config
from triton.backends.compiler import GPUTarget
from triton.runtime import driver

import halfstep_torch as hs
from halfstep_spec import PARAM_STORAGES
from halfstep_torch.engine import compiled_stage, inductor, packed_rows, row_plan, rows, stage

TARGETS = {
    **{"sm_80": ("cuda", 80, 32), "sm_90": ("cuda", 90, 32), "sm_100": ("cuda", 100, 32)},
    "gfx942": ("hip", "gfx942", 64),  # an MI300
}
# The number of kernels, where it is not 1. Codes that share a byte are packed by a separate kernel. Blocks of
# blocks are reduced by another kernel. LAMB needs norms of whole parameters between its two kernels.
KERNELS = {
    "AdamW, four_bit": 4,
    **{"AdamW, relative int4 by block": 2, "AdamW, ulinear4": 2, "AdamW, 4-bit codebooks": 3},
    **{"Lamb": 2, "Lamb16": 2},
}
# Claims: machine instructions per element on an H100 at most, and of them those of integers.
INSTRUCTIONS = {"AdamW": (125, 50), "AdamW, one_pass": (119, 56)}
_ELEMENTS = 1 << 21


class Program(NamedTuple):
    """One compiled kernel.

    Attributes:
        target: what for.
        kernel: its place among those of the step.
        text: in PTX; for AMD in LLVM's language.
        elements: that a program instance steps.
        threads: of an instance.
        fuses: whether its compiler was allowed to fuse products with sums.
    """

    target: str
    kernel: int
    text: str
    elements: int
    threads: int
    fuses: bool

    def per_element(self, count: float) -> float:
        """Return a count of a thread per element."""
        return count * self.threads / self.elements


class _Driver:
    """Stands for the driver of a GPU: says what it is, and can launch nothing."""

    def __init__(self, target: Any) -> None:
        self._target = target

    def get_current_target(self) -> Any:
        return self._target

    def __getattr__(self, name: str) -> Any:
        return unittest.mock.MagicMock()


@contextlib.contextmanager
def as_on_gpu(compile: Callable, run: Callable, compiling: Callable | None = None) -> Iterator[None]:
    """Let steps of tensors on the CPU be compiled as those on a GPU are.

    Args:
        compile: what stands for `triton.compile`: of a source, a target and options.
        run: what stands for launches: of Inductor's autotuner and the arguments of a kernel.
        compiling: a context in which a step is compiled, and called on memory of its own.
    """
    of_gpu = compiled_stage.compile_options(torch.device("cuda"))
    # What Inductor makes of an option where it knows that the kernel is for a GPU.
    known = {"enable_reflect_ftz": not of_gpu.get("eager_numerics.disable_ftz", False)}
    options = {"cpu_backend": "triton", "triton_disable_device_detection": True, "compile_threads": 1}
    changes: list[tuple[Any, str, Any]] = [
        (triton, "compile", lambda source, target, options: compile(source, target, options | known)),
        (heuristics.CachingAutotuner, "run", lambda autotuner, *values, **_: run(autotuner, *values)),
        # They ask for a device.
        (heuristics.CachingAutotuner, "_make_launchers", unittest.mock.DEFAULT),
        (heuristics.CachingAutotuner, "_dynamic_scale_rblock", unittest.mock.DEFAULT),
        # What in a step depends on the device.
        (compiled_stage, "compile_options", lambda device: of_gpu),
        (compiled_stage, "kinds", lambda stage, device: (False,) if stage.blocks else (False, True)),
        (compiled_stage, "in_blocks", lambda stage, device: False),
        (stage, "_in_rows", lambda p, first: p),
        *((module, "kernel_dtype", lambda dtype, device: dtype) for module in (packed_rows, row_plan, rows)),
        *([(inductor, "compiling", _both(inductor.compiling, compiling))] if compiling else []),
    ]
    driver.set_active(_Driver(GPUTarget(*TARGETS["sm_90"])))
    _forget_kernels()
    with contextlib.ExitStack() as stack:
        stack.enter_context(config.patch(**options, fx_graph_cache=False))
        for owner, name, value in changes:
            stack.enter_context(unittest.mock.patch.object(owner, name, value))
        yield
    _forget_kernels()


def _both(outer: Callable, inner: Callable) -> Callable:
    """Return two contexts as one."""

    @contextlib.contextmanager
    def both() -> Iterator[None]:
        with outer(), inner():
            yield

    return both


def _forget_kernels() -> None:
    """Have kernels compiled anew: those for a GPU are not those for the CPU."""
    torch._dynamo.reset()
    codecache.PyCodeCache.cache_clear()
    compiled_stage.compiled_stage.cache_clear()


def compile_step(make: Callable[[], torch.optim.Optimizer], targets: Sequence[str]) -> list[Program]:
    """Return the kernels of one step of an optimizer, compiled for some targets.

    Args:
        make: returns an optimizer over parameters that have gradients, with `compile=True`.
        targets: names of `TARGETS`. One that lacks a dtype of the step is left out.
    """
    sources: list[tuple[Any, Any]] = []
    compile_for = triton.compile

    def record(source: Any, target: Any, options: Any) -> Any:
        sources.append((source, options))
        return unittest.mock.MagicMock()

    # Arrays of a GPU are aligned, and read by 16 bytes; of those of a CPU Inductor does not expect it.
    aligned = unittest.mock.patch.object(inductor_graph, "should_assume_input_aligned", return_value=True)
    # The parameter is long enough to be alone; the kernel for rows of many would be counted beside.
    alone = unittest.mock.patch.object(compiled_stage, "kinds", lambda stage, _: (not stage.blocks,))
    with as_on_gpu(record, _precompile), aligned, alone:
        make().step()
    # Inductor offers several shapes of one kernel, of which a GPU would try all; the first is its guess.
    kernels = {source.fn.cache_key: (source, options) for source, options in reversed(sources)}
    programs = []
    for name in targets:
        try:
            programs += [
                _program(
                    name, i, compile_for(source, target=GPUTarget(*TARGETS[name]), options=options), source
                )
                for i, (source, options) in enumerate(reversed(kernels.values()))
            ]
        except triton.CompilationError as error:
            if "not supported in this architecture" not in str(error):
                raise
    return programs


def _precompile(autotuner: Any, *values: Any) -> None:
    """Stand for a launch: compile the kernel, and run nothing."""
    autotuner.precompile()


def _program(target: str, kernel: int, binary: Any, source: Any) -> Program:
    names = {source.fn.arg_names[place[0]]: value for place, value in source.constants.items()}
    # A block's maximum is taken over an axis whose length is a constant of the kernel's text.
    reduced = re.search(r"R0_BLOCK: tl.constexpr = (\d+)", source.fn.src)
    elements = names["XBLOCK"] * (int(reduced[1]) if reduced else 1)
    threads = TARGETS[target][2] * binary.metadata.num_warps
    text = binary.asm.get("ptx") or binary.asm["llir"]
    return Program(target, kernel, text, elements, threads, binary.metadata.enable_fp_fusion)


def step_of(name: str, *arguments: Any, **options: Any) -> Callable[[], torch.optim.Optimizer]:
    """Return what makes an optimizer of this package over one bfloat16 parameter."""

    def make() -> torch.optim.Optimizer:
        p = torch.nn.Parameter(torch.zeros(_ELEMENTS // 1024, 1024, dtype=torch.bfloat16))
        p.grad = torch.zeros_like(p)
        return getattr(hs, name)([("w", p)], *arguments, compile=True, **options)

    return make


def cases() -> dict[str, Callable[[], torch.optim.Optimizer]]:
    """Return what is compiled: every rule, every format, every weight storage; not their product."""

    def moments(mu: Any, nu: Any) -> Callable[[], torch.optim.Optimizer]:
        return step_of("AdamW", mu_dtype=mu, nu_dtype=nu)

    def chain(*links: Any) -> Callable[[], torch.optim.Optimizer]:
        last = hs.scale_by_learning_rate(1e-3), hs.round_stochastically()
        return step_of("Optimizer", hs.chain(*links, *last))

    scaled, codebook = hs.scaled, hs.codebook
    storages = [name for name in PARAM_STORAGES if name != "stochastic"]
    names = ("full_precision", "near_float32", "one_pass", "eight_bit", "four_bit")
    return {
        "AdamW": step_of("AdamW"),
        **{f"AdamW, {name}": step_of("AdamW", param_storage=name) for name in storages},
        **{f"AdamW, {name}": step_of("AdamW", **getattr(hs.recipes, name)) for name in names},
        "AdamW, ufloat8_e6m2": moments("bfloat16", "ufloat8_e6m2"),
        "AdamW, scaled float16": moments(scaled("float16"), scaled("float16")),
        "AdamW, e4m3fn, ufloat8_e5m3": moments(scaled("float8_e4m3fn"), scaled("ufloat8_e5m3")),
        "AdamW, e5m2, e5m2": moments(scaled("float8_e5m2"), scaled("float8_e5m2")),
        "AdamW, e3m4, ufloat8_e4m4": moments(scaled("float8_e3m4"), scaled("ufloat8_e4m4")),
        "AdamW, int8, ufloat8_e4m4": moments(scaled("int8"), scaled("ufloat8_e4m4")),
        "AdamW, relative int8 by block": moments(hs.relative("int8", 128), "ufloat8_e6m2"),
        "AdamW, relative int4 by block": moments(hs.relative("int4", 32), "ufloat8_e6m2"),
        "AdamW, 8-bit codebooks": moments(codebook("dynamic8"), codebook("udynamic8")),
        "AdamW, 4-bit codebooks": moments(codebook("dynamic4"), codebook("udynamic4")),
        "AdamW, ulinear4": moments("bfloat16", codebook("ulinear4")),
        "AdamW, float32 moments": moments("float32", "float32"),
        **{name: step_of(name) for name in ("Adam", "Lion", "Lamb", "Lamb16")},
        "SGD, momentum": step_of("SGD", momentum=0.9),
        "Adan": chain(hs.scale_by_adan()),
        "store_state of Adam, fp8": chain(hs.store_state(hs.scale_by_adam(), scaled("float8_e4m3fn"))),
        "clipping, Lion": chain(hs.clip_by_global_norm(1.0), hs.scale_by_lion()),
    }


def measure(name: str, targets: Sequence[str]) -> dict[str, Any]:
    """Return what a step compiles to: a row of the table."""
    programs = compile_step(cases()[name], targets)
    counts: dict[str, Any] = {}
    found = []
    for p in programs:
        found += [f"{p.target}: products may be fused"] if p.fuses else []
        if not p.target.startswith("sm_"):
            counts[p.target] = None  # its instructions are not those of PTX
            found += [f"{p.target}: {what} {count}" for what, count in faults_of_llvm(p.text).items()]
            continue
        code = machine_code(p.text)
        of_kernel = [instructions(p.text), *((code.instructions, code.integer) if code else (math.nan,) * 2)]
        before = counts.get(p.target, [0.0] * 3)
        counts[p.target] = [x + p.per_element(y) for x, y in zip(before, of_kernel, strict=True)]
        found += [f"{p.target}: {what} {count}" for what, count in faults(p.text).items()]
        found += [f"{p.target}: {code.spilled} bytes spilled"] if code and code.spilled else []
        found += [f"{p.target}: ptxas fuses {code.fused}"] if code and code.fused else []
    kernels = 1 + max(p.kernel for p in programs)
    if kernels > KERNELS.get(name, 1):
        found.append(f"{kernels} kernels")
    _, *machine = counts.get("sm_90", [0.0] * 3)
    if any(count > most for count, most in zip(machine, INSTRUCTIONS.get(name, machine), strict=True)):
        found.append("sm_90: {:.0f} ({:.0f}) instructions".format(*machine))
    return {"step": name, "kernels": kernels, "instructions": counts, "faults": found}


def main(argv: list[str] | None = None) -> int:
    """Print the table; return 1 if a program rounds otherwise than the contract has it, or spills."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--json", type=pathlib.Path, help="where to write the figures")
    parser.add_argument("--only", nargs="*", help="these steps, by name")
    parser.add_argument("--targets", nargs="*", choices=TARGETS, default=list(TARGETS), help="these GPUs")
    arguments = parser.parse_args(argv)
    warnings.simplefilter("ignore")
    rows = []
    print(
        f"{'PTX / machine (integer) per element':36s}{'kernels':>8s}",
        *(f"{t:>15s}" for t in arguments.targets),
    )
    for name in arguments.only or cases():
        row = measure(name, arguments.targets)
        texts = ["-" if t not in row["instructions"] else "read" for t in arguments.targets]
        for i, target in enumerate(arguments.targets):
            if of_target := row["instructions"].get(target):
                texts[i] = "{:.0f} / {:.0f} ({:.0f})".format(*of_target)
        columns = [f"{text:>15s}" for text in texts]
        print(f"{name:36s}{row['kernels']:8d}", *columns, *row["faults"], flush=True)
        rows.append(row)
    if arguments.json:
        versions = {module.__name__: module.__version__ for module in (torch, triton)}
        arguments.json.write_text(json.dumps({"versions": versions, "rows": rows}, indent=1) + "\n")
    broken = [row["step"] for row in rows if row["faults"]]
    print(
        "\nEvery program keeps the contract's bits, in registers."
        if not broken
        else "\nBroken: " + "; ".join(broken)
    )
    return int(bool(broken))


if __name__ == "__main__":
    sys.exit(main())

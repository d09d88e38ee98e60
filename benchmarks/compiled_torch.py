"""The Triton kernels of whole steps for GPUs that are not here: their programs, and what is in them.

    make compiled          # a few steps for one GPU
    make compiled-all      # every rule, format and weight storage, for all of them

Triton compiles for any target, and nothing runs. For each step: how many kernels it is; what in them rounds
otherwise than the contract has it, or does not fit into registers; machine instructions per element of the
main
loop, with the instructions apart that the integer pipe runs: twice these bound a step too; and how many of
its loads and stores have 16 bytes. Exits with 1 if a step does not keep the contract's bits, or has more
kernels or instructions than it should.
"""

import argparse
import json
import pathlib
import sys
import tempfile
import unittest.mock
import warnings
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch
import triton
from programs import Loop, faults, faults_of_llvm, loops, machine_code
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource
from triton.runtime import driver

import halfstep_torch as hs
from halfstep.kernels.graph import Graph
from halfstep.kernels.simplify import simplified
from halfstep.kernels.triton_process import module_of
from halfstep.kernels.triton_source import triton_source
from halfstep_spec import PARAM_STORAGES
from halfstep_torch.engine.batches import measure as measures
from halfstep_torch.engine.kernels import triton_kernel
from halfstep_torch.engine.kernels.trace import measured, trace
from halfstep_torch.engine.number_places import number_places
from halfstep_torch.engine.scaled_step import numbers_of_two
from halfstep_torch.engine.step_numbers import attach_numbers
from halfstep_torch.launch import Launch

TARGETS = {
    **{"sm_80": ("cuda", 80, 32), "sm_90": ("cuda", 90, 32), "sm_100": ("cuda", 100, 32)},
    "gfx942": ("hip", "gfx942", 64),  # an MI300
}
# LAMB needs norms of whole parameters first.
KERNELS = {"Lamb": 2, "Lamb16": 2}
# Claims: machine instructions per element on an H100 at most, and of them those of integers.
INSTRUCTIONS = {"AdamW": (92, 40), "AdamW, one_pass": (104, 51), "AdamW, eight_bit": (257, 115)}
_ELEMENTS = 1 << 21


class Program(NamedTuple):
    """One compiled kernel.

    Attributes:
        target: what for.
        text: in PTX; for AMD in LLVM's language.
        binary: as Triton made it.
        elements: that an instance of the kernel updates in a round of its main loop.
        threads: of an instance.
    """

    target: str
    text: str
    binary: Any
    elements: int
    threads: int


class _Driver:
    """Stands for the driver of a GPU: says what it is, and can launch nothing."""

    def get_current_target(self) -> Any:
        return GPUTarget(*TARGETS["sm_90"])

    def __getattr__(self, name: str) -> Any:
        return unittest.mock.MagicMock()


def graphs(optimizer: torch.optim.Optimizer) -> list[Graph]:
    """Return the graphs of an optimizer's kernels, as Triton takes them; not that of clipping."""
    assert isinstance(optimizer, hs.Optimizer)
    launch = Launch(optimizer, list(optimizer._named()))
    attach_numbers(launch.batches, measures(launch.batches), {})
    made = []
    for batch in launch.batches:
        if (scaling := batch.plan.scaling) is not None:
            rules, *_ = batch.numbers.values()
            for stage, numbers in zip(scaling[1:], numbers_of_two(rules, scaling.place), strict=True):
                of_two = triton_kernel.in_powers_of_two(stage.padded)
                traced = trace(of_two, number_places(numbers), batch.grad_dtype)
                made.append(simplified(traced if stage.applies else measured(traced, "squares")))
            continue
        for k, stage in enumerate(batch.plan.padded_stages):
            if stage.scope == "elementwise":
                numbers, *_ = batch.stage_numbers(k).values()
                incoming = torch.float32 if k else batch.grad_dtype
                traced = trace(triton_kernel.in_powers_of_two(stage), number_places(tuple(numbers)), incoming)
                made.append(simplified(traced))
    return made


def compile_graph(graph: Graph, target: str) -> Program:
    """Compile the kernel of a graph for a target, as it is launched there."""
    driver.set_active(_Driver())
    module, sizes = module_of(triton_source(graph)), triton_kernel.sizes_of(graph)
    tables = [node.name for node in graph.nodes if node.op == "table"]
    pointers = {"chunks": "*i32", "rows": "*i64", "words": "*i32", **dict.fromkeys(tables, "*fp32")}
    pointers |= {"late": "*fp32"} if graph.late else {}
    signature = {**pointers, "CHUNK": "i32", **dict.fromkeys(sizes, "constexpr")}
    aligned = {(i,): [["tt.divisibility", 16]] for i in range(len(pointers) + 1)}
    source = ASTSource(module.step, signature, sizes, aligned)
    # Others must not find a program in their cache that was made for a device that is not there.
    with tempfile.TemporaryDirectory() as folder, triton.knobs.cache.scope():
        triton.knobs.cache.dir = folder
        binary = triton.compile(
            source, target=GPUTarget(*TARGETS[target]), options=dict(triton_kernel.OPTIONS)
        )
    text = binary.asm.get("ptx") or binary.asm["llir"]
    return Program(target, text, binary, sizes["BLOCK"], TARGETS[target][2] * binary.metadata.num_warps)


def step_of(name: str, *arguments: Any, **options: Any) -> Callable[[], torch.optim.Optimizer]:
    """Return what makes an optimizer of this package over one bfloat16 parameter."""

    def make() -> torch.optim.Optimizer:
        p = torch.nn.Parameter(torch.zeros(_ELEMENTS // 1024, 1024, dtype=torch.bfloat16))
        p.grad = torch.zeros_like(p)
        return getattr(hs, name)([("w", p)], *arguments, compile=False, **options)

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
        "AdamW, ufloat16_e7m9": moments("bfloat16", "ufloat16_e7m9"),
        "AdamW, scaled float16": moments(scaled("float16"), scaled("float16")),
        "AdamW, e4m3fn, ufloat8_e5m3": moments(scaled("float8_e4m3fn"), scaled("ufloat8_e5m3")),
        "AdamW, int8, ufloat8_e5m3": moments(scaled("int8"), scaled("ufloat8_e5m3")),
        "AdamW, relative int8 by block": moments(hs.relative("int8", 128), "ufloat16_e7m9"),
        "AdamW, relative int4 by block": moments(hs.relative("int4", 32), "ufloat16_e7m9"),
        "AdamW, 8-bit codebooks": moments(codebook("dynamic8"), codebook("udynamic8")),
        "AdamW, float32 moments": moments("float32", "float32"),
        **{name: step_of(name) for name in ("Adam", "Lion", "Lamb", "Lamb16")},
        "SGD, momentum": step_of("SGD", momentum=0.9),
        "Adan": chain(hs.scale_by_adan()),
        "store_state of Adam, fp8": chain(hs.store_state(hs.scale_by_adam(), scaled("float8_e4m3fn"))),
        "clipping, Lion": chain(hs.clip_by_global_norm(1.0), hs.scale_by_lion()),
    }


def measure(name: str, targets: Sequence[str]) -> dict[str, Any]:
    """Return what a step compiles to: a row of the table."""
    made, counts, found = graphs(cases()[name]()), {}, []
    for target in targets:
        try:
            programs = [compile_graph(graph, target) for graph in made]
        except triton.CompilationError as error:
            if "not supported in this architecture" not in str(error):
                raise
            continue
        counts[target] = None  # of AMD's
        for p in programs:
            found += [f"{target}: products may be fused"] if p.binary.metadata.enable_fp_fusion else []
            if not target.startswith("sm_"):
                found += [f"{target}: {what} {count}" for what, count in faults_of_llvm(p.text).items()]
                continue
            found += [f"{target}: {what} {count}" for what, count in faults(p.text).items()]
            if code := machine_code(p.text):
                found += [f"{target}: {code.spilled} bytes spilled"] if code.spilled else []
                found += [f"{target}: ptxas fuses {code.fused}"] if code.fused else []
        if target.startswith("sm_"):
            counts[target] = _total(programs)
    if len(made) > KERNELS.get(name, 1):
        found.append(f"{len(made)} kernels")
    of_h100 = counts.get("sm_90") or {}
    machine = [of_h100.get(key, 0.0) for key in ("machine", "integer")]
    if any(count > most for count, most in zip(machine, INSTRUCTIONS.get(name, machine), strict=True)):
        found.append("sm_90: {:.0f} ({:.0f}) instructions".format(*machine))
    if of_h100.get("narrow"):
        found.append(f"sm_90: {of_h100['narrow']} loads of whole vectors are narrow")
    return {"step": name, "kernels": len(made), "instructions": counts, "faults": found}


def _total(programs: Sequence[Program]) -> dict[str, float]:
    """Return the counts of the main loops of a step's kernels, per element."""
    total = {"machine": 0.0, "integer": 0.0, "wide": 0.0}
    for p in programs:
        main: Loop = loops(p.text)[0]
        total["machine"] += main.instructions * p.threads / p.elements
        total["integer"] += main.integer * p.threads / p.elements
        total["wide"] += main.wide
    return {key: round(count, 1) for key, count in total.items()}


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
        f"{'instructions (integer) per element':36s}{'kernels':>8s}",
        *(f"{t:>15s}" for t in arguments.targets),
    )
    for name in arguments.only or cases():
        row = measure(name, arguments.targets)
        texts = ["-" if t not in row["instructions"] else "read" for t in arguments.targets]
        for i, target in enumerate(arguments.targets):
            if of_target := row["instructions"].get(target):
                texts[i] = "{machine:.0f} ({integer:.0f})".format_map(of_target)
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

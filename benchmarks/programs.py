"""What is in a compiled program: bytes that it moves, and operations that round otherwise than the contract.

A kernel of a GPU keeps the contract's bits if no product is fused with a sum, quotients and roots are rounded
correctly and nothing is flushed: then its PTX has no `fma`, no `.approx` or `.full` and no `.ftz`, and says
`.rn` of every product, sum and difference: of others NVIDIA's assembler, `ptxas`, may fuse a product with a
sum. Its instructions are those that take time.

The bytes that an XLA program moves to and from memory are read from its text: `compiled.cost_analysis()` does
not tell a TPU's on-chip memory from HBM, and counts what is prefetched into it twice. Here every operation of
the entry computation reads its operands and writes its results once; arrays in on-chip memory (`S(1)` in
their layout) are free, and so is what moves nothing.
"""

import functools
import math
import os
import pathlib
import re
import shutil
import subprocess
import sys
import tempfile
from typing import NamedTuple

# Rounding to whole numbers may flush: of a subnormal number it makes 0 anyhow.
_FAULTS = {
    "fma": r"\bfma\.",
    "approximate": r"\.(approx|full)\b",
    "flushed": r"(?<!\.r[nzmp]i)\.ftz\b",
    "may be fused": r"\b(?:mul|add|sub)(?:\.ftz|\.sat)*\.b?f(?:16|32)(?:x2)?\b",
}
# What goes through the integer pipe, which has half as many lanes as a multiprocessor issues instructions to.
# (CUDA C++ programming guide, "Throughput of native arithmetic instructions", compute capability 9.0.)
_INTEGER = frozenset(
    """BMSK FCHK FMNMX FSEL FSETP I2FP F2FP IABS IADD IADD3 IMNMX ISETP LEA LOP LOP3 MOV P2R PLOP3 PRMT R2P
    SEL SGXT SHF VABSDIFF VIADD VIADDMNMX VIMNMX""".split()
)
_MULTIPLY_ADDS = ("FFMA", "FFMA2", "HFMA2", "DFMA")
_STORE = re.compile(r"\bst\.global[\w:.]*?(?:\.v(\d))?\.[bsuf](\d+)\b")


_BITS = {"pred": 8, "bf16": 16, "f16": 16, "f32": 32, "f64": 64, "f8e4m3fn": 8, "f8e5m2": 8}
_BITS |= {f"{kind}{bits}": bits for kind in "su" for bits in (4, 8, 16, 32, 64)}
_ARRAY = re.compile(rf"\b({'|'.join(sorted(_BITS, key=len, reverse=True))})\[([\d,]*)\](?:\{{([^}}]*)\}})?")
_OPERATION = re.compile(r"^\s*(?:ROOT )?%?([\w.\-]+) = (\(.*?\)|\S+) ([\w\-]+)\((.*)$")
_ON_CHIP = "S("
_MOVES_NOTHING = {
    *("parameter", "constant", "tuple", "get-tuple-element", "bitcast", "after-all"),
    *("copy-done", "slice-done", "dynamic-slice-done"),  # counted where they start
}


class MachineCode(NamedTuple):
    """What `ptxas` makes of a kernel.

    Attributes:
        instructions: of the text, without those that only fill it up.
        integer: those of them that the integer pipe runs. A device that issues 128 instructions has 64 lanes
            for these: a kernel takes as long as the larger of all and twice these.
        registers: of a thread.
        spilled: bytes of stack that a thread needs because registers did not suffice.
        fused: multiply-adds that `ptxas` made of products and sums, which it makes none of where it must not.
            (Others are part of quotients and roots that are rounded correctly, or change a sign.)
    """

    instructions: int
    integer: int
    registers: int
    spilled: int
    fused: int


class Loop(NamedTuple):
    """A loop of a kernel's machine code.

    Attributes:
        instructions: in it.
        integer: of them, that the integer pipe runs.
        wide: loads and stores of 16 bytes.
        narrow: others.
    """

    instructions: int
    integer: int
    wide: int
    narrow: int


def has_products(ptx: str) -> bool:
    """Return whether a product of floats is in the text, which `ptxas` could fuse with a sum."""
    return bool(re.search(r"\bmul\.[\w.]*f(?:16|32|64)", ptx))


def faults(ptx: str) -> dict[str, int]:
    """Return what rounds otherwise than the contract has it, and how often."""
    found = {name: len(re.findall(pattern, ptx)) for name, pattern in _FAULTS.items()}
    return {name: count for name, count in found.items() if count}


def faults_of_llvm(text: str) -> dict[str, int]:
    """Return the same of what Triton gives to LLVM for AMD's GPUs: what an operation may be replaced by.

    Without a flag LLVM rounds correctly; fused products in AMD's own code are steps of quotients and roots.
    """
    flags = r"= (?:tail )?(?:f\w+|call)(?: \w+)* (?:fast|contract|reassoc|afn|arcp)\b"
    patterns = {"fma": r"@llvm\.(?:fma|fmuladd)\.", "approximate": rf"{flags}|!fpmath"}
    patterns["flushed"] = r'"denormal-fp-math(?:-f32)?"="(?:preserve-sign|positive-zero)'
    found = {name: len(re.findall(pattern, text)) for name, pattern in patterns.items()}
    return {name: count for name, count in found.items() if count}


def instructions(ptx: str) -> int:
    """Return how many instructions the text has, without jumps and returns."""
    lines = [line for line in ptx.splitlines() if re.match(r"\s+[@a-z].*;$", line)]
    return sum(not re.match(r"\s+(@?!?%?p?\d*\s*bra|ret)\b", line) for line in lines)


def bytes_stored(ptx: str) -> int:
    """Return how many bytes a thread writes to memory, each instruction run once."""
    return sum(int(width or 1) * int(bits) // 8 for width, bits in _STORE.findall(ptx))


@functools.cache
def machine_code(ptx: str) -> MachineCode | None:
    """Return what `ptxas` makes of a program for its own target; None where there is no `ptxas`."""
    if not all(_tools()):
        return None
    said, code = _assembled(ptx)
    names, unfused = map(_names, (code, _assembled(ptx, "--fmad=false")[1]))
    registers = max(map(int, re.findall(r"Used (\d+) registers", said)), default=0)
    spilled = sum(map(int, re.findall(r"(\d+) bytes spill", said)))
    made, needed = (sum(name in _MULTIPLY_ADDS for name in listed) for listed in (names, unfused))
    integer = sum(name in _INTEGER for name in names)
    return MachineCode(len(names), integer, registers, spilled, made - needed)


def _names(code: str) -> list[str]:
    return [
        name
        for name in re.findall(r"^\s+/\*[0-9a-f]{4,}\*/\s+(?:@!?\w+\s+)?(\w+)", code, re.MULTILINE)
        if name != "NOP"
    ]


def _assembled(ptx: str, *options: str) -> tuple[str, str]:
    """Return what `ptxas` says of a program, and its machine code."""
    (target,) = re.findall(r"^\.target (\w+)", ptx, re.MULTILINE)[:1]
    ptxas, disassemble = _tools()
    with tempfile.TemporaryDirectory() as folder:
        text, binary = pathlib.Path(folder, "kernel.ptx"), pathlib.Path(folder, "kernel.cubin")
        text.write_text(ptx)
        commands = (
            [ptxas, "-v", f"-arch={target}", *options, str(text), "-o", str(binary)],
            [disassemble, "-c", str(binary)],
        )
        assembled, listed = (
            subprocess.run(command, check=True, capture_output=True, text=True) for command in commands
        )
    return assembled.stderr, listed.stdout


@functools.cache
def loops(ptx: str) -> list[Loop]:
    """Return the loops of a program's machine code, in its order; none without `ptxas`."""
    if not all(_tools()):
        return []
    listed: list[str] = []
    labels: dict[str, int] = {}
    found: list[Loop] = []
    for line in _assembled(ptx)[1].splitlines():
        if label := re.match(r"(\.L[\w.]*):", line):
            labels[label[1]] = len(listed)
        elif read := re.match(r"\s+/\*[0-9a-f]{4,}\*/\s+(?:@!?\w+\s+)?([A-Z][\w.]*)(.*)", line):
            listed.append(read[1])
            back = re.search(r"\(?(\.L[\w.]*)\)?", read[2]) if read[1].startswith("BRA") else None
            if back and len(listed) - labels.get(back[1], len(listed)) > 20:
                found.append(_loop(listed[labels[back[1]] :]))
    return found


def _loop(names: list[str]) -> Loop:
    plain = [name.split(".")[0] for name in names if not name.startswith("NOP")]
    memory = [name for name in names if name.startswith(("LDG", "STG"))]
    wide = sum(".128" in name for name in memory)
    return Loop(len(plain), sum(name in _INTEGER for name in plain), wide, len(memory) - wide)


def _tools() -> tuple[str | None, str | None]:
    """Return the paths of NVIDIA's assembler and disassembler, where they are here."""
    # Of the two assemblers that Triton brings the first is the newer; it knows older devices too.
    return _tool("ptxas-blackwell") or _tool("ptxas"), _tool("nvdisasm")


@functools.cache
def _tool(name: str) -> str | None:
    """Return the path of a tool of NVIDIA's: as Triton brings it, or on the search path."""
    folders = [pathlib.Path(folder, "triton/backends/nvidia/bin") for folder in sys.path]
    path = os.pathsep.join([*map(str, folders), os.environ.get("PATH", "")])
    return shutil.which(name, path=path)


def hbm_traffic(text: str) -> float:
    """Return the bytes that one run of a program moves.

    Args:
        text: of the optimised program, `compiled.as_text()`.
    """
    arrays, total = {}, 0.0
    for line in _entry_computation(text):
        if not (match := _OPERATION.match(line)):
            continue
        name, results, operation, rest = match.groups()
        arrays[name] = _arrays(results)
        if operation in _MOVES_NOTHING:
            continue
        if operation.endswith("-start"):
            total += _asynchronous(operation, arrays[name])
            continue
        operands = [arrays.get(operand, []) for operand in re.findall(r"%([\w.\-]+)", _arguments(rest))]
        total += sum(size for group in (arrays[name], *operands) for size, on_chip in group if not on_chip)
    return total


def _entry_computation(text: str) -> list[str]:
    lines = text.splitlines()
    start = next(i for i, line in enumerate(lines) if line.startswith("ENTRY"))
    end = next(i for i in range(start, len(lines)) if lines[i].startswith("}"))
    return lines[start + 1 : end]


def _arrays(results: str) -> list[tuple[float, bool]]:
    """Return the size in bytes of every array of a type, and whether it is in on-chip memory."""
    return [
        (math.prod(int(n) for n in shape.split(",") if n) * _BITS[dtype] / 8, _ON_CHIP in layout)
        for dtype, shape, layout in _ARRAY.findall(results)
    ]


def _asynchronous(operation: str, arrays: list[tuple[float, bool]]) -> float:
    """Return what a copy between memories moves: as much as it writes, on each side that is HBM."""
    written, read = arrays[:2] if operation == "copy-start" else (arrays[1], arrays[0])
    return written[0] * ((not written[1]) + (not read[1]))


def _arguments(rest: str) -> str:
    """Return what stands before the parenthesis that closes the operands."""
    depth = 1
    for i, character in enumerate(rest):
        depth += (character == "(") - (character == ")")
        if depth == 0:
            return rest[:i]
    return rest

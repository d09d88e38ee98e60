"""The text of PTX, NVIDIA's assembly language: kernels and their instructions."""

import functools
import re
from typing import NamedTuple

# A number (of a float, its pattern), or the name of a register, a symbol or a label.
Word = int | str


class Address(NamedTuple):
    """An operand in brackets: a place in memory, so many bytes past another."""

    base: Word
    offset: int


Operand = Word | Address | tuple[Word, ...]


class Guard(NamedTuple):
    """What stands before an instruction: the predicate on which it is executed."""

    predicate: str
    negated: bool


class Instruction(NamedTuple):
    """One instruction.

    Attributes:
        opcode: its name with all modifiers, as `add.rn.f32`.
        operands: the result first.
        guard: None where it is always executed.
        text: the whole, for messages.
    """

    opcode: str
    operands: tuple[Operand, ...]
    guard: Guard | None
    text: str


class Kernel(NamedTuple):
    """One kernel.

    Attributes:
        name: of the kernel.
        parameters: names and widths in bits, in order.
        block: threads of a block along x, y and z, where the text says so.
        body: its instructions.
        labels: the places in `body` to which branches lead.
        registers: widths in bits by name; 1 is a predicate.
        symbols: arrays in shared memory: where they begin.
        shared: bytes of shared memory that the text declares.
    """

    name: str
    parameters: list[tuple[str, int]]
    block: tuple[int, int, int] | None
    body: list[Instruction]
    labels: dict[str, int]
    registers: "Widths"
    symbols: dict[str, int]
    shared: int

    def width(self, register: str) -> int:
        """Return the bits of a register; refuse a name that the kernel does not declare."""
        try:
            return self.registers[register]
        except LookupError:
            raise LookupError(f"{self.name}: {register} is not declared") from None


class Widths(dict[str, int]):
    """Widths of registers: those that a number ends are declared by what stands before it."""

    def __missing__(self, register: str) -> int:
        declared = re.sub(r"\d+$", "", register)
        if declared not in self:
            raise LookupError(register)
        self[register] = self[declared]
        return self[register]


def parse(text: str) -> dict[str, Kernel]:
    """Return the kernels of a module by name."""
    text = re.sub(r"//[^\n]*|/\*.*?\*/", "", text, flags=re.DOTALL)
    text = re.sub(r"^\s*\.(loc|file|section)\b[^\n]*$", "", text, flags=re.MULTILINE)
    kernels = {}
    for match in re.finditer(r"\.entry\s+([\w$]+)\s*\((.*?)\)(.*?)\{", text, re.DOTALL):
        name, parameters, directives = match.groups()
        # What a module declares outside of its kernels is theirs, too.
        shared = re.findall(r"(?:\.extern\s+)?\.shared[^;{]*;", text[: match.start()])
        body = _Body("".join(shared) + text[match.end() : _end(text, match.end())])
        kernels[name] = Kernel(
            name, _parameters(parameters), _block(directives), body.instructions, body.labels,
            body.registers, body.symbols, body.shared,
        )  # fmt: skip
    return kernels


@functools.cache
def bits(kind: str) -> int:
    """Return the width of a type, such as `b32`, `pred` or `bf16x2`."""
    if kind == "pred":
        return 1
    if match := re.fullmatch(r"(?:b|u|s|f|bf)(8|16|32|64|128)(x2)?", kind):
        return int(match[1]) * (2 if match[2] else 1)
    if re.fullmatch(r"e\dm\dx2", kind):
        return 16
    raise LookupError(f"PTX type {kind} is not known here")


def _end(text: str, start: int) -> int:
    """Return where the brace closes that was opened before `start`."""
    depth = 1
    for match in re.finditer(r"[{}]", text[start:]):
        depth += 1 if match[0] == "{" else -1
        if not depth:
            return start + match.start()
    raise ValueError("a kernel without an end")


def _parameters(text: str) -> list[tuple[str, int]]:
    pattern = r"\s*\.param\s+\.(\w+)(?:\s+\.ptr)?(?:\s+\.\w+)?(?:\s+\.align\s+\d+)?\s+([\w$]+)\s*"
    parameters = []
    for part in text.split(",") if text.strip() else []:
        match = re.fullmatch(pattern, part)
        if match is None:
            raise ValueError(f"a parameter of a kernel is not understood: {part.strip()}")
        parameters.append((match[2], bits(match[1])))
    return parameters


def _block(directives: str) -> tuple[int, int, int] | None:
    match = re.search(r"\.reqntid\s+(\d+)(?:,\s*(\d+))?(?:,\s*(\d+))?", directives)
    return (int(match[1]), int(match[2] or 1), int(match[3] or 1)) if match else None


class _Body:
    """The statements of a kernel, sorted."""

    def __init__(self, text: str) -> None:
        self.instructions: list[Instruction] = []
        self.labels: dict[str, int] = {}
        self.registers = Widths()
        self.symbols: dict[str, int] = {}
        self.shared = 0
        for statement in text.split(";"):
            self._add(statement.strip())

    def _add(self, statement: str) -> None:
        # Braces and labels are not ended by a semicolon.
        while match := re.match(r"[{}]\s*|([\w$]+):(?!:)\s*", statement):
            if match[1]:
                self.labels[match[1]] = len(self.instructions)
            statement = statement[match.end() :]
        if match := re.fullmatch(r"\.reg\s+\.(\w+)\s+(.*)", statement, re.DOTALL):
            for register in match[2].split(","):
                self._declare(re.sub(r"<\d+>$", "", register.strip()), bits(match[1]))
        elif match := re.fullmatch(
            r"(?:\.extern\s+)?\.shared\s+(?:\.align\s+(\d+)\s+)?\.b8\s+([\w$]+)\[(\d*)\]", statement
        ):
            align = int(match[1] or 1)
            self.symbols[match[2]] = -(-self.shared // align) * align
            self.shared = self.symbols[match[2]] + int(match[3] or 0)
        # Compilers declare memory of a thread that they then do not use: its name is not known.
        elif statement and not statement.startswith((".pragma", ".local")):
            self.instructions.append(_instruction(statement))

    def _declare(self, register: str, width: int) -> None:
        if self.registers.setdefault(register, width) != width:
            raise ValueError(f"{register} is declared with two widths")


def _instruction(text: str) -> Instruction:
    match = re.fullmatch(r"(?:@(!?)([%\w]+)\s+)?([a-z][\w.:]*)\s*(.*)", text, re.DOTALL)
    if match is None:
        raise ValueError(f"a statement is not understood: {text}")
    negated, predicate, opcode, rest = match.groups()
    operands = re.findall(r"\{[^}]*\}|\[[^\]]*\]|[^,\s][^,]*", rest)
    guard = Guard(predicate, bool(negated)) if predicate else None
    return Instruction(opcode, tuple(map(_operand, operands)), guard, " ".join(text.split()))


def _operand(text: str) -> Operand:
    if text.startswith("{"):
        return tuple(_word(part) for part in text[1:-1].split(","))
    if text.startswith("["):
        base, _, offset = text[1:-1].partition("+")
        return Address(_word(base), int(offset or "0", 0))
    return _word(text)


def _word(text: str) -> Word:
    text = text.strip()
    if match := re.fullmatch(r"0[fFdD]([0-9a-fA-F]+)", text):
        return int(match[1], 16)
    if re.fullmatch(r"-?(0x[0-9a-fA-F]+|\d+)U?", text):
        return int(text.rstrip("U"), 0)
    if re.fullmatch(r"!?[%\w$.|]+", text):
        return text
    raise ValueError(f"an operand is not understood: {text}")

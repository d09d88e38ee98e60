"""The comparison sees what it is for: XLA's programs made wrong, and devices worse than documented."""

import pytest

from gpu_bits.comparison import differences
from gpu_bits.steps import SMALL, case
from gpu_bits.xla_backend import XlaBackend
from ptx.approximations import BOUNDS, Approximations
from ptx.kernel import Instruction, Kernel, Operand

# Nothing in it hides an ulp.
STEP = "AdamW, float32; float32, float32 weights"


class Subject:
    """A step whose program can be changed.

    Attributes:
        kernel: the one that steps the weights.
    """

    def __init__(self) -> None:
        self._backend, self._case = XlaBackend(), case(STEP, SMALL, 2)
        assert self.differing(Approximations()) == 0
        (self._program,) = self._backend.programs.values()
        name = max(self._program.texts, key=lambda name: len(self._program.texts[name]))
        self.kernel: Kernel = self._program.kernels[name]

    def differing(self, approximations: Approximations) -> int:
        """Return how many numbers differ that A8 does not excuse."""
        self._backend.approximations = approximations
        found = differences(self._case, self._backend.run(self._case))
        return sum(count for name, count in found.items() if not name.endswith("(A8)"))

    def differing_with(self, body: list[Instruction]) -> int:
        """Return how many numbers differ if the kernel has another body."""
        kernels = self._program.kernels
        kernels[self.kernel.name] = self.kernel._replace(body=body)
        try:
            return self.differing(Approximations())
        finally:
            kernels[self.kernel.name] = self.kernel


@pytest.fixture(scope="module")
def subject() -> Subject:
    return Subject()


def fused(body: list[Instruction]) -> list[list[Instruction]]:
    """Return bodies in each of which one product is fused with a sum that it is an addend of."""
    made = {str(i.operands[0]): i for i in body if i.operands}
    # XLA is kept from fusing by operations that change nothing, on patterns or with -0 as an addend.
    zeros = {str(i.operands[0]) for i in body if i.opcode == "or.b32" and i.operands[2] == -(1 << 31)}

    def is_kept(i: Instruction) -> bool:
        return i.opcode == "add.rn.f32" and not zeros.isdisjoint(map(str, i.operands))

    def product(x: Operand) -> Instruction | None:
        i = made.get(str(x))
        if i is None or i.opcode == "mul.rn.f32":
            return i
        passed = i.operands[1:] if i.opcode in ("or.b32", "xor.b32", "mov.b32") or is_kept(i) else ()
        return next(filter(None, map(product, passed)), None)

    bodies = []
    for at, i in enumerate(body):
        if i.opcode != "add.rn.f32" or is_kept(i):
            continue
        for addend, other in (i.operands[1:], i.operands[:0:-1]):
            if factors := product(addend):
                operands = i.operands[0], *factors.operands[1:], other
                one = Instruction("fma.rn.f32", operands, i.guard, "fused")
                bodies.append([*body[:at], one, *body[at + 1 :]])
    return bodies


def test_every_product_that_is_fused_with_a_sum_is_seen(subject):
    bodies = fused(subject.kernel.body)
    # Of two moments, the decay and the new weight; of each moment two products are added.
    assert len(bodies) >= 5
    assert 0 not in [subject.differing_with(body) for body in bodies]


def test_a_wrong_constant_is_seen(subject):
    def is_constant(x) -> bool:
        return isinstance(x, int) and x > 1 << 16

    body = subject.kernel.body
    floats = [at for at, i in enumerate(body) if i.opcode == "mul.rn.f32" and is_constant(i.operands[2])]
    assert floats
    for at in floats:
        *others, number = body[at].operands
        changed = body[at]._replace(operands=(*others, number + 1))
        assert subject.differing_with([*body[:at], changed, *body[at + 1 :]])


def test_flushing_is_seen(subject):
    flushed = [
        i._replace(opcode=i.opcode.replace("mul.rn.f32", "mul.rn.ftz.f32")) for i in subject.kernel.body
    ]
    assert subject.differing_with(flushed)


@pytest.mark.parametrize(("name", "moves"), [("sqrt", 2), ("div", 3), ("rcp", 3)])
def test_a_device_worse_than_documented_is_seen(subject, name, moves):
    """Of a reciprocal two numbers would be corrected, too."""
    worse = [Approximations(how, BOUNDS | {name: moves}) for how in ("up", "down", "random")]
    assert all(subject.differing(approximations) > 100 for approximations in worse)


def test_a_step_that_is_rounded_to_sixteen_bits_hides_an_ulp():
    """Why every format is run with float32 weights: of 61,440 weights hardly one sees a worse root."""
    backend, question = XlaBackend(), case("recipe sixteen_bit", SMALL, 2)
    backend.approximations = Approximations("up", BOUNDS | {"sqrt": 2})
    assert sum(differences(question, backend.run(question)).values()) < 20

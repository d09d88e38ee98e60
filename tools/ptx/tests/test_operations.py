"""Single instructions: golden cases, exact fractions, and what is refused."""

import fractions
import math
import random
import re

import numpy as np
import pytest

from ptx.approximations import BOUNDS, Approximations
from ptx.kernel import parse
from ptx.launch import Launch
from ptx.memory import Memory, poisoned
from ptx.tests.cases import CONVERSION, FLOAT, INTEGER

GOLDEN = INTEGER | FLOAT | CONVERSION
BITS = {1: 32, 4: 16, 8: 32, 16: 64}


def execute(instruction: str, rows: list[list[str]], approximations=None) -> list[str]:
    """Execute an instruction in one thread for each row of operands, through memory; return its results.

    Args:
        instruction: of registers %d, the result, and %a, %b, %c.
        rows: operands, and last a pattern as wide as the result.
        approximations: by default exact.
    """
    columns = [[row[k] for row in rows] for k in range(len(rows[0]))]
    names = [*"abc"[: len(columns) - 1], "d"]
    declared, loads, memory = [], [], Memory()
    for n, (name, column) in enumerate(zip(names, columns, strict=True)):
        width = BITS[len(column[0])]
        is_predicate = len(column[0]) == 1
        declared.append(f".reg .{'pred' if is_predicate else f'b{width}'} %{name}; .reg .b64 %at_{name};")
        declared.append(f".reg .b{width} %of_{name};")
        numbers = np.array([int(x, 16) for x in column], f"uint{width}")
        out = name == "d"
        memory.add(n << 32 | 1 << 40, poisoned(numbers.nbytes) if out else numbers.view(np.uint8))
        place = f"[%at_{name}]"
        loads.append(
            f"ld.param.b64 %at_{name}, [p{n}]; mad.wide.u32 %at_{name}, %t, {width // 8}, %at_{name};"
        )
        if not out:
            loads.append(f"ld.global.b{width} %of_{name}, {place};")
            loads.append(
                f"setp.ne.b32 %{name}, %of_{name}, 0;"
                if is_predicate
                else f"mov.b{width} %{name}, %of_{name};"
            )
    result, width = columns[-1][0], BITS[len(columns[-1][0])]
    end = f"st.global.b{width} [%at_d], %d;"
    if len(result) == 1:
        end = "selp.b32 %of_d, 1, 0, %d; st.global.b32 [%at_d], %of_d;"
    parameters = ", ".join(f".param .u64 p{n}" for n in range(len(names)))
    body = (
        f"{' '.join(declared)} .reg .b32 %t; mov.u32 %t, %tid.x; {' '.join(loads)} {instruction}; {end} ret;"
    )
    (kernel,) = parse(f".entry k({parameters}) {{ {body} }}").values()
    arguments = [n << 32 | 1 << 40 for n in range(len(names))]
    launch = Launch(
        kernel, (1, 1, 1), (len(rows), 1, 1), arguments, memory, approximations or Approximations()
    )
    launch.run()
    addresses = np.uint64(arguments[-1]) + np.arange(len(rows), dtype=np.uint64) * np.uint64(width // 8)
    return [f"{x:0{len(result)}x}" for x in memory.load(addresses, width)]


@pytest.mark.parametrize("instruction", GOLDEN)
def test_golden_cases(instruction):
    rows = [row.replace("=", "").split() for row in GOLDEN[instruction]]
    assert execute(instruction, rows) == [row[-1] for row in rows]


def test_both_halves_of_a_pair_are_compared_the_lower_one_first():
    # 2 and 1 in the upper halves, 1 and NaN in the lower ones.
    rows = [["40003f80", "3f807fc0", "00000000"]]
    both = ".reg .pred %low; .reg .pred %high; .reg .b32 %y; setp.gt.bf16x2 %low|%high, %a, %b;"
    assert execute(f"{both} selp.b32 %d, 1, 0, %low", rows) == ["00000000"]
    assert execute(f"{both} selp.b32 %d, 1, 0, %high", rows) == ["00000001"]


def test_a_comparison_also_gives_its_inverse():
    both = ".reg .pred %p; .reg .pred %q; setp.lt.f32 %p|%q, %a, %b; selp.b32 %d, 1, 0, %q"
    rows = [["3f800000", "40000000", "00000000"], ["7fc00000", "40000000", "00000000"]]
    assert execute(both, rows) == ["00000000", "00000001"]


# ---- exact fractions


def nearest(exact: fractions.Fraction) -> int:
    """Return the float32 pattern nearest to a number, ties to even, by whole numbers alone."""
    size, top = abs(exact), int(exact < 0) << 31
    if not size:
        return top
    exponent = size.numerator.bit_length() - size.denominator.bit_length()
    exponent -= size < fractions.Fraction(2) ** exponent
    unit = fractions.Fraction(2) ** max(exponent - 23, -149)
    # Python rounds fractions to even. A carry out of the mantissa is right in the pattern.
    field = max(exponent + 126, 0) << 23
    return top | min(field + round(size / unit) if exponent >= -126 else round(size / unit), 0x7F800000)


def value(pattern: int) -> fractions.Fraction:
    return fractions.Fraction(float(np.uint32(pattern).view(np.float32)))


def operands(count: int, arity: int, seed: int) -> list[list[int]]:
    """Return patterns of finite numbers: of like size, so that sums cancel, and of any."""
    rng, rows = random.Random(seed), []
    for n in range(count):
        middle, spread = rng.randrange(30, 220), 2 if n % 3 else 24
        fields = [min(max(rng.randrange(middle - spread, middle + spread + 1), 0), 254) for _ in range(arity)]
        edge = (0, 1, 0x7FFFFF, 0x7FFFFE, 0x400000)
        mantissas = [rng.choice(edge) if rng.random() < 0.4 else rng.getrandbits(23) for _ in fields]
        pairs = zip(fields, mantissas, strict=True)
        rows.append([rng.getrandbits(1) << 31 | field << 23 | mantissa for field, mantissa in pairs])
    return rows


EXACT = {
    "add.rn.f32 %d, %a, %b": lambda x, y: x + y,
    "sub.rn.f32 %d, %a, %b": lambda x, y: x - y,
    "mul.rn.f32 %d, %a, %b": lambda x, y: x * y,
    "div.rn.f32 %d, %a, %b": lambda x, y: x / y,
    "rcp.rn.f32 %d, %a": lambda x: 1 / x,
    "fma.rn.f32 %d, %a, %b, %c": lambda x, y, z: x * y + z,
}


@pytest.mark.parametrize("instruction", EXACT)
def test_results_are_the_nearest_numbers_to_exact_fractions(instruction):
    arity = instruction.count(",")
    rows = operands(3000, arity, seed=arity)
    if "fma" in instruction:  # sums near to nothing, and an addend far below the product
        rows = [[a, b, c if n % 2 else nearest(-value(a) * value(b))] for n, (a, b, c) in enumerate(rows)]
        rows = [row for row in rows if row[2] & 0x7FFFFFFF < 0x7F800000]
    exact = [EXACT[instruction](*map(value, row)) for row in rows]
    # Of zero the sign is not the fraction's.
    kept = [n for n, x in enumerate(exact) if x]
    texts = [[f"{x:08x}" for x in (*rows[n], 0)] for n in kept]
    assert len(kept) > 2000
    assert execute(instruction, texts) == [f"{nearest(exact[n]):08x}" for n in kept]


def test_roots_are_the_nearest_numbers():
    rows = [x & 0x7FFFFFFF for (x,) in operands(3000, 1, seed=7)]
    results = execute("sqrt.rn.f32 %d, %a", [[f"{x:08x}", "00000000"] for x in rows])
    for x, root in zip(rows, (int(r, 16) for r in results), strict=True):
        below, above = ((value(root) + value(root + by)) / 2 for by in (-1, 1))
        assert not x or below**2 < value(x) < above**2


# ---- what is only bounded


@pytest.mark.parametrize("name", ["div.full", "sqrt.approx", "rcp.approx"])
def test_approximations_move_as_far_as_their_bound_and_no_further(name):
    arity = 2 if name == "div.full" else 1
    rows = [[f"{x & 0x7FFFFFFF:08x}" for x in (*row, 0)] for row in operands(2000, arity, seed=3)]
    instruction = f"{name}.f32 %d, {', '.join(['%a', '%b'][:arity])}"
    bound = BOUNDS[name.split(".")[0]]

    def moves(how, seed=0):
        exact, moved = (
            [int(x, 16) for x in execute(instruction, rows, Approximations(h, seed=seed))]
            for h in ("exact", how)
        )
        finite = [(x, y) for x, y in zip(exact, moved, strict=True) if bound < x < 0x7F800000]
        assert len(finite) > 1000
        return [y - x for x, y in finite]

    assert set(moves("up")) == {bound}
    assert set(moves("down")) == {-bound}
    assert set(moves("random")) == set(moves("wild")) == set(range(-bound, bound + 1))
    assert moves("random") == moves("random")
    assert moves("random") != moves("random", seed=1)


def test_what_is_computed_twice_agrees_unless_it_is_wild():
    twice = ".reg .b32 %x; .reg .b32 %y; div.full.f32 %x, %a, %b; div.full.f32 %y, %a, %b; sub.u32 %d, %x, %y"
    rows = [[f"{x:08x}" for x in (*row, 0)] for row in operands(500, 2, seed=4)]
    assert set(execute(twice, rows, Approximations("random"))) == {"00000000"}
    assert len(set(execute(twice, rows, Approximations("wild")))) > 4


# ---- what is refused


@pytest.mark.parametrize(
    "instruction",
    [
        *("add.rz.f32 %d, %a, %b", "add.sat.f32 %d, %a, %b", "fma.rm.f32 %d, %a, %b, %b"),
        *("mul24.lo.s32 %d, %a, %b", "tanh.approx.f32 %d, %a", "cvt.rna.s32.f32 %d, %a"),
        *("cvt.rn.relu.bf16x2.f32 %d, %a, %b", "max.xorsign.abs.f32 %d, %a, %b", "add.f32.rn %d, %a, %b"),
        *("atom.global.add.f32 %d, [%a], %b", "prmt.f4e.b32 %d, %a, %b, %b", "nonsense %d"),
    ],
)
def test_an_unknown_name_or_modifier_is_refused(instruction):
    with pytest.raises(NotImplementedError, match=re.escape(instruction.split()[0])):
        execute(instruction, [["3f800000", "3f800000", "00000000"]])


@pytest.mark.parametrize(
    ("instruction", "message"),
    [
        ("add.s64 %d, %a, %b", "32 bits, not 64"),
        ("cvt.u16.u32 %d, %unknown", "not declared"),
        ("setp.lt.s32 %d, %a, %b", "is written"),
        ("selp.b32 %d, %a, %b, %a", "no predicate"),
        ("add.s32 %d, %a, %b; add.s32 %d, %c", "missing"),
    ],
)
def test_operands_of_another_type_are_refused(instruction, message):
    with pytest.raises((TypeError, LookupError), match=message):
        execute(instruction, [["3f800000", "3f800000", "00000000"]])


def test_a_division_of_integers_by_zero_is_refused():
    with pytest.raises(ZeroDivisionError):
        execute("div.u32 %d, %a, %b", [["00000001", "00000000", "00000000"]])


def test_nearest_is_what_numpy_rounds_to():
    rng = np.random.default_rng(0)
    x = rng.normal(size=2000) * np.exp2(rng.integers(-160, 130, 2000))
    with np.errstate(over="ignore"):
        right = x.astype(np.float32).view(np.uint32)
    assert [nearest(fractions.Fraction(v)) for v in x if math.isfinite(v)] == right.tolist()

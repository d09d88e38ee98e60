"""What `make compiled` reads from a GPU's program, on programs small enough to count by hand."""

import pathlib
import runpy
import types

import pytest

PATH = pathlib.Path(__file__).parents[1] / "benchmarks" / "programs.py"


@pytest.fixture(scope="module")
def programs():
    return types.SimpleNamespace(**runpy.run_path(str(PATH)))


def program(*lines: str) -> str:
    return "\n".join([".version 9.0", ".target sm_90a", "{", *(f"\t{line}" for line in lines), "}"])


@pytest.mark.parametrize(
    ("line", "found"),
    [
        ("fma.rn.f32 \t%r1, %r2, %r3, %r4;", {"fma": 1}),
        ("div.full.f32 \t%r1, %r2, %r3;", {"approximate": 1}),
        ("sqrt.approx.ftz.f32 \t%r1, %r2;", {"approximate": 1, "flushed": 1}),
        ("add.rn.ftz.f32 \t%r1, %r2, %r3;", {"flushed": 1}),
        ("mul.f32 \t%r1, %r2, %r3;", {"may be fused": 1}),
        ("@%p1 sub.bf16x2 \t%r1, %r2, %r3;", {"may be fused": 1}),
        ("add.ftz.f32 \t%r1, %r2, %r3;", {"flushed": 1, "may be fused": 1}),
        ("mul.rn.f32 \t%r1, %r2, %r3;", {}),
        ("add.s32 \t%r1, %r2, %r3;", {}),
        ("cvt.rmi.ftz.f32.f32 \t%r1, %r2;", {}),
        ("mad.lo.s32 \t%r1, %r2, %r3, %r4;", {}),
        ("div.rn.f32 \t%r1, %r2, %r3;", {}),
        ("sqrt.rn.f32 \t%r1, %r2;", {}),
    ],
)
def test_operations_that_round_otherwise_are_found(programs, line, found):
    assert programs.faults(program(line)) == found


@pytest.mark.parametrize(
    ("line", "found"),
    [
        ("%1 = fmul float %2, %3", {}),
        ("%1 = fdiv float %2, %3", {}),
        ('attributes #0 = { "denormal-fp-math-f32"="ieee" }', {}),
        ("%1 = fmul contract float %2, %3", {"approximate": 1}),
        ("%1 = fdiv float %2, %3, !fpmath !4", {"approximate": 1}),
        ("%1 = tail call afn float @llvm.sqrt.f32(float %2)", {"approximate": 1}),
        ("%1 = tail call float @llvm.fmuladd.f32(float %2, float %3, float %4)", {"fma": 1}),
        ('attributes #0 = { "denormal-fp-math-f32"="preserve-sign" }', {"flushed": 1}),
    ],
)
def test_operations_that_llvm_may_replace_are_found(programs, line, found):
    assert programs.faults_of_llvm(f"define void @step() {{\n  {line}\n}}") == found


def test_what_a_thread_does_is_counted(programs):
    text = program(
        ".reg .b32 \t%r<4>;",
        "ld.global.v4.b32 \t{%r1, %r2, %r3, %r4}, [%rd1];",
        "@%p1 bra \t$L1;",
        "mul.rn.f32 \t%r1, %r2, %r3;",
        "@%p2 st.global.v2.b16 \t[%rd1], {%rs1, %rs2};",
        "st.global.b8 \t[%rd2], %rs3;",
        "ret;",
    )
    assert programs.instructions(text) == 4
    assert programs.bytes_stored(text) == 2 * 2 + 1

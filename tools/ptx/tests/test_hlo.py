"""XLA's text is understood: a module small enough to read."""

import ml_dtypes
import numpy as np
import pytest

from ptx import hlo

TEXT = """HloModule jit_step, is_scheduled=true

%region (arg: (s32[], bf16[2,3])) -> (s32[], bf16[2,3]) {
  %arg = (s32[], bf16[2,3]{1,0}) parameter(0)
  ROOT %next = (s32[], bf16[2,3]{1,0}) tuple(%a, /*index=1*/%b), metadata={op_name="step"}
}

ENTRY %main.7 (p: bf16[2,3]) -> bf16[2,3] {
  %p.1 = bf16[2,3]{1,0} parameter(0), sharding={replicated}
  %c = u32[1,2]{1,0} constant({ { 3876335077, 7 } })
  %loop = (s32[], /*index=1*/bf16[2,3]{1,0}) while(%t), condition=%test, body=%region, metadata={f="a(b)"}
  ROOT %out = bf16[2,3]{1,0} get-tuple-element(%loop), index=1
}
"""


def test_computations_are_read_in_order():
    module = hlo.parse(TEXT)
    assert module.entry == "main.7"
    assert [op.name for op in module.computations["main.7"]] == ["p.1", "c", "loop", "out"]
    assert [op.is_root for op in module.computations["region"]] == [False, True]


def test_operations_have_their_parts():
    *_, loop, out = hlo.parse(TEXT).computations["main.7"]
    assert (loop.kind, loop.operands, loop.shape) == ("while", ("t",), "(s32[], bf16[2,3]{1,0})")
    assert (loop.attribute("body"), loop.attribute("condition")) == ("region", "test")
    assert (out.kind, out.attribute("index"), out.operands) == ("get-tuple-element", "1", ("loop",))
    assert hlo.parse(TEXT).computations["region"][1].operands == ("a", "b")
    with pytest.raises(LookupError, match="no calls"):
        loop.attribute("calls")


def test_arrays_have_sizes():
    assert hlo.arrays("(s32[], bf16[2,3]{1,0})") == [(np.int32, ()), (ml_dtypes.bfloat16, (2, 3))]
    assert hlo.size("(s32[], bf16[2,3]{1,0}, pred[5])") == 4 + 12 + 5
    with pytest.raises(KeyError):
        hlo.size("c128[2]")


@pytest.mark.parametrize(
    ("line", "value"),
    [
        ("%c = u32[1,2]{1,0} constant({ { 3876335077, 7 } })", np.array([[3876335077, 7]], np.uint32)),
        ("%c = s8[3]{0} constant({-1, 0, 127})", np.array([-1, 0, 127], np.int8)),
        ("%c = f32[4]{0} constant({0.1, -inf, 1e-45, nan})", np.float32([0.1, -np.inf, 1e-45, np.nan])),
        ("%c = bf16[2]{0} constant({1, -0.5})", np.array([1, -0.5], ml_dtypes.bfloat16)),
        ("%c = pred[2]{0} constant({true, false})", np.array([1, 0], np.uint8)),
    ],
)
def test_constants_have_their_bits(line, value):
    text = TEXT.replace("  %c = u32[1,2]{1,0} constant({ { 3876335077, 7 } })", f"  {line}")
    constant = hlo.constant(hlo.parse(text).computations["main.7"][1])
    assert constant.dtype == value.dtype
    assert constant.tobytes() == value.tobytes()


def test_a_constant_that_is_cut_short_is_refused():
    text = TEXT.replace("constant({ { 3876335077, 7 } })", "constant({...})")
    with pytest.raises(ValueError, match="cut short"):
        hlo.constant(hlo.parse(text).computations["main.7"][1])

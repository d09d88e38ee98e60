"""The comparison sees what it is for: steps compiled without one of our options differ, and ptxas fuses."""

import pytest
from gpu_programs import faults, machine_code

from gpu_bits.comparison import differences
from gpu_bits.steps import SMALL, case
from gpu_bits.triton_backend import TritonBackend
from halfstep_torch.engine import compiled_stage
from ptx.approximations import Approximations

STEP = "AdamW, float32; float32, float32 weights"


def without(monkeypatch, option: str) -> tuple[int, str]:
    """Return how many numbers of a step differ without an option of Inductor, and its PTX."""
    of_device = compiled_stage.compile_options

    def some(device):
        return {name: value for name, value in of_device(device).items() if name != option}

    monkeypatch.setattr(compiled_stage, "compile_options", some)
    backend, question = TritonBackend(), case(STEP, SMALL, 2)
    backend.approximations = Approximations("random")
    with backend.kernels.as_on_gpu():
        found = differences(question, backend.run(question))
    return sum(found.values()), "".join(backend.kernels.texts.values())


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize(
    ("option", "fault"),
    [("emulate_precision_casts", "fma"), ("eager_numerics.division_rounding", "approximate")],
)
def test_an_option_left_out_is_seen(monkeypatch, option, fault):
    differing, text = without(monkeypatch, option)
    assert differing > 100
    assert faults(text)[fault]


@pytest.mark.filterwarnings("ignore")
def test_triton_flushes_nothing_even_without_the_option_that_says_so(monkeypatch):
    assert ".ftz" not in without(monkeypatch, "eager_numerics.disable_ftz")[1]


def assembled(product: str, total: str) -> str:
    return f"""
.version 8.8
.target sm_90a
.address_size 64
.visible .entry k(.param .u64 .ptr .global .align 16 out) {{
    .reg .b32 %r<8>; .reg .b64 %rd<2>;
    ld.param.b64 %rd1, [out];
    ld.global.v4.b32 {{%r1, %r2, %r3, %r4}}, [%rd1];
    {product} %r5, %r1, %r2;
    {total} %r6, %r5, %r3;
    div.rn.f32 %r7, %r6, %r4;
    st.global.b32 [%rd1], %r7;
    ret;
}}
"""


@pytest.mark.parametrize(
    ("product", "total", "fused"),
    [("mul.f32", "add.f32", 1), ("mul.rn.f32", "add.rn.f32", 0), ("mul.rn.f32", "add.f32", 0)],
)
def test_ptxas_fuses_what_does_not_say_how_it_is_rounded_and_that_is_seen(product, total, fused):
    text = assembled(product, total)
    code = machine_code(text)
    assert code
    assert code.fused == fused
    bare = [name for name in (product, total) if ".rn" not in name]
    assert faults(text).get("may be fused", 0) == len(bare)

"""The comparison sees what it is for: steps compiled without one of our options differ, and ptxas fuses."""

import compiled_torch
import pytest
from programs import faults, machine_code

from gpu_bits import triton_launches
from gpu_bits.comparison import differences
from gpu_bits.steps import SMALL, case
from gpu_bits.triton_backend import TritonBackend
from halfstep_torch.engine.kernels import triton_kernel
from ptx.approximations import Approximations

STEP = "AdamW, float32; float32, float32 weights"


def changed(monkeypatch, old: str, new: str, **options) -> tuple[int, str]:
    """Return how many numbers of a step differ with another text of its kernel, and its PTX."""
    generate = compiled_torch.triton_source
    monkeypatch.setattr(
        compiled_torch,
        "triton_source",
        lambda graph: generate(graph).replace(old, new) if old else generate(graph),
    )
    monkeypatch.setattr(triton_kernel, "OPTIONS", {**triton_kernel.OPTIONS, **options})
    triton_launches._compiled.cache_clear()
    backend, question = TritonBackend(), case(STEP, SMALL, 2)
    backend.approximations = Approximations("random")
    with backend.kernels.as_on_gpu():
        found = differences(question, backend.run(question))
    triton_launches._compiled.cache_clear()
    return sum(found.values()), "".join(backend.kernels.texts.values())


@pytest.mark.filterwarnings("ignore")
def test_a_quotient_that_is_not_rounded_correctly_is_seen(monkeypatch):
    differing, text = changed(monkeypatch, "tl.div_rn(x, y)", "x / y")
    assert differing > 100
    assert faults(text)["approximate"]


@pytest.mark.filterwarnings("ignore")
def test_products_that_are_fused_are_seen(monkeypatch):
    differing, text = changed(monkeypatch, "", "", enable_fp_fusion=True)
    assert differing > 100
    assert faults(text)["fma"]


@pytest.mark.filterwarnings("ignore")
def test_triton_flushes_nothing(monkeypatch):
    assert ".ftz" not in changed(monkeypatch, "", "")[1]


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

"""The count behind `make compiled`, on programs small enough to count by hand."""

import pathlib
import runpy

import jax
import jax.numpy as jnp
import pytest

PATH = pathlib.Path(__file__).parents[1] / "benchmarks" / "programs.py"


@pytest.fixture(scope="module")
def hbm_traffic():
    return runpy.run_path(str(PATH))["hbm_traffic"]


_FUSED = "%fused (p: f32[8]) -> f32[8] {\n  ROOT %x = f32[8]{0} add(%p, %p)\n}\n"


def program(*operations: str) -> str:
    return "\n".join([_FUSED, "ENTRY %main {", *(f"  {operation}" for operation in operations), "}"])


def test_operands_and_results_count_once_each(hbm_traffic):
    text = program(
        "%a = bf16[4,8]{1,0} parameter(0)",
        "%b = f32[4,8]{1,0} parameter(1)",
        '%c = (f32[4,8]{1,0}, u8[4]{0}) fusion(%a, %b), kind=kLoop, calls=%fused, metadata={op_name="f(%a)"}',
        "%d = f32[4,8]{1,0} get-tuple-element(%c), index=0",
        "ROOT %e = (f32[4,8]{1,0}) tuple(%d)",
    )
    assert hbm_traffic(text) == 32 * 2 + 32 * 4 + (32 * 4 + 4)


def test_what_is_in_on_chip_memory_is_free(hbm_traffic):
    text = program(
        "%a = f32[64]{0:T(64)} parameter(0)",
        "%s = (f32[64]{0:T(64)S(1)}, f32[64]{0:T(64)}, u32[]{:S(2)}) copy-start(%a)",
        "%b = f32[64]{0:T(64)S(1)} copy-done(%s)",
        "ROOT %c = f32[64]{0:T(64)} negate(%b)",
    )
    assert hbm_traffic(text) == 64 * 4 + 64 * 4


def test_a_program_that_is_compiled_here_moves_what_it_must(hbm_traffic):
    x = jnp.zeros(1024)
    text = jax.jit(lambda x: x * 2 + 1).lower(x).compile().as_text()
    assert hbm_traffic(text) == 2 * 4 * 1024

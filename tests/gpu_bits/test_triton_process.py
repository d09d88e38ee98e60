"""Kernels that processes compile at once are those that launches look for in Triton's cache."""

import pytest
import torch
import triton

from halfstep.kernels.simplify import simplified
from halfstep.kernels.triton_process import StandIn, compile_at_once, module_of
from halfstep_torch.engine.kernels import triton_kernel
from halfstep_torch.engine.kernels.trace import trace
from on_torch.graph_values import stages_of
from on_torch.kernel_steps import MAKES

TARGET = ("cuda", 90, 32)


@pytest.fixture
def cache(monkeypatch, tmp_path):
    """Triton's cache, where a device of the target is active."""
    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path))
    triton.runtime.driver.set_active(StandIn(TARGET))
    return tmp_path


def made(name: str) -> triton_kernel.TritonKernel:
    p = torch.nn.Parameter(torch.zeros(64, 1024, dtype=torch.bfloat16))
    p.grad = torch.zeros_like(p)
    ((stage, places, _, incoming),) = stages_of(MAKES[name]([("w", p)], compile=False))
    graph = simplified(trace(triton_kernel.in_powers_of_two(stage), places, incoming))
    return triton_kernel.TritonKernel(graph, stage, torch.device("cpu"))


def launch(kernel: triton_kernel.TritonKernel) -> None:
    """Compile a kernel as its first launch does, given the tables of that."""
    dtypes = (torch.int32, torch.int64, torch.int32)
    tables = [*(torch.zeros(64, dtype=dtype) for dtype in dtypes), *kernel._codebooks]
    options = kernel._sizes | triton_kernel.OPTIONS
    kernel._module.step.warmup(*tables, triton_kernel.CHUNK, grid=(1,), **options)


def test_a_launch_finds_the_kernels_that_processes_have_compiled(cache):
    kernels = [made(name) for name in ("nearest", "tables")]
    compile_at_once([kernel.request(TARGET) for kernel in kernels])
    kept = {*cache.rglob("*")}
    assert len([path for path in kept if path.name.endswith(".cubin")]) == 2
    assert len([*cache.glob("halfstep_*")]) == 2
    for kernel in kernels:
        launch(kernel)
    assert {*cache.rglob("*")} == kept
    # Nothing is compiled twice, and one kernel alone needs no process.
    compile_at_once([None, made("Lion").request(TARGET), *(kernel.request(TARGET) for kernel in kernels)])
    assert {*cache.rglob("*")} == kept


def test_a_process_that_fails_leaves_its_kernel_to_the_launch(cache):
    request = made("nearest").request(TARGET)
    broken = request._replace(text=request.text + "\nraise ValueError")
    compile_at_once([request, broken])
    assert len([*cache.glob("halfstep_*")]) == 1
    with pytest.raises(ValueError, match=r"^$"):
        module_of(broken.text)

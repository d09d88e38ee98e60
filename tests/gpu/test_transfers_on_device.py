"""A warm step asks a device for nothing: the host goes on while kernels run."""

import pytest
import torch

import halfstep_torch as hs


@pytest.mark.filterwarnings("ignore:Synchronization debug mode is a prototype:UserWarning")
@pytest.mark.parametrize("compile", [False, True])
def test_a_warm_step_waits_for_nothing(device, compile):
    params = [torch.nn.Parameter(torch.ones(shape, device=device).bfloat16()) for shape in ((64, 64), (7,))]
    optimizer = hs.AdamW([(f"w{i}", p) for i, p in enumerate(params)], compile=compile)
    for p in params:
        p.grad = torch.ones_like(p)
    for _ in range(3):
        optimizer.step()
    if device == "cpu":
        return
    torch.cuda.synchronize()
    torch.cuda.set_sync_debug_mode("error")
    try:
        optimizer.step()
    finally:
        torch.cuda.set_sync_debug_mode("default")

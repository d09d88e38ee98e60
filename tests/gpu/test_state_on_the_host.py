"""State in pinned memory, which a device reads over the bus: the bits of state beside the weights."""

import functools

import pytest
import torch
import torch.distributed as dist
from torch.distributed.tensor import DTensor, Shard, init_device_mesh

import halfstep_torch as hs
from halfstep_torch.sharded import host_state

SHAPES = [(512, 1024), (300, 64), (9000,), (7,), ()]
MAKES = {
    "default": hs.AdamW,
    "eight bits": functools.partial(hs.AdamW, **hs.recipes.eight_bit),
    "master": functools.partial(hs.AdamW, param_storage="master"),
}


@pytest.fixture(params=["plain", "shards"])
def place(request, device, tmp_path):
    """What makes a parameter of a tensor: itself, or a shard over one process."""
    if request.param == "plain":
        yield lambda x: x
        return
    backend = "gloo" if device == "cpu" else "nccl"
    if device != "cpu":  # else a mesh warns that it chooses one
        torch.accelerator.set_device_index(0)
        torch.empty(0, device=device)
    dist.init_process_group(backend, init_method=f"file://{tmp_path / 'store'}", rank=0, world_size=1)
    try:
        mesh = init_device_mesh(device, (1,))
        yield lambda x: DTensor.from_local(x, mesh, [Shard(0)] if x.dim() else None, run_check=False)
    finally:  # an error here must not be one of the tests that follow
        dist.destroy_process_group()


def here(x: torch.Tensor) -> torch.Tensor:
    return x.to_local() if isinstance(x, DTensor) else x


@pytest.mark.parametrize("compile", [False, True], ids=["plain", "kernels"])
@pytest.mark.parametrize("make", MAKES.values(), ids=MAKES)
def test_state_on_the_host_has_the_bits_of_state_on_the_device(make, compile, place, device, monkeypatch):
    if device == "cpu":  # the same code, with one memory for the other
        monkeypatch.setattr(host_state, "is_away", lambda device: True)
    runs = []
    for options in ({}, {"state_device": "cpu"}):
        generator = torch.Generator().manual_seed(0)
        params = [
            torch.nn.Parameter(place(torch.randn(s, generator=generator).to(device).bfloat16()))
            for s in SHAPES
        ]
        ours = make([(f"w{i}", p) for i, p in enumerate(params)], compile=compile, **options)
        for _ in range(4):
            for p in params:
                p.grad = place(torch.randn(p.shape, generator=generator).to(device).bfloat16())
            ours.step()
        runs.append((params, [ours.state[p] for p in params]))
    (params, states), (others, on_host) = runs
    for p, q in zip(params, others, strict=True):
        assert torch.equal(here(p).view(torch.int16), here(q).view(torch.int16))
    for state, kept in zip(states, on_host, strict=True):
        for key, array in kept.items():
            x, expected = here(array), here(state[key]).cpu()
            assert x.device.type == "cpu"
            assert key == "step" or x.is_pinned() == (device != "cpu")
            assert torch.equal(
                x.view(torch.uint8) if x.dim() else x, expected.view(torch.uint8) if x.dim() else expected
            )

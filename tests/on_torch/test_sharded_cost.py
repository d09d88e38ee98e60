"""What a step of shards costs: the memory that it takes, and the kernels that it builds."""

import functools
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch.distributed.tensor import Shard, init_device_mesh

import halfstep_torch as hs
from halfstep_torch.engine.kernels.kernel import kernel_of
from on_torch.processes import in_fresh_processes, in_processes
from on_torch.sharded import RECIPES, shard

# A border between columns cuts blocks: 1000 is no multiple of 32 or 128.
SHAPE = (1024, 2000)
ELEMENTS = SHAPE[0] * SHAPE[1]
Make = Callable[..., hs.Optimizer]
ELEMENTWISE: dict[str, Make] = {
    name: functools.partial(hs.AdamW, **RECIPES[name]) for name in ("default", "split16", "float8", "units")
}


def clipped(params, **options) -> hs.Optimizer:
    tx = hs.chain(
        hs.clip_by_global_norm(1.0, exact=True), hs.scale_by_adam(), hs.scale_by_learning_rate(1e-3)
    )
    return hs.Optimizer(params, tx, **options)


def largest_array(function: Callable[[], Any]) -> int:
    """Return the bytes of the largest memory that a function allocates at once."""
    activities = [torch.profiler.ProfilerActivity.CPU]
    with torch.profiler.profile(activities=activities, profile_memory=True) as profile:
        function()
    events = profile.profiler.kineto_results.events()
    return max(event.nbytes() for event in events if event.name() == "[memory]")


def no_array_of_the_global_size_is_made(rank: int) -> None:
    """Not in the first step, which makes state, and not in the second one.

    A process has half of the elements: in float32 as many bytes as all have in 16 bits. So weights, gradients
    and state whose whole arrays are to be told from it are in float32.
    """
    mesh = init_device_mesh("cpu", (torch.distributed.get_world_size(),))

    def steps(make: Make, axis: int, dtype: torch.dtype) -> list[int]:
        w = torch.nn.Parameter(shard(torch.ones(SHAPE, dtype=dtype), mesh, [Shard(axis)]))
        w.grad = shard(torch.ones(SHAPE, dtype=dtype), mesh, [Shard(axis)])
        optimizer = make([("w", w)], compile=False)
        return [largest_array(optimizer.step) for _ in range(2)]

    for name, make in ELEMENTWISE.items():
        # A border between columns cuts blocks, and such a weight is gathered.
        for axis in (0,) if name in ("float8", "units") else (0, 1):
            first, second = steps(make, axis, torch.bfloat16)
            assert first <= ELEMENTS // 2 * 4, name
            assert second < ELEMENTS, f"{name}, {axis}: as much as all elements in a byte each"
    for axis in (0, 1):
        for make in (functools.partial(hs.Lamb, exact=True), clipped):
            # An exact norm has the bits of what is here, and a LAMB step its update, in 32 bits.
            assert max(steps(make, axis, torch.float32)) <= ELEMENTS // 2 * 4


def ten_odd_shards_share_the_kernel_of_the_first_step(rank: int) -> None:
    mesh, make = init_device_mesh("cpu", (2,)), functools.partial(hs.AdamW, compile=True)
    shapes = [(2 * n + 1, 3 * n + 5) for n in range(9)] + [(301, 703)]
    params = [
        torch.nn.Parameter(shard(torch.ones(s).bfloat16(), mesh, [Shard(n % 2)]))
        for n, s in enumerate(shapes)
    ]
    optimizer, before = make([(f"w{i}", p) for i, p in enumerate(params)]), kernel_of.cache_info().misses
    for step in range(3):
        for p in params:
            p.grad = torch.full_like(p, step + 1.0)
        optimizer.step()
        assert kernel_of.cache_info().misses - before == 1


@pytest.mark.slow
def test_a_step_of_shards_takes_the_memory_of_shards():
    in_processes(2, no_array_of_the_global_size_is_made)


@pytest.mark.slow
def test_odd_shards_compile_once():
    # A process that stays has kernels of other tests.
    in_fresh_processes(2, ten_odd_shards_share_the_kernel_of_the_first_step)

"""A step of shards is built once and run again too; what makes it stale is noticed in every process."""

import functools
import sys
from typing import Any

import pytest
import torch
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard

import halfstep_torch as hs
from on_torch.processes import in_processes
from on_torch.sharded import RECIPES, Run, assert_same_bits, layouts, same_bits, shard

MAKES = {
    "rows": functools.partial(hs.AdamW, compile=False),
    "cut blocks": functools.partial(hs.AdamW, compile=False, **RECIPES["units"]),
    "norms": functools.partial(hs.Lamb, compile=False),
    "whole updates": functools.partial(hs.Muon, compile=False),
}


def a_step_that_is_run_again_has_the_bits_of_one_process(rank: int) -> None:
    for name, make in MAKES.items():
        expected = Run(make).steps(1, 3)
        for layout, _, place in layouts():
            run = Run(make, place).steps(1, 2)
            launch = run.optimizer._launches[None]
            assert_same_bits(run.steps(3, 3), expected, f"{name}, {layout}")
            assert run.optimizer._launches[None] is launch, f"{name}, {layout}"
            assert launch._key is not None


def swap_memory(param: Any, _: hs.Optimizer) -> None:
    """Have the shard elsewhere in memory, as `to_empty` and `load_state_dict(assign=True)` do."""
    param._local_tensor.data = param._local_tensor.clone()


def give_summands(param: Any, _: hs.Optimizer) -> None:
    """Have a gradient of which every process has a summand, as under sequence parallelism."""
    local = param.grad.to_local()
    param.grad = DTensor.from_local(local.clone(), param.device_mesh, [Partial()], run_check=False)


def swap_state(param: Any, optimizer: hs.Optimizer) -> None:
    array: Any = optimizer.state[param]["exp_avg"]
    local = array.to_local()
    local.data = local.clone()


def what_is_another_than_before_is_stepped_as_it_is(rank: int) -> None:
    mesh = init_device_mesh("cpu", (2,))
    for change in (swap_memory, give_summands, swap_state):
        outcomes = []
        for built_anew in (False, True):
            param = torch.nn.Parameter(shard(torch.ones(8, 300).bfloat16(), mesh, [Replicate()]))
            optimizer = hs.AdamW([("w", param)], lr=1e-2, compile=False)
            for step in range(4):
                param.grad = shard(torch.full((8, 300), 1.0 + step).bfloat16(), mesh, [Replicate()])
                launch = optimizer._launches.get(None)
                if step == 2:
                    with torch.no_grad():  # in which `to_local` is the memory itself
                        change(param, optimizer)
                if built_anew:
                    optimizer._launches.clear()
                optimizer.step()
                if not built_anew and step:
                    again = optimizer._launches[None] is launch
                    assert again == (step == 1 or (step == 3 and change is not give_summands)), change
            here: Any = param.detach()
            outcomes.append(here.to_local().clone())
        assert same_bits(*outcomes), change


def parameters_in_one_process_and_in_all_are_stepped_together(rank: int) -> None:
    """Those that `fully_shard` ignores stay plain, whichever comes first."""
    mesh, whole = init_device_mesh("cpu", (2,)), torch.linspace(-1, 1, 64).view(8, 8).bfloat16()
    for order in ("plain first", "sharded first"):
        params, expected = {}, {}
        for name in ("a", "b"):
            is_plain = (name == "a") == (order == "plain first")
            place = (
                (lambda x: x.clone())
                if is_plain
                else functools.partial(shard, mesh=mesh, placements=[Shard(0)])
            )
            params[name] = torch.nn.Parameter(place(whole))
            expected[name] = torch.nn.Parameter(whole.clone())
            params[name].grad, expected[name].grad = place(whole), whole.clone()
        for some in (params, expected):
            optimizer = hs.AdamW(list(some.items()), lr=1e-2, compile=False)
            for _ in range(3):
                optimizer.step()
        for name, param in params.items():
            here: Any = param.detach()
            whole_param = here.full_tensor() if isinstance(here, DTensor) else here
            assert same_bits(whole_param, expected[name]), (order, name)


def a_warm_step_of_shards_calls_few_functions(rank: int) -> None:
    mesh, made = init_device_mesh("cpu", (2,)), {}
    for count in (20, 40):
        params = [
            torch.nn.Parameter(shard(torch.ones(8, 8).bfloat16(), mesh, [Shard(0)])) for _ in range(count)
        ]
        optimizer = hs.AdamW([(f"w{i}", p) for i, p in enumerate(params)], compile=True)
        for param in params:
            param.grad = torch.ones_like(param)
        for _ in range(3):
            optimizer.step()
        made[count] = 0

        def profile(frame, event, _, count=count):
            made[count] += event == "call" and "halfstep_torch" in frame.f_code.co_filename

        sys.setprofile(profile)
        try:
            optimizer.step()
        finally:
            sys.setprofile(None)
    # Of a parameter, its gradient and two arrays the part that is here, and how the first two are placed.
    assert made[40] - made[20] <= 20 * 15


@pytest.mark.slow
def test_a_step_of_shards_that_is_run_again_has_the_bits_of_one_process():
    in_processes(2, a_step_that_is_run_again_has_the_bits_of_one_process)


def test_a_step_of_shards_is_built_once():
    in_processes(
        2,
        what_is_another_than_before_is_stepped_as_it_is,
        parameters_in_one_process_and_in_all_are_stepped_together,
        a_warm_step_of_shards_calls_few_functions,
    )

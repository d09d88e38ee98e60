"""What cannot be stepped where parameters are DTensors: every process says so, and nothing changes."""

import re
import unittest.mock

import pytest
import torch
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, Partial, Shard, init_device_mesh
from torch.distributed.tensor.placement_types import _StridedShard

import halfstep_torch as hs
from halfstep_torch.sharded import agreement
from on_torch.processes import in_processes
from on_torch.sharded import counted, shard
from on_torch.steps import step_by_ones


def what_cannot_be_stepped_is_refused_by_name(rank: int) -> None:
    count = torch.distributed.get_world_size()
    mesh, zeros = init_device_mesh("cpu", (count,)), torch.zeros(8, 8)
    partial = DTensor.from_local(zeros, mesh, [Partial()], run_check=False)
    uneven = DTensor.from_local(
        zeros[:3], mesh, [Shard(0)], run_check=False, shape=zeros.shape, stride=(8, 1)
    )
    strided = DTensor.from_local(zeros, mesh, [_StridedShard(0, split_factor=2)], run_check=False)
    for placed, message in (
        (partial, "holds a summand of it"),
        (strided, "without the Shard of the same axis"),
        (uneven, r"of shape \(8, 8\) has the shape \(3, 8\) here, where its placements .* say \(4, 8\)"),
    ):
        with pytest.raises(ValueError, match=message):
            hs.AdamW([("w", torch.nn.Parameter(placed))])
    plain, sharded = torch.nn.Parameter(zeros.clone()), torch.nn.Parameter(shard(zeros, mesh, [Shard(0)]))
    optimizer = hs.AdamW([("plain", plain)])
    step_by_ones(optimizer)
    before = plain.detach().clone()
    plain.grad = shard(zeros, mesh, [Shard(0)])
    words = f"the weight 'plain' is a plain tensor, its gradient a DTensor over a mesh of shape ({count},)"
    with pytest.raises(TypeError, match=re.escape(words)):
        optimizer.step()
    plain.grad = torch.ones_like(plain)
    optimizer.state[plain]["exp_avg"] = shard(zeros, mesh, [Shard(0)])
    with pytest.raises(TypeError, match=r"exp_avg of 'plain' is a DTensor .*, and would be a plain tensor"):
        optimizer.step()
    assert torch.equal(plain, before)
    optimizer = hs.AdamW([("w", sharded)])
    sharded.grad = shard(zeros, mesh, [Shard(0)])
    optimizer.step()
    optimizer.state[sharded]["exp_avg"] = zeros
    with pytest.raises(TypeError, match=r"exp_avg of 'w' is a plain tensor, and would be a DTensor"):
        optimizer.step()


def processes_that_disagree_are_all_told_of_it(rank: int) -> None:
    count = torch.distributed.get_world_size()
    mesh, ones = init_device_mesh("cpu", (count,)), torch.ones(8, 8, dtype=torch.bfloat16)
    cases = {
        "seeds": {"seed": rank},
        "numbers of the param groups": {"lr": 1e-3 * (1 + rank), "weight_decay": 0.1 * rank},
        "formats of the state": {"nu_dtype": ["bfloat16", "float32"][rank % 2]},
        "parameters with gradients": {},
    }
    for what, options in cases.items():
        params = {name: torch.nn.Parameter(shard(ones, mesh, [Shard(0)])) for name in "ab"}
        optimizer = hs.AdamW(list(params.items()), **options)
        params["a"].grad = shard(ones, mesh, [Shard(0)])
        if what != "parameters with gradients" or rank:
            params["b"].grad = shard(ones, mesh, [Shard(0)])
        with pytest.raises(RuntimeError, match=f"they differ in the {what}. Process {rank} has") as raised:
            optimizer.step()
        if what == "numbers of the param groups":
            numbers = f'{{"lr of group 0": "{1e-3 * (1 + rank)}", "weight_decay of group 0": "{0.1 * rank}"}}'
            assert f" has {numbers}. Give all" in str(raised.value)
        assert all((p.to_local() == 1).all() for p in params.values())


def processes_that_drift_apart_later_are_told_of_it(rank: int) -> None:
    """A learning rate, or a missing gradient, of one process, at a step without an exchange."""
    mesh = init_device_mesh("cpu", (torch.distributed.get_world_size(),))
    ones = torch.ones(8, 8, dtype=torch.bfloat16)
    for what in ("steps", "numbers of the param groups"):
        params = {name: torch.nn.Parameter(shard(ones, mesh, [Shard(0)])) for name in "ab"}
        optimizer = hs.AdamW(list(params.items()), compile=False)
        with unittest.mock.patch.object(agreement, "_EVERY", 3), counted() as calls:
            for step in range(1, 4):
                for name, param in params.items():
                    param.grad = shard(ones, mesh, [Shard(0)])
                    if (step, name, what) == (2, "b", "steps") and rank == 1:
                        param.grad = None
                if what != "steps":
                    optimizer.param_groups[0]["lr"] = 1e-3 * (1 + rank * (step > 1))
                before = [param.to_local().clone() for param in params.values()]
                calls.clear()
                if step < 3:
                    optimizer.step()
                    assert bool(calls) == (step == 1)
                    continue
                with pytest.raises(RuntimeError, match=f"they differ in the {what}. Process {rank} has"):
                    optimizer.step()
                pairs = zip(params.values(), before, strict=True)
                assert all(torch.equal(param.to_local(), x) for param, x in pairs)


def an_error_in_one_process_is_one_in_all(rank: int) -> None:
    """At the first step, and at later ones in which processes wait for each other."""
    mesh = init_device_mesh("cpu", (torch.distributed.get_world_size(),))
    ones = torch.ones(8, 100, dtype=torch.bfloat16)
    # The border between the columns of two processes cuts a block.
    param = torch.nn.Parameter(shard(ones, mesh, [Shard(1)]))
    optimizer = hs.AdamW([("w", param)], mu_dtype=hs.scaled("int8", block_size=64, min_size=0), compile=False)
    for step in range(4):
        param.grad = shard(ones, mesh, [Shard(1)])
        before = param.detach().to_local().clone()
        if step % 2 == 1:
            optimizer.step()
            continue
        if rank == 0:
            optimizer.param_groups[0]["eps"] = -1.0
        error, message = (ValueError, "eps") if rank == 0 else (RuntimeError, "another process of the mesh")
        with pytest.raises(error, match=message):
            optimizer.step()
        assert torch.equal(param.to_local(), before)
        optimizer.param_groups[0]["eps"] = 1e-8
    assert int(optimizer.state[param]["step"]) == 2


def a_mesh_that_changed_beside_its_state_is_refused(rank: int) -> None:
    mesh, ones = init_device_mesh("cpu", (torch.distributed.get_world_size(),)), torch.ones(8, 8)
    params = [torch.nn.Parameter(shard(ones, mesh, [Shard(axis)])) for axis in (0, 1)]
    optimizer = hs.AdamW([("w", params[0])])
    params[0].grad = torch.ones_like(params[0])
    optimizer.step()
    optimizer.param_groups[0]["params"] = params[1:]
    optimizer.state[params[1]] = optimizer.state.pop(params[0])
    params[1].grad = torch.ones_like(params[1])
    with pytest.raises((TypeError, ValueError), match=r"exp_avg of 'w' is a DTensor .*0.*, and would be .*1"):
        optimizer.step()
    assert (params[1].to_local() == 1).all()


def a_group_that_is_gone_is_missed_before_anything_changes(rank: int) -> None:
    """Where processes exchange anything; other steps go on."""
    mesh = init_device_mesh("cpu", (torch.distributed.get_world_size(),))
    for shape, axis in (((8, 256), 0), ((4, 200), 1)):
        param = torch.nn.Parameter(shard(torch.ones(shape, dtype=torch.bfloat16), mesh, [Shard(axis)]))
        optimizer = hs.AdamW([("w", param)], mu_dtype=hs.scaled("int8", 128, min_size=0), compile=False)
        step_by_ones(optimizer)
        with unittest.mock.patch.object(type(mesh), "get_all_groups", side_effect=KeyError("gone")):
            before = param.to_local().clone()
            if axis:
                with pytest.raises(RuntimeError, match=r"process groups of the mesh of shape .* are gone"):
                    optimizer.step()
                assert torch.equal(param.to_local(), before)
            else:
                optimizer.step()
                assert not torch.equal(param.to_local(), before)


def functions_without_shards_refuse_them(rank: int) -> None:
    mesh = init_device_mesh("cpu", (torch.distributed.get_world_size(),))
    model = torch.nn.Linear(8, 8, bias=False, dtype=torch.bfloat16)
    fully_shard(model, mesh=mesh)
    (param,) = model.parameters()
    param.grad = shard(torch.ones(8, 8, dtype=torch.bfloat16), mesh, [Shard(0)])
    with pytest.raises(TypeError, match="is a DTensor, which it does not support"):
        hs.accumulate_gradients(model)


def test_two_processes_refuse_by_name_and_change_nothing():
    in_processes(
        2,
        what_cannot_be_stepped_is_refused_by_name,
        processes_that_disagree_are_all_told_of_it,
        processes_that_drift_apart_later_are_told_of_it,
        an_error_in_one_process_is_one_in_all,
        a_mesh_that_changed_beside_its_state_is_refused,
        a_group_that_is_gone_is_missed_before_anything_changes,
        functions_without_shards_refuse_them,
    )

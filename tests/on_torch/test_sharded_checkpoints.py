"""Checkpoints of sharded parameters: saved on one mesh, loaded on another, the same bits go on."""

import functools
import pathlib

import pytest
import torch
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_optimizer_state_dict,
    set_optimizer_state_dict,
)
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import Shard, init_device_mesh

import halfstep_torch as hs
from on_torch.processes import in_processes
from on_torch.sharded import RECIPES, Holder, Run, assert_same_bits, shard

# Of each recipe whether the optimizer's state dict is flattened.
CHECKED = {"default": True, "eight_bit": False, "four_bit": True, "split16": False, "float8": False}
SAVED, GOES_ON = 2, 2


def make(recipe: str):
    return functools.partial(hs.AdamW, lr=1e-2, weight_decay=0.1, compile=False, **RECIPES[recipe])


def place_along(axis: int):
    mesh = init_device_mesh("cpu", (torch.distributed.get_world_size(),))
    return lambda x: shard(x, mesh, [Shard(min(axis, x.dim() - 1))]) if x.dim() else x


def parts(run: Run, flattened: bool) -> dict:
    options = StateDictOptions(flatten_optimizer_state_dict=flattened)
    model = Holder(run)
    return {
        "model": model.state_dict(),
        "optimizer": get_optimizer_state_dict(model, run.optimizer, options=options),
    }


def save(rank: int, folder: str) -> None:
    for recipe, flattened in CHECKED.items():
        run = Run(make(recipe), place_along(0)).steps(1, SAVED)
        dcp.save(parts(run, flattened), checkpoint_id=f"{folder}/{recipe}")


def load_and_go_on(rank: int, folder: str, axis: int | None, after: int = 0) -> None:
    """Load into a fresh optimizer, or one that has made some steps; None is one process, without a mesh."""
    for recipe, flattened in CHECKED.items():
        expected = Run(make(recipe)).steps(1, SAVED + GOES_ON)
        run = Run(make(recipe), (lambda x: x) if axis is None else place_along(axis)).steps(1, after)
        state = parts(run, flattened)
        dcp.load(state, checkpoint_id=f"{folder}/{recipe}", no_dist=axis is None)
        options = StateDictOptions(flatten_optimizer_state_dict=flattened)
        set_optimizer_state_dict(Holder(run), run.optimizer, state["optimizer"], options=options)
        run.steps(SAVED + 1, SAVED + GOES_ON)
        assert_same_bits(run, expected, f"{recipe}, axis {axis}, after {after}")


def state_moves_without_a_checkpointer(rank: int, recipes=("eight_bit", "split16", "float8")) -> None:
    """By `state_dict` and `load_state_dict`: from one placement to another, from and to one process."""
    for recipe in recipes:
        expected = Run(make(recipe)).steps(1, SAVED + GOES_ON)
        sources = [Run(make(recipe)), Run(make(recipe), place_along(0)), Run(make(recipe), place_along(1))]
        for source in sources:
            source.steps(1, SAVED)
        for source in sources:
            for axis in (0, 1):
                run = Run(make(recipe), place_along(axis))
                for name, param in run.params.items():
                    weight = source.params[name].detach()
                    weight = weight.full_tensor() if hasattr(weight, "full_tensor") else weight
                    param.detach().copy_(place_along(axis)(weight))
                run.optimizer.load_state_dict(source.optimizer.state_dict())
                assert_same_bits(run.steps(SAVED + 1, SAVED + GOES_ON), expected, f"{recipe}, {axis}")


def full_state_dicts_go_on_in_one_process(rank: int) -> None:
    options = StateDictOptions(full_state_dict=True)
    for recipe in ("default", "eight_bit", "master", "split16", "float8"):
        torch.manual_seed(0)
        model, alone = (torch.nn.Linear(256, 40, dtype=torch.bfloat16) for _ in range(2))
        alone.load_state_dict(model.state_dict())
        fully_shard(model)
        optimizers = [make(recipe)(list(m.named_parameters())) for m in (model, alone)]
        backward(model, alone, optimizers[:1])
        saved = get_optimizer_state_dict(model, optimizers[0], options=options)
        set_optimizer_state_dict(alone, optimizers[1], saved)
        with torch.no_grad():
            for p, q in zip(model.parameters(), alone.parameters(), strict=True):
                q.copy_(p.full_tensor())
        backward(model, alone, optimizers)
        for p, q in zip(model.parameters(), alone.parameters(), strict=True):
            assert torch.equal(p.full_tensor(), q)


def backward(model, alone, optimizers) -> None:
    model(torch.ones(2, 256, dtype=torch.bfloat16)).square().sum().backward()
    for p, q in zip(model.parameters(), alone.parameters(), strict=True):
        q.grad = p.grad.full_tensor()
    for optimizer in optimizers:
        optimizer.step()


@pytest.mark.slow
# Said where one process loads, as it does here.
@pytest.mark.filterwarnings("ignore:torch.distributed is disabled:UserWarning")
def test_a_run_that_four_processes_saved_goes_on_in_two_in_one_and_along_another_axis(tmp_path: pathlib.Path):
    folder = str(tmp_path / "saved")
    in_processes(
        4, functools.partial(save, folder=folder), functools.partial(load_and_go_on, folder=folder, axis=1)
    )
    in_processes(
        2,
        functools.partial(load_and_go_on, folder=folder, axis=0, after=1),
        state_moves_without_a_checkpointer,
    )
    load_and_go_on(0, folder, None)


def test_state_moves_between_two_processes_and_one():
    in_processes(
        2,
        functools.partial(state_moves_without_a_checkpointer, recipes=("eight_bit",)),
        full_state_dicts_go_on_in_one_process,
    )


@pytest.mark.parametrize("schedule", [False, True])
def test_the_step_by_which_a_checkpointer_makes_state_is_none(schedule):
    """All rates 0, all gradients 0, no state: nothing would move, and nothing is counted."""
    p = torch.nn.Parameter(torch.ones(300, dtype=torch.bfloat16))
    optimizer = hs.AdamW([("w", p)], lr=(lambda count: 0.5) if schedule else 0.5)
    rate = optimizer.param_groups[0]["lr"]
    p.grad, optimizer.param_groups[0]["lr"] = torch.zeros_like(p), 0.0
    optimizer.step()
    assert int(optimizer.state[p]["step"]) == 0
    assert set(optimizer.state[p]) == {"step", "exp_avg", "exp_avg_sq"}
    optimizer.step()  # the second one finds state: it is a step
    assert int(optimizer.state[p]["step"]) == 1
    optimizer.param_groups[0]["lr"] = rate


@pytest.mark.parametrize(("rate", "grad"), [(0.0, 1.0), (0.5, 0.0)])
def test_a_step_that_may_move_something_counts(rate, grad):
    p = torch.nn.Parameter(torch.ones(300, dtype=torch.bfloat16))
    optimizer = hs.AdamW([("w", p)], lr=rate)
    p.grad = torch.full_like(p, grad)
    optimizer.step()
    assert int(optimizer.state[p]["step"]) == 1

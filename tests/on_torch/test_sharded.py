"""Parameters that are DTensors: the mesh changes no bit of a step."""

import functools
import re
import unittest.mock

import pytest
import torch
from torch.distributed.fsdp import CPUOffloadPolicy, MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard, init_device_mesh
from torch.distributed.tensor.placement_types import _StridedShard

import halfstep_torch as hs
from on_torch.processes import in_processes
from on_torch.sharded import (
    RECIPES,
    Run,
    assert_meshes_change_no_bit,
    assert_same_bits,
    counted,
    same_bits,
    shard,
)

STEPS = 2


def adamw(params, **options) -> hs.Optimizer:
    return hs.AdamW(params, lr=1e-2, weight_decay=0.1, **options)


def steps_have_the_bits_of_one_process(rank: int, recipes=tuple(RECIPES), compile: bool = False) -> None:
    for recipe in recipes:
        make = functools.partial(adamw, compile=compile, **RECIPES[recipe])
        assert_meshes_change_no_bit(make, STEPS, recipe)


class Net(torch.nn.Module):
    """Matrices, a norm, tied weights, a frozen parameter, and axes shorter than the mesh."""

    def __init__(self):
        super().__init__()
        self.embedding = torch.nn.Embedding(19, 24)
        self.layers = torch.nn.ModuleList(torch.nn.Linear(24, 24) for _ in range(2))
        self.norm = torch.nn.LayerNorm(24)
        self.head = torch.nn.Linear(24, 19, bias=False)
        self.head.weight = self.embedding.weight
        self.last = torch.nn.Linear(19, 3)
        self.layers[0].bias.requires_grad_(False)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        x = self.embedding(tokens)
        for layer in self.layers:
            x = torch.relu(layer(x))
        return self.last(self.head(self.norm(x)))


def net() -> Net:
    torch.manual_seed(0)
    return Net().to(torch.bfloat16)


def backward(model: torch.nn.Module, rank: int, step: int) -> None:
    tokens = torch.randint(0, 19, (4, 5), generator=torch.Generator().manual_seed(10 * step + rank))
    model(tokens).float().square().mean().backward()


def fully_sharded_models_train_as_one_process(rank: int) -> None:
    """The gradients are those of the processes together; given these, one process makes the same steps."""
    for options in (
        {},
        {"reshard_after_forward": False},
        {"mp_policy": MixedPrecisionPolicy(reduce_dtype=torch.float32)},
        {"offload_policy": CPUOffloadPolicy(pin_memory=False)},
    ):
        model, alone = net(), net()
        for layer in model.layers:
            fully_shard(layer, **options)
        fully_shard(model, **options)
        optimizers = [adamw(m.named_parameters(), **RECIPES["eight_bit"]) for m in (model, alone)]
        for step in range(STEPS):
            backward(model, rank, step)
            for p, q in zip(model.parameters(), alone.parameters(), strict=True):
                q.grad = None if p.grad is None else p.grad.full_tensor()
            for optimizer in optimizers:
                optimizer.step(zero_grad=True)
        for p, q in zip(model.parameters(), alone.parameters(), strict=True):
            assert isinstance(p, DTensor)
            assert same_bits(p.full_tensor(), q)


def a_model_made_without_memory_trains(rank: int) -> None:
    alone = net()
    with torch.device("meta"):
        model = Net().to(torch.bfloat16)
    fully_shard(model)
    optimizer = adamw(model.named_parameters())
    model.to_empty(device="cpu")
    with torch.no_grad():
        for p, q in zip(model.parameters(), alone.parameters(), strict=True):
            p.copy_(shard(q.detach(), p.device_mesh, p.placements))
    backward(model, rank, 0)
    for p, q in zip(model.parameters(), alone.parameters(), strict=True):
        q.grad = None if p.grad is None else p.grad.full_tensor()
    optimizer.step()
    adamw(alone.named_parameters()).step()
    assert all(
        same_bits(p.full_tensor(), q) for p, q in zip(model.parameters(), alone.parameters(), strict=True)
    )


def plain_and_sharded_parameters_step_in_one_group(rank: int) -> None:
    mesh = init_device_mesh("cpu", (torch.distributed.get_world_size(),))

    def place(x: torch.Tensor) -> torch.Tensor:
        return shard(x, mesh, [Shard(0)]) if x.dim() == 2 else x

    assert_same_bits(Run(adamw, place).steps(1, STEPS), Run(adamw).steps(1, STEPS), "mixed")


def partial_gradients_are_summed(rank: int) -> None:
    """As sequence parallelism leaves those of norms: every process has a summand.

    Of the cut weight the border is in a block: one process steps a piece, the other one a piece and a block.
    """
    count = torch.distributed.get_world_size()
    mesh = init_device_mesh("cpu", (count,))
    params = [torch.nn.Parameter(shard(torch.ones(n), mesh, [Replicate()])) for n in (5, 300)]
    params.append(torch.nn.Parameter(shard(torch.ones(4, 96 * count), mesh, [Shard(1)])))
    for p in params:
        summand = torch.full(p.shape, 2.0**rank)
        p.grad = DTensor.from_local(summand, mesh, [Partial()], run_check=False)
    links = hs.trace(0.5, accumulator_dtype=hs.scaled("int8", min_size=0)), hs.scale_by_learning_rate(1.0)
    hs.Optimizer(params, hs.chain(*links)).step()
    total = 2.0**count - 1
    assert all((p.to_local() == 1 - total).all() for p in params)


def what_cannot_be_stepped_is_refused_by_name(rank: int) -> None:
    count = torch.distributed.get_world_size()
    mesh, zeros = init_device_mesh("cpu", (count,)), torch.zeros(8, 8)
    partial = DTensor.from_local(zeros, mesh, [Partial()], run_check=False)
    strided = DTensor.from_local(zeros, mesh, [_StridedShard(0, split_factor=2)], run_check=False)
    for placed, message in (
        (partial, "holds a summand of it"),
        (strided, "without the Shard of the same axis"),
    ):
        with pytest.raises(ValueError, match=message):
            hs.AdamW([("w", torch.nn.Parameter(placed))])
    plain, sharded = torch.nn.Parameter(zeros.clone()), torch.nn.Parameter(shard(zeros, mesh, [Shard(0)]))
    optimizer = hs.AdamW([("plain", plain)])
    plain.grad = torch.ones_like(plain)
    optimizer.step()
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
        "numbers of the param groups": {"lr": 1e-3 * (1 + rank)},
        "formats of the state": {"nu_dtype": ["bfloat16", "float32"][rank % 2]},
        "parameters with gradients": {},
    }
    for what, options in cases.items():
        params = {name: torch.nn.Parameter(shard(ones, mesh, [Shard(0)])) for name in "ab"}
        optimizer = hs.AdamW(list(params.items()), **options)
        params["a"].grad = shard(ones, mesh, [Shard(0)])
        if what != "parameters with gradients" or rank:
            params["b"].grad = shard(ones, mesh, [Shard(0)])
        with pytest.raises(RuntimeError, match=f"they differ in the {what}. Process {rank} has"):
            optimizer.step()
        assert all((p.to_local() == 1).all() for p in params.values())


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


def cut_blocks_take_as_many_collectives_for_one_leaf_as_for_ten(rank: int) -> None:
    """Two to agree, one for the scales of pieces (two for units of each other), one for those of all."""
    mesh = init_device_mesh("cpu", (torch.distributed.get_world_size(),))
    for recipe, count in (("whole_rows", 4), ("units", 5)):
        for leaves in (1, 10):
            params = [
                torch.nn.Parameter(shard(torch.ones(4, 200, dtype=torch.bfloat16), mesh, [Shard(1)]))
                for _ in range(leaves)
            ]
            optimizer = hs.AdamW([(f"w{i}", p) for i, p in enumerate(params)], **RECIPES[recipe])
            for _ in range(2):
                for p in params:
                    p.grad = torch.ones_like(p)
                with counted() as calls:
                    optimizer.step()
            assert calls == ["all_reduce"] * count, recipe


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
        param.grad = torch.ones_like(param)
        optimizer.step()
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


@pytest.mark.slow
def test_the_mesh_changes_no_bit_of_two_processes():
    in_processes(
        2,
        steps_have_the_bits_of_one_process,
        fully_sharded_models_train_as_one_process,
        a_model_made_without_memory_trains,
        plain_and_sharded_parameters_step_in_one_group,
        partial_gradients_are_summed,
        what_cannot_be_stepped_is_refused_by_name,
        cut_blocks_take_as_many_collectives_for_one_leaf_as_for_ten,
        processes_that_disagree_are_all_told_of_it,
        an_error_in_one_process_is_one_in_all,
        a_mesh_that_changed_beside_its_state_is_refused,
        a_group_that_is_gone_is_missed_before_anything_changes,
        functions_without_shards_refuse_them,
    )


@pytest.mark.exhaustive
@pytest.mark.parametrize(
    ("count", "recipe"), [(2, "default"), (2, "eight_bit"), (4, "default"), (4, "eight_bit")]
)
def test_the_mesh_changes_no_bit_of_compiled_steps(count: int, recipe: str):
    in_processes(
        count,
        functools.partial(steps_have_the_bits_of_one_process, recipes=(recipe,), compile=True),
    )


@pytest.mark.slow
def test_the_mesh_changes_no_bit_of_four_processes():
    some = functools.partial(steps_have_the_bits_of_one_process, recipes=("default", "units", "float8"))
    in_processes(4, some)

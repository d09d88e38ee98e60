"""Parameters that are DTensors: the mesh changes no bit of a step."""

import functools

import pytest
import torch
from torch.distributed.fsdp import CPUOffloadPolicy, MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard, init_device_mesh
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    RowwiseParallel,
    SequenceParallel,
    parallelize_module,
)
from torch.distributed.tensor.placement_types import _StridedShard

import halfstep_torch as hs
from on_torch.processes import in_processes
from on_torch.sharded import RECIPES, Run, assert_meshes_change_no_bit, assert_same_bits, same_bits, shard

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
            # Gradients of the first batch wait for those of the second, as is recommended to accumulate them.
            model.set_requires_gradient_sync(False)
            backward(model, rank, 10 + step)
            assert all(p.grad is None for p in model.parameters())
            model.set_requires_gradient_sync(True)
            backward(model, rank, step)
            for p, q in zip(model.parameters(), alone.parameters(), strict=True):
                q.grad = None if p.grad is None else p.grad.full_tensor()
            for optimizer in optimizers:
                optimizer.step(zero_grad=True)
        for p, q in zip(model.parameters(), alone.parameters(), strict=True):
            assert isinstance(p, DTensor)
            assert same_bits(p.full_tensor(), q)


class Block(torch.nn.Module):
    """Matrices that tensor parallelism cuts along both axes, behind a norm that it does not."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.norm = torch.nn.LayerNorm(24)
        self.up, self.down = torch.nn.Linear(24, 300), torch.nn.Linear(300, 24)
        self.to(torch.bfloat16)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.down(torch.relu(self.up(self.norm(x))))


def tensor_parallel_models_train_as_one_process(rank: int) -> None:
    """Under `fully_shard`: both cut the rows of one matrix, and an axis each of the other one."""
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("data", "tensor"))
    plan = {
        "norm": SequenceParallel(),
        "up": ColwiseParallel(input_layouts=Shard(1)),
        "down": RowwiseParallel(output_layouts=Shard(1)),
    }
    for recipe in ("default", "units"):
        model, alone = Block(), Block()
        fully_shard(parallelize_module(model, mesh["tensor"], plan), mesh=mesh["data"])
        optimizers = [adamw(m.named_parameters(), compile=False, **RECIPES[recipe]) for m in (model, alone)]
        for step in range(STEPS):
            x = torch.randn(2, 6, 24, generator=torch.Generator().manual_seed(10 * step + rank))
            model(x.bfloat16()).float().square().mean().backward()
            for p, q in zip(model.parameters(), alone.parameters(), strict=True):
                q.grad = p.grad.full_tensor()
            for optimizer in optimizers:
                optimizer.step(zero_grad=True)
        assert isinstance(model.up.weight.placements[0], _StridedShard)
        for p, q in zip(model.parameters(), alone.parameters(), strict=True):
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

    The border of the cut weight is in a block, so that weight is gathered.
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


def test_the_mesh_changes_no_bit_of_two_processes():
    in_processes(
        2,
        steps_have_the_bits_of_one_process,
        fully_sharded_models_train_as_one_process,
        a_model_made_without_memory_trains,
        plain_and_sharded_parameters_step_in_one_group,
        partial_gradients_are_summed,
    )


@pytest.mark.exhaustive
@pytest.mark.parametrize(
    ("count", "recipe"), [(2, "default"), (2, "eight_bit"), (4, "default"), (4, "eight_bit")]
)
def test_the_mesh_changes_no_bit_of_compiled_steps(count: int, recipe: str):
    in_processes(
        count, functools.partial(steps_have_the_bits_of_one_process, recipes=(recipe,), compile=True)
    )


@pytest.mark.slow
def test_the_mesh_changes_no_bit_of_four_processes():
    some = functools.partial(steps_have_the_bits_of_one_process, recipes=("default", "units", "short_ends"))
    in_processes(4, some, tensor_parallel_models_train_as_one_process)

"""Two processes: what torch's distributed wrappers do to our optimizers, and what they leave of our hooks."""

import functools

import pytest
import torch
import torch.distributed as dist
from torch.distributed.checkpoint.state_dict import StateDictOptions, get_optimizer_state_dict
from torch.nn.parallel import DistributedDataParallel

import halfstep_torch as hs
from on_torch.processes import in_processes

PROCESSES = 2
_MICRO_BATCHES = 4


def net() -> torch.nn.Module:
    torch.manual_seed(0)
    return torch.nn.Sequential(torch.nn.Linear(8, 8), torch.nn.Linear(8, 4)).to(torch.bfloat16)


def loss(model: torch.nn.Module, step: int, rank: int) -> torch.Tensor:
    x = torch.randn(4, 8, generator=torch.Generator().manual_seed(10 * step + rank)).to(torch.bfloat16)
    return model(x).square().mean() / _MICRO_BATCHES


def weights(model: torch.nn.Module) -> torch.Tensor:
    return torch.cat([p.detach().float().reshape(-1) for p in model.parameters()])


def equal_everywhere(x: torch.Tensor) -> bool:
    found = [torch.empty_like(x) for _ in range(PROCESSES)]
    dist.all_gather(found, x)
    return all(torch.equal(x, one) for one in found)


def train(model, optimizer, rank: int, steps: int = 2) -> None:
    for step in range(steps):
        with model.no_sync():
            for i in range(_MICRO_BATCHES - 1):
                loss(model, 10 * step + i, rank).backward()
        loss(model, 10 * step + 9, rank).backward()
        assert equal_everywhere(torch.cat([p.grad.float().reshape(-1) for p in model.parameters()]))
        optimizer.step()
        optimizer.zero_grad()


def accumulate_under_ddp(rank: int) -> None:
    for view in (False, True):
        model = DistributedDataParallel(net(), gradient_as_bucket_view=view)
        optimizer = hs.AdamW(model.named_parameters(), lr=1e-2)
        handle = hs.accumulate_gradients(model, seed=rank)
        train(model, optimizer, rank)
        assert equal_everywhere(weights(model))
        assert set(handle.state_dict()["counts"].values()) == {2 * _MICRO_BATCHES}
        handle.remove()
        with pytest.raises(RuntimeError, match="2 processes train together"):
            hs.release_gradients(optimizer)


def zero_steps_as_one_process(rank: int) -> None:
    """Each process steps a share of the parameters; with `names` the words are those of the whole."""
    from torch.distributed.optim import ZeroRedundancyOptimizer  # which warns, as it is imported

    model, alone = DistributedDataParallel(net()), DistributedDataParallel(net())
    # ZeRO writes what it is given itself into param groups: what is no entry of a group goes past it.
    adamw = functools.partial(hs.AdamW, names=list(model.module.named_parameters()))
    shared = ZeroRedundancyOptimizer(model.parameters(), adamw, lr=1e-2, recipe="one_pass")
    train(model, shared, rank)
    train(alone, hs.AdamW(alone.named_parameters(), lr=1e-2, recipe="one_pass"), rank)
    assert equal_everywhere(weights(model))
    assert torch.equal(weights(model), weights(alone))
    shared.consolidate_state_dict(to=0)
    if rank == 0:
        plain = hs.AdamW(net().named_parameters(), lr=1e-2, recipe="one_pass")
        plain.load_state_dict(shared.state_dict())
        kept = [state["exp_avg"] for state in plain.state.values()]
        assert len(kept) == 4


def zero_resumes_every_form_of_state(rank: int) -> None:
    """ZeRO writes what it loads past `load_state_dict`: codes of two bytes come back, too."""
    from torch.distributed.optim import ZeroRedundancyOptimizer

    for options in (
        {"param_storage": "split16"},
        {"recipe": "four_bit"},
        {"mu_dtype": hs.scaled("float8_e4m3fn")},
    ):
        model, unbroken = DistributedDataParallel(net()), DistributedDataParallel(net())
        adamw = functools.partial(hs.AdamW, lr=1e-2, **options)
        shared = ZeroRedundancyOptimizer(model.parameters(), adamw)
        train(model, shared, rank)
        shared.consolidate_state_dict(to=0)
        saved = [shared.state_dict() if rank == 0 else None]
        torch.distributed.broadcast_object_list(saved)
        shared.load_state_dict(saved[0])
        other = ZeroRedundancyOptimizer(unbroken.parameters(), adamw)
        train(unbroken, other, rank)
        for wrapped, optimizer in ((model, shared), (unbroken, other)):
            train(wrapped, optimizer, rank)
        assert torch.equal(weights(model), weights(unbroken))


def bare_parameters_have_the_names_of_their_model(rank: int) -> None:
    """Under DistributedDataParallel, also a share of them by ZeRO; under FSDP2, which replaces them."""
    from torch.distributed.fsdp import fully_shard
    from torch.distributed.optim import ZeroRedundancyOptimizer

    names = [name for name, _ in net().named_parameters()]
    wrapped, cut = DistributedDataParallel(net()), fully_shard(net())
    for model in (wrapped, cut):
        optimizer = hs.AdamW(model.parameters(), lr=1e-2)
        assert optimizer.param_groups[0]["param_names"] == names
    share = ZeroRedundancyOptimizer(wrapped.parameters(), hs.AdamW, lr=1e-2).optim.param_groups[0]
    assert share["param_names"] == [name for name in share["param_names"] if name in names]


def dcp_reads_state_by_name(rank: int) -> None:
    model = DistributedDataParallel(net())
    optimizer = hs.AdamW(model.named_parameters(), lr=1e-2)
    train(model, optimizer, rank, steps=1)
    saved = get_optimizer_state_dict(model, optimizer, options=StateDictOptions(full_state_dict=True))
    if rank == 0:
        assert {"0.weight", "0.bias", "1.weight", "1.bias"} == saved["state"].keys()
        assert saved["state"]["0.weight"]["exp_avg"].dtype == torch.bfloat16


def test_two_processes_train_as_their_wrappers_promise():
    in_processes(
        PROCESSES,
        accumulate_under_ddp,
        zero_steps_as_one_process,
        zero_resumes_every_form_of_state,
        bare_parameters_have_the_names_of_their_model,
        dcp_reads_state_by_name,
    )

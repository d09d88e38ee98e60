"""Private names of torch: where one has moved, nothing fails, and no bit changes."""

import sys

import pytest
import torch

import halfstep_torch as hs
from halfstep_torch.distributed import replicas
from halfstep_torch.engine.kernels.kernel import kernel_of
from halfstep_torch.leaves.checks import LAST_STEP
from halfstep_torch.report import diagnosis
from halfstep_torch.say_once import say_once
from on_torch.steps import assert_same_snapshots, snapshot


@pytest.fixture
def fresh():
    """Forget compiled kernels, and what was said, before and after."""
    for forget in (kernel_of.cache_clear, say_once.cache_clear):
        forget()
    yield
    for forget in (kernel_of.cache_clear, say_once.cache_clear):
        forget()


class Without:
    """A module without one of its names, the rest as it is."""

    def __init__(self, module, name: str):
        self._module, (self._first, *self._rest) = module, name.split(".")

    def __getattr__(self, name: str):
        value = getattr(self._module, name)
        if name != self._first:
            return value
        if not self._rest:
            raise AttributeError(name)
        return Without(value, ".".join(self._rest))


def after_the_last_step(**options) -> list:
    """Return the bits of a long and a short array after the first steps, and after those where counts end."""
    generator = torch.Generator().manual_seed(0)
    params = [
        (f"w{n}", torch.nn.Parameter(torch.randn(n, generator=generator).bfloat16()))
        for n in (1000, 1_000_000)
    ]
    optimizer = hs.AdamW(params, nu_dtype=hs.codebook("udynamic8", min_size=0, min_ndim=1), **options)
    for step in range(3):
        for _, p in params:
            p.grad = torch.randn(p.shape, generator=generator).bfloat16()
            if step == 1:
                optimizer.state[p]["step"].fill_(LAST_STEP - 1)
        optimizer.step()
    return snapshot(optimizer)


@pytest.mark.slow
def test_without_torchs_default_store_replicas_are_not_compared_and_no_bit_changes(
    fresh, at_once, monkeypatch, caplog
):
    expected = after_the_last_step(compile=False)
    for answer, value in (("is_initialized", True), ("get_world_size", 2), ("get_rank", 0)):
        monkeypatch.setattr(torch.distributed, answer, lambda value=value: value)
    name = "distributed.distributed_c10d._get_default_store"
    monkeypatch.setattr(replicas, "torch", Without(torch, name))
    assert_same_snapshots(after_the_last_step(compile="auto"), expected)
    assert any("replicas are not compared" in record.getMessage() for record in caplog.records)


def test_without_torchs_hooks_of_load_state_dict_state_is_loaded_and_the_log_says_so(fresh, caplog):
    optimizers = []
    for value in (1.0, 2.0):
        p = torch.nn.Parameter(torch.full((3,), value))
        p.grad = torch.ones_like(p)
        optimizers.append(hs.AdamW([("w", p)]))
        optimizers[-1].step()
    saved, other = optimizers
    for name in [name for name in vars(other) if name.startswith("_optimizer_load_state_dict")]:
        delattr(other, name)
    other.load_state_dict(saved.state_dict())
    assert len(caplog.records) == 2
    assert all("hooks of load_state_dict do not run" in record.getMessage() for record in caplog.records)
    states = (optimizer.state[optimizer.param_groups[0]["params"][0]] for optimizer in optimizers)
    assert all(torch.equal(*arrays) for arrays in zip(*(state.values() for state in states), strict=True))


def test_without_torchs_count_of_writes_a_diagnosis_says_that_sums_are_not_seen(fresh, monkeypatch, caplog):
    model = torch.nn.Linear(48, 8, dtype=torch.bfloat16)
    optimizer = torch.optim.AdamW(model.parameters())
    for _ in range(4):
        model(torch.ones(8, 48, dtype=torch.bfloat16)).square().mean().backward()
    assert hs.diagnose(model, optimizer).sums_rounded == 1
    monkeypatch.setattr(diagnosis, "_VERSION", "_moved")
    assert hs.diagnose(model, optimizer).sums_rounded == 0
    assert [record.getMessage() for record in caplog.records] == [
        "diagnose: torch counts no writes to a tensor any more: sums in 16 bits are not seen."
    ]


def test_a_step_imports_dynamo_for_nobody(monkeypatch):
    """Until something imports it, nothing traces a step."""
    optimizer = hs.AdamW([("w", torch.nn.Parameter(torch.ones(2)))], compile=False)
    monkeypatch.delitem(sys.modules, "torch._dynamo", raising=False)
    monkeypatch.setattr(torch.compiler, "disable", None)
    optimizer.param_groups[0]["params"][0].grad = torch.ones(2)
    optimizer.step()
    assert "torch._dynamo" not in sys.modules


def test_a_step_inside_a_compiled_function_has_the_same_bits():
    weights = [torch.nn.Parameter(torch.ones(8)) for _ in range(2)]
    alone, traced = (hs.AdamW([("w", p)], compile=False) for p in weights)
    take_step = torch.compile(lambda: traced.step(), backend="eager")
    for _ in range(2):
        for p in weights:
            p.grad = torch.ones(8)
        alone.step()
        take_step()
    assert torch.equal(*weights)

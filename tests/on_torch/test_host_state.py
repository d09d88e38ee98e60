"""State on the host is stepped where it is, with the bits of state beside its weights.

Here host and device are one. Memory that a GPU reads over the bus is for `make gpu`.
"""

import copy
import functools
import types
import unittest.mock

import pytest
import torch

import halfstep_torch as hs
from halfstep_torch.sharded import host_state
from on_torch.processes import in_processes
from on_torch.sharded import RECIPES, Run, assert_same_bits, gradients, layouts


def on_host() -> unittest.mock._patch:
    """Take the device of weights for another than the host."""
    return unittest.mock.patch.object(host_state, "is_away", return_value=True)


@pytest.fixture(autouse=True)
def _on_host():
    with on_host():
        yield


def clipped(params, **options) -> hs.Optimizer:
    links = hs.clip_by_global_norm(5.0), hs.scale_by_adam(), hs.scale_by_learning_rate(1e-2)
    return hs.Optimizer(params, hs.chain(*links, hs.round_stochastically()), compile=False, **options)


MAKES = {
    "default": functools.partial(hs.AdamW, compile=False),
    "eight bits": functools.partial(hs.AdamW, compile=False, **hs.recipes.eight_bit),
    "four bits, split": functools.partial(
        hs.AdamW, compile=False, param_storage="split16", **hs.recipes.four_bit
    ),
    "master": functools.partial(hs.AdamW, compile=False, param_storage="master"),
    "lamb": functools.partial(hs.Lamb, compile=False, param_storage="compensated"),
    "momentum": functools.partial(hs.SGD, compile=False, momentum=0.9),
    "clipped": clipped,
    # Its momentum is looked at before a step.
    "muon": functools.partial(hs.Muon, compile=False),
}


# Shards have these, too; four bits have what a momentum has.
DOUBLED = ("default", "eight bits", "momentum")


@pytest.mark.parametrize(
    "make",
    [
        pytest.param(make, id=name, marks=pytest.mark.exhaustive if name in DOUBLED else ())
        for name, make in MAKES.items()
    ],
)
def test_state_on_the_host_has_the_bits_of_state_beside_its_weights(make):
    expected, run = Run(make).steps(1, 3), Run(functools.partial(make, state_device="cpu")).steps(1, 2)
    again = Run(functools.partial(make, state_device="cpu"))
    for name, p in again.params.items():
        p.detach().copy_(run.params[name])
    again.optimizer.load_state_dict(copy.deepcopy(run.optimizer.state_dict()))
    for one in (run, again):
        assert_same_bits(one.steps(3, 3), expected, "on the host")


def test_kernels_step_state_on_the_host():
    expected, found = (
        Run(functools.partial(hs.AdamW, compile=True, **options)).steps(1, 3)
        for options in ({}, {"state_device": "cpu"})
    )
    assert_same_bits(found, expected, "kernels")


def test_a_step_ends_when_kernels_have_written_to_the_host(monkeypatch):
    waited = []
    stream = lambda device: types.SimpleNamespace(synchronize=lambda: waited.append(device))  # noqa: E731
    monkeypatch.setattr(torch.cuda, "current_stream", stream)
    on_gpu = types.SimpleNamespace(device=torch.device("cuda:0"))
    slots = [types.SimpleNamespace(home=home, param=on_gpu) for home in (torch.device("cpu"), None)]
    for of_batch, times in ((slots, 1), (slots[1:], 1)):
        host_state.Fence([types.SimpleNamespace(slots=of_batch)]).end()
        assert waited == [on_gpu.device] * times


def test_what_works_on_an_optimizer_finds_its_state_on_the_host():
    make = functools.partial(hs.AdamW, compile=False, param_storage="split16", state_device="cpu")
    run, alone = (
        Run(make).steps(1, 1),
        Run(functools.partial(hs.AdamW, compile=False, param_storage="split16")),
    )
    hs.load_float32_state_dict(alone.optimizer, hs.float32_state_dict(run.optimizer))
    hs.set_float32_params(alone.optimizer, hs.float32_params(run.optimizer))
    scheduler = torch.optim.lr_scheduler.StepLR(run.optimizer, 1, 1.0)
    for name, grad in gradients(2).items():
        run.params[name].grad = grad
    run.optimizer.step()
    scheduler.step()
    alone.steps(2, 2)
    for name, p in run.params.items():
        assert torch.equal(p, alone.params[name])
    assert hs.diagnose(run.params.items(), run.optimizer).updates_lost == 0


def test_state_of_weights_elsewhere_is_made_on_the_host():
    param = torch.nn.Parameter(torch.ones(4, 8, dtype=torch.bfloat16))
    ((_, _, plan),) = hs.AdamW([("w", param)], compile=False, **hs.recipes.near_float32).plans()
    group = types.SimpleNamespace(caller="AdamW", plan=lambda name, param: plan)
    for state_device, expected in (("cpu", "cpu"), (None, "meta")):
        home = host_state.state_home("AdamW", state_device)
        (slot,) = home.slots_of(group, "w", torch.nn.Parameter(param.detach().to("meta")))
        new = slot.new_arrays(plan.arrays)
        assert new.keys() == plan.arrays.keys()
        assert {x.device.type for x in new.values()} == {expected}


def test_state_has_no_place_but_the_host():
    with pytest.raises(ValueError, match=r"state_device='cuda' is no place for state. Use \"cpu\", or None"):
        hs.AdamW([torch.nn.Parameter(torch.zeros(2))], state_device="cuda")


def test_gradients_that_are_released_find_their_state():
    models = []
    for options in ({}, {"state_device": "cpu"}):
        torch.manual_seed(0)
        model = torch.nn.Sequential(torch.nn.Linear(96, 200), torch.nn.Linear(200, 8)).bfloat16()
        optimizer = hs.AdamW(model.named_parameters(), compile=False, **hs.recipes.eight_bit, **options)
        hs.release_gradients(optimizer)
        for step in range(3):
            model(torch.full((2, 96), 0.5 + step).bfloat16()).square().sum().backward()
            optimizer.step()
        models.append(model)
    assert all(torch.equal(p, q) for p, q in zip(*(model.parameters() for model in models), strict=True))


def shards_have_the_bits_of_one_process(rank: int) -> None:
    """But of shards whose steps exchange words the state stays where it is, and both are in one group.

    A state dict moves from shards with state on the host to others.
    """
    for recipe in ("default", "eight_bit", "split16"):
        make = functools.partial(hs.AdamW, compile=False, **RECIPES[recipe])
        expected = Run(make).steps(1, 3)
        for layout, _, place in layouts():
            run = Run(functools.partial(make, state_device="cpu"), place)
            with on_host():
                run.steps(1, 2)
            again = Run(make, place)
            again.optimizer.load_state_dict(run.optimizer.state_dict())
            for name, p in again.params.items():
                p.detach().copy_(run.params[name])
            assert_same_bits(again.steps(3, 3), expected, f"{recipe}, {layout}, without")
            with on_host():
                run.optimizer.load_state_dict(run.optimizer.state_dict())
                assert_same_bits(run.steps(3, 3), expected, f"{recipe}, {layout}")


@pytest.mark.slow
def test_shards_with_state_on_the_host_have_the_bits_of_one_process():
    in_processes(2, shards_have_the_bits_of_one_process)

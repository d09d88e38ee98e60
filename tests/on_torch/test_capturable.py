"""`capturable=True`: a step that a CUDA graph replays has the bits of plain steps."""

import numpy as np
import pytest
import torch

from halfstep_torch.engine.number_places import flat
from halfstep_torch.numbers.random_words import leaf_keys
from halfstep_torch.numbers.tensor_numbers import tensor_keys
from on_torch.emulated_device import Graph, emulated_device
from on_torch.kernel_steps import MAKES, needs_compiler, parameters
from on_torch.steps import assert_same_snapshots, snapshot

SHAPES = [(15,), (3, 100), (1,), (64, 20)]
COUNTS = [*range(1, 1001), 2**31 - 2, 2**31 - 1]
OFTEN = ("default", "eight_bit", "feedback", "Adan", "SGD")
ELEMENTWISE = [
    name if name in OFTEN else pytest.param(name, marks=pytest.mark.slow)
    for name in MAKES
    if name not in ("Lamb", "Lamb16", "clipped")
]
NO_COPIES = {"_record_function_enter_new", "_record_function_exit", "view", "detach"}


def give(params, step: int) -> None:
    """Write gradients into memory that stays."""
    generator = torch.Generator().manual_seed(step)
    for _, p in params:
        p.grad = torch.zeros_like(p) if p.grad is None else p.grad
        p.grad.copy_(torch.randn(p.shape, generator=generator))


def make(name="default", **options):
    params = parameters(shapes=SHAPES)
    optimizer = MAKES[name](params, compile=True, **options)
    return params, optimizer


def step_both(ours, plain, steps, replay=None) -> None:
    """Step two optimizers with equal gradients, the first by a graph if there is one."""
    for step in steps:
        for params, optimizer in (ours, plain):
            give(params, step)
            (optimizer.step if optimizer is plain[1] or replay is None else replay)()


@pytest.mark.parametrize("name", ["default", "eight_bit", "feedback", "Adan", "schedule-free", "Lion", "SGD"])
def test_numbers_of_tensors_have_the_bits_of_the_host(name):
    group = make(name)[1]._group(0)
    counts, coming = torch.tensor(COUNTS)[:, None], torch.arange(1.0, 129.0)[None].expand(len(COUNTS), 128)
    for link, h in zip(group.links, group.values, strict=True):
        host = np.array([flat(link.step_numbers(h, step)) for step in COUNTS], np.float32)
        fields = [name for name in type(h)._fields if isinstance(getattr(h, name), float)]
        made = link.tensor_numbers({x: torch.tensor(getattr(h, x)) for x in fields}, counts, coming)
        made = [x.expand(len(COUNTS), 1).numpy() for x in made]
        assert np.array_equal(np.concatenate([*made, host[:, :0]], 1).view(np.int32), host.view(np.int32))


def test_keys_of_tensors_have_the_bits_of_the_host():
    seed, leaves, roles = 0x123456789ABCDEF, np.arange(1002) * 4_288_001, [0, 3, 0xFFFFFFFF]
    words = [np.array([x], np.uint32).view(np.int32) for x in (seed >> 32, seed % 2**32)]
    leaf = leaves.astype(np.uint32).view(np.int32)[:, None]
    made = tensor_keys([*map(torch.tensor, words)], torch.tensor(COUNTS)[:, None], torch.tensor(leaf), roles)
    host = leaf_keys(seed, COUNTS, leaves.astype(np.uint32), roles).view(np.int32)
    assert np.array_equal(torch.cat(made, 1).numpy(), host)


@needs_compiler
@pytest.mark.parametrize("name", ELEMENTWISE)
def test_a_captured_step_has_the_bits_of_plain_steps(name):
    ours, plain, graph = make(name), make(name), Graph()
    with emulated_device():
        ours[1].param_groups[0]["capturable"] = True
        step_both(ours, plain, range(2))
        before = snapshot(ours[1])
        with graph.capture():
            ours[1].step()
        assert_same_snapshots(snapshot(ours[1]), before)
        step_both(ours, plain, range(2, 5), graph.replay)
    assert_same_snapshots(snapshot(ours[1]), snapshot(plain[1]))
    assert len(graph.launches) == 2
    assert {*graph.operations} <= NO_COPIES

"""State on the host comes to arenas piece by piece, and steps have the bits of state beside its weights.

Here host and device are one, and copies are copies: what is found is state that is read before it came, left
behind, or in the way of other state. Streams of a GPU are for `make gpu`.
"""

import contextlib
import copy
import functools
import unittest.mock
from collections.abc import Iterator

import pytest
import torch

import halfstep_torch as hs
from halfstep_torch.sharded import streamed_state
from halfstep_torch.sharded.streamed_state import Arena
from on_torch.processes import in_processes
from on_torch.sharded import RECIPES, SHAPES, Run, assert_same_bits, gradients, layouts

_PIECE = 12_000


class PoisonedArena(Arena):
    """An arena that holds nothing but the piece that it was asked for."""

    sizes: list[int] = []  # noqa: RUF012

    def place(self, pieces):
        super().place(pieces)
        self.memory.fill_(255)
        self.piece = None
        self.sizes.append(self.memory.numel())

    def fetch(self, piece):
        assert self.piece is None, "the state of another piece is in the way"
        super().fetch(piece)
        self.piece = piece

    def put(self, piece):
        assert self.piece is piece
        super().put(piece)
        self.memory.fill_(255)
        self.piece = None


@contextlib.contextmanager
def streaming() -> Iterator[None]:
    """Take the device of weights for another than the host."""
    with contextlib.ExitStack() as stack:
        for what, name, value in (
            (streamed_state, "is_away", lambda device: True),
            (streamed_state, "_PIECE", _PIECE),
            (streamed_state.Streaming, "arena", PoisonedArena),
        ):
            stack.enter_context(unittest.mock.patch.object(what, name, value))
        yield


@pytest.fixture(autouse=True)
def _streams():
    with streaming():
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


# Shards stream in these, too; four bits have what a momentum has.
DOUBLED = ("default", "eight bits", "momentum")


@pytest.mark.parametrize(
    "make",
    [
        pytest.param(make, id=name, marks=pytest.mark.exhaustive if name in DOUBLED else ())
        for name, make in MAKES.items()
    ],
)
def test_streamed_state_has_the_bits_of_state_beside_its_weights(make):
    expected, run = Run(make).steps(1, 3), Run(functools.partial(make, state_device="cpu")).steps(1, 2)
    again = Run(functools.partial(make, state_device="cpu"))
    for name, p in again.params.items():
        p.detach().copy_(run.params[name])
    again.optimizer.load_state_dict(copy.deepcopy(run.optimizer.state_dict()))
    for one in (run, again):
        assert_same_bits(one.steps(3, 3), expected, "streamed")


def test_an_arena_has_room_for_one_piece_of_a_long_parameter(monkeypatch):
    monkeypatch.setattr(PoisonedArena, "sizes", [])
    Run(functools.partial(MAKES["default"], state_device="cpu")).steps(1, 1)
    # Two moments of two bytes; of a vector, whose rows are no blocks, all.
    assert max(PoisonedArena.sizes) <= 4 * max(_PIECE, SHAPES["vector"][0]) + 64 * 2 * len(SHAPES)
    assert 4 * SHAPES["square"][0] * SHAPES["square"][1] > 2 * max(PoisonedArena.sizes)


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


def shards_stream_with_the_bits_of_one_process(rank: int) -> None:
    """But those whose steps exchange words: their state stays where it is, and both are in one group.

    A state dict moves from shards that stream to shards that do not.
    """
    for recipe in ("default", "eight_bit", "split16"):
        make = functools.partial(hs.AdamW, compile=False, **RECIPES[recipe])
        expected = Run(make).steps(1, 3)
        for layout, _, place in layouts():
            run = Run(functools.partial(make, state_device="cpu"), place)
            with streaming(), unittest.mock.patch.object(PoisonedArena, "sizes", sizes := []):
                run.steps(1, 2)
            assert max(sizes) > 0
            again = Run(make, place)
            again.optimizer.load_state_dict(run.optimizer.state_dict())
            for name, p in again.params.items():
                p.detach().copy_(run.params[name])
            assert_same_bits(again.steps(3, 3), expected, f"{recipe}, {layout}, without")
            with streaming():
                run.optimizer.load_state_dict(run.optimizer.state_dict())
                assert_same_bits(run.steps(3, 3), expected, f"{recipe}, {layout}")


@pytest.mark.slow
def test_shards_stream_with_the_bits_of_one_process():
    in_processes(2, shards_stream_with_the_bits_of_one_process)

"""The memory of a step at its peak: pieces of constant size, and of LAMB the update of one layer."""

import pytest
import torch

import halfstep_torch as hs
from halfstep_torch.numbers.norms import piece_length
from on_torch.steps import step_in_pieces

PIECE = 1 << 11
ELEMENTS = 1 << 18
# float32 temporaries of a piece, with room: moments, words and roundings of 8-bit floats have some forty.
OF_PIECES = 48 * 4 * PIECE


def peak_bytes(function) -> int:
    """Return how many bytes stand at once, at most, of what a function allocates."""
    activities, events = [torch.profiler.ProfilerActivity.CPU], []
    for _ in range(4):  # on a busy machine a profile was seen without a single event
        with torch.profiler.profile(activities=activities, profile_memory=True) as profile:
            function()
        events = profile.profiler.kineto_results.events()
        if events := [event for event in events if event.name() == "[memory]"]:
            break
    stands = peak = 0
    for event in sorted(events, key=lambda event: event.start_ns()):
        stands += event.nbytes()
        peak = max(peak, stands)
    return peak


def weights(*shapes, layout=torch.contiguous_format, grads=torch.contiguous_format):
    params = [torch.nn.Parameter(torch.ones(shape).bfloat16().to(memory_format=layout)) for shape in shapes]
    for p in params:
        p.grad = torch.ones(p.shape, dtype=torch.bfloat16).to(memory_format=grads)
    return [(f"w{i}", p) for i, p in enumerate(params)]


def peak_of_a_step(optimizer, piece: int = PIECE) -> int:
    """Return the most bytes that stand at once in a step, the rows of small pieces included."""
    optimizer.step()  # which makes the state
    return peak_bytes(lambda: step_in_pieces(optimizer, piece))


@pytest.mark.slow
@pytest.mark.parametrize(("storage", "copies"), [("stochastic", 1), ("master", 2)])
def test_lamb_keeps_the_update_of_one_layer_at_a_time(storage, copies):
    """Beside it the float32 weights of that layer, where the model's are not all that is known of them."""
    layer, longer = 1 << 22, 16  # pieces, or the profiler would keep a million of events
    params = weights(*[(2048, 2048)] * 3)
    peak = peak_of_a_step(hs.Lamb(params, compile=False, param_storage=storage), longer * PIECE)
    # A norm takes pieces of a length of its own: each in float32, its magnitudes, scaled, and squared.
    of_pieces = longer * OF_PIECES + 8 * 4 * piece_length(torch.device("cpu"))
    assert copies * 4 * layer < peak < copies * 4 * layer + of_pieces < 2 * copies * 4 * layer


def test_loading_makes_the_new_state_in_the_place_of_the_old():
    params = weights(*[(256, 128)] * 8)
    saved = []

    def load():
        optimizer = hs.AdamW(params, compile=False)
        step_in_pieces(optimizer, PIECE)
        saved.append({**optimizer.state_dict()})
        saved[0]["state"] = {
            k: {key: x.clone() for key, x in state.items()} for k, state in saved[0]["state"].items()
        }
        optimizer.load_state_dict(saved[0])

    state, of_array = 4 * ELEMENTS, 4 * ELEMENTS / 8
    # What was saved, and either state; of an old and a new one there would be another.
    assert 2 * state <= peak_bytes(load) < 2 * state + of_array + OF_PIECES

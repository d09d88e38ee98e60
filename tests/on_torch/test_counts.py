"""Parameters whose counts differ are stepped together, with the bits that each has alone."""

import copy
import io
import pickle

import pytest
import torch

import halfstep_torch as hs
from halfstep_torch import launch
from halfstep_torch.links.link import Link
from on_torch.steps import assert_same_snapshots, snapshot, step_by_ones

COUNTS = (0, 3, 3, 17, 900, 5, 60_000, 3)


def clipped(params, **options):
    links = hs.clip_by_global_norm(0.01), hs.scale_by_adam(), hs.scale_by_learning_rate(schedule)
    return hs.Optimizer(params, hs.chain(*links, hs.round_stochastically()), **options)


def schedule(step: int) -> float:
    return 1e-2 / (1 + step)


OPTIMIZERS = {
    "AdamW": lambda params, **options: hs.AdamW(params, lr=1e-2, weight_decay=0.1, **options),
    "eight_bit": lambda params, **options: hs.AdamW(params, lr=1e-2, **hs.recipes.eight_bit, **options),
    "Lamb": lambda params, **options: hs.Lamb(params, lr=1e-2, **options),
    "a schedule and clipping": clipped,
}


def stepped(make, **options) -> list:
    """Return the bits after three steps from given counts."""
    generator = torch.Generator().manual_seed(0)
    params = [
        (f"w{i}", torch.nn.Parameter(torch.randn(24 + i, 16, generator=generator).bfloat16()))
        for i in range(len(COUNTS))
    ]
    ours = make(params, **options)
    for _, p in params:
        p.grad = torch.zeros_like(p)
    ours.step()
    for (_, p), count in zip(params, COUNTS, strict=True):
        ours.state[p]["step"].fill_(count)
    for _ in range(3):
        for _, p in params:
            p.grad = torch.randn(p.shape, generator=generator).bfloat16()
        ours.step()
    return snapshot(ours)


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_a_kernel_steps_many_counts_with_the_bits_of_plain_steps(name):
    assert_same_snapshots(*(stepped(OPTIMIZERS[name], compile=compile) for compile in (True, False)))


def test_many_counts_are_one_batch(monkeypatch):
    made = []
    monkeypatch.setattr(launch, "run_batch", lambda batch, *_: made.append(len(batch.slots)) or [])
    stepped(OPTIMIZERS["AdamW"], compile=False)
    assert made[1:] == 3 * [len(COUNTS)]


def test_an_expert_that_is_skipped_now_and_then_has_the_bits_of_its_own_steps():
    """Counts part as experts of a mixture do: each is stepped when it has a gradient."""

    def run(chosen: list[list[int]], count: int) -> list[torch.Tensor]:
        params = [(f"w{i}", torch.nn.Parameter(torch.full((40,), 1.0).bfloat16())) for i in range(count)]
        ours = hs.AdamW(params, lr=1e-2)
        for step, experts in enumerate(chosen):
            for i, (_, p) in enumerate(params):
                p.grad = torch.full_like(p, 1.0 + i + step) if i in experts else None
            ours.step()
        return [p.detach().float() for _, p in params]

    chosen = [[i for i in range(12) if step % (i + 1) == 0] for step in range(24)]
    together = run(chosen, 12)
    for i in range(12):
        alone = run([[i] if i in experts else [] for experts in chosen], 12)
        assert torch.equal(together[i], alone[i])


def test_numbers_of_a_count_are_computed_once(monkeypatch):
    """Of a step the numbers of one count are new: those of the others were those of a neighbour before.

    Those of the decay and of the rounding are the same at every count.
    """
    params = [(f"w{i}", torch.nn.Parameter(torch.ones(4).bfloat16())) for i in range(9)]
    ours = hs.AdamW(params, lr=1e-2, weight_decay=0.1, compile=False)
    step_by_ones(ours)
    for i, (_, p) in enumerate(params):
        ours.state[p]["step"].fill_(20 + i)
    ours.step()
    computed, plain = [], Link.step_numbers
    monkeypatch.setattr(Link, "step_numbers", lambda *args: computed.append(args[2]) or plain(*args))
    ours.step()
    assert computed == [30, 30]  # of Adam, and of the learning rate


@pytest.mark.parametrize("name", ["AdamW", "AdEMAMix", "Adan", "Lion"])
def test_numbers_of_coming_counts_are_those_of_each_step(name):
    def run(*, anew: bool) -> list:
        p = torch.nn.Parameter(torch.ones(8).bfloat16())
        ours = getattr(hs, name)([("w", p)], lr=1e-2, compile=False)
        for step in range(40):
            if anew:
                ours._launches.clear()
            if step == 20:
                ours.param_groups[0].update(betas=(0.8, *ours.param_groups[0]["betas"][1:]))
            if step == 25:
                ours.state[p]["step"].fill_(400)
            if step > 30:
                ours.param_groups[0]["lr"] *= 0.9
            p.grad = torch.full_like(p, 1.0 - step)
            ours.step()
        return snapshot(ours)

    assert_same_snapshots(run(anew=False), run(anew=True))


@pytest.mark.parametrize("count", [-1, -1000])
@pytest.mark.parametrize("name", ["AdamW", "eight_bit", "Lamb"])
def test_a_negative_count_is_refused_before_any_weight_moves(name, count):
    """As after `state["step"] -= 1000`; -1 made NaN of all weights, and less the step did not end."""
    p, q = (torch.nn.Parameter(torch.ones(24, 16).bfloat16()) for _ in range(2))
    ours = OPTIMIZERS[name]([("p", p), ("q", q)])
    step_by_ones(ours)
    step_by_ones(ours)  # by the launch of the first
    before = p.detach().clone()
    for state in ours.state.values():
        state["step"].fill_(count)
    with pytest.raises(ValueError, match=f"the step of 'p' is {count}, and counts start at 0"):
        step_by_ones(ours)
    assert torch.equal(p, before)
    for state in ours.state.values():
        state["step"].fill_(0)
    step_by_ones(ours)
    assert p.isfinite().all()


def counted(count: int = 5, steps: int = 2) -> tuple[list, hs.AdamW]:
    params = [(f"w{i}", torch.nn.Parameter(torch.ones(4, 4).bfloat16())) for i in range(count)]
    ours = hs.AdamW(params, lr=1e-2, compile=False)
    for _ in range(steps):
        step_by_ones(ours)
    return [p for _, p in params], ours


def counts_of(ours) -> list[int]:
    return [int(state["step"]) for state in ours.state.values()]


def addresses(ours) -> list[int]:
    return [state["step"].data_ptr() for state in ours.state.values()]


def test_counts_are_numbers_of_one_array_and_each_has_a_storage_of_its_own():
    _, ours = counted()
    assert addresses(ours) == [addresses(ours)[0] + 8 * i for i in range(5)]
    assert {state["step"].untyped_storage().nbytes() for state in ours.state.values()} == {8}


@pytest.mark.parametrize(
    "pack", [pickle.dumps, lambda x: torch.save(x, packed := io.BytesIO()) or packed.getvalue()]
)
def test_a_file_of_counts_is_as_long_as_one_of_tensors_that_share_nothing(pack):
    counts = [state["step"] for state in counted(count=50)[1].state.values()]
    assert len(pack(counts)) == len(pack([torch.tensor(int(x)) for x in counts]))


def replace(state):
    state["step"] = torch.tensor(40)


def move(state):
    state["step"].data = torch.tensor(40)


def share(state):
    state["step"].fill_(40).share_memory_()


def view(state):
    state["step"] = torch.tensor([7, 40])[1]


@pytest.mark.parametrize("change", [replace, move, share, view])
@pytest.mark.parametrize("kept", [False, True], ids=["another launch", "the same launch"])
def test_a_count_that_a_user_sets_is_the_one_that_is_incremented(change, kept):
    params, ours = counted()
    change(ours.state[params[1]])
    count = ours.state[params[1]]["step"]
    if not kept:
        ours._launches.clear()
    step_by_ones(ours)
    step_by_ones(ours)
    assert ours.state[params[1]]["step"] is count
    assert counts_of(ours) == [4, 42, 4, 4, 4]


def test_a_count_in_memory_that_others_read_stays_there():
    params, ours = counted()
    others = torch.tensor([5, 6, 7])
    ours.state[params[1]]["step"] = others[1]
    ours.state[params[2]]["step"].share_memory_()
    shared = ours.state[params[2]]["step"].data_ptr()
    step_by_ones(ours)
    assert others.tolist() == [5, 7, 7]
    assert ours.state[params[2]]["step"].data_ptr() == shared
    assert counts_of(ours) == [3, 7, 3, 3, 3]


def test_copies_and_loaded_optimizers_count_for_themselves():
    _, ours = counted()
    copied = copy.deepcopy(ours)
    loaded = counted()[1]
    loaded.load_state_dict(ours.state_dict())
    unpickled = pickle.loads(pickle.dumps(ours))
    for other in (copied, loaded, unpickled):
        step_by_ones(other)
        step_by_ones(other)
        assert counts_of(other) == 5 * [4]
    assert counts_of(ours) == 5 * [2]


def test_the_array_of_counts_grows_with_the_parameters():
    """As `step_parameter` finds them: one after the other."""
    params, ours = counted(steps=0)
    for p in params:
        p.grad = torch.ones_like(p)
        ours.step_parameter(p)
    more = [torch.nn.Parameter(torch.ones(4)) for _ in range(3)]
    ours.add_param_group({"params": [(f"v{i}", p) for i, p in enumerate(more)]})
    for p in (*params, *more):
        p.grad = torch.ones_like(p)
        ours.step_parameter(p)
    ours.step()
    assert counts_of(ours) == 5 * [3] + 3 * [2]
    assert sorted(addresses(ours)) == [min(addresses(ours)) + 8 * i for i in range(8)]

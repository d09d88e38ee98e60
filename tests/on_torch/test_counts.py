"""Parameters whose counts differ are stepped together, with the bits that each has alone."""

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
    monkeypatch.setattr(launch, "run_batch", lambda batch, _: made.append(len(batch.slots)) or [])
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

"""Steps with another set of gradients each: experts of a mixture, dropped layers. Nothing is built again."""

import random
import weakref

import pytest
import torch

import halfstep_torch as hs
from halfstep_torch import optimizer as optimizers
from halfstep_torch.engine import batches
from on_torch.steps import assert_same_snapshots, snapshot

SHAPES = [(24, 16), (40,), (7, 33), (300, 4), (1,), (24, 16), (128,), (64, 64)]


def clipped(params, **options):
    links = hs.clip_by_global_norm(0.01), hs.scale_by_adam(), hs.scale_by_learning_rate(1e-2)
    return hs.Optimizer(params, hs.chain(*links, hs.round_stochastically()), **options)


def in_groups(params, **options):
    groups = [{"params": params[:3], "lr": 3e-3}, {"params": params[3:], "weight_decay": 0.1}]
    return hs.AdamW(groups, lr=1e-2, **options)


OPTIMIZERS = {
    "AdamW": lambda params, **options: hs.AdamW(params, lr=1e-2, **options),
    "four_bit": lambda params, **options: hs.AdamW(params, lr=1e-2, recipe="four_bit", **options),
    "Lamb": lambda params, **options: hs.Lamb(params, lr=1e-2, **options),
    "clipping": clipped,
    "groups": in_groups,
}


def made(make, **options):
    generator = torch.Generator().manual_seed(0)
    params = [torch.nn.Parameter(torch.randn(shape, generator=generator).bfloat16()) for shape in SHAPES]
    return params, make([(f"w{i}", p) for i, p in enumerate(params)], **options)


def give_some(params, step: int, chance: float = 0.5) -> list[int]:
    """Give some parameters gradients, and others none."""
    generator, drawn = torch.Generator().manual_seed(step), random.Random(step)
    chosen = [i for i in range(len(params)) if drawn.random() < chance]
    for i, p in enumerate(params):
        p.grad = torch.randn(p.shape, generator=generator).bfloat16() if i in chosen else None
    return chosen


def bits(params, optimizer) -> list:
    return [*snapshot(optimizer), *(p.detach().view(torch.int16).numpy().copy() for p in params)]


def compared(make, change=lambda step, params, optimizer: None, steps: int = 14, **options) -> None:
    """Compare steps with those of an optimizer that builds each anew."""
    (params, ours), (others, theirs) = made(make, **options), made(make, **options)
    for step in range(steps):
        for of, optimizer in ((params, ours), (others, theirs)):
            give_some(of, step)
            with torch.no_grad():
                change(step, of, optimizer)
        theirs._launches.clear()
        ours.step()
        theirs.step()
        assert_same_snapshots(bits(params, ours), bits(others, theirs))


@pytest.mark.parametrize("compile", [True, False])
@pytest.mark.parametrize("name", OPTIMIZERS)
def test_chosen_parameters_have_the_bits_of_a_step_that_is_built_anew(name, compile):
    compared(OPTIMIZERS[name], compile=compile)


def test_a_step_with_other_gradients_makes_no_launch_and_no_row_anew(monkeypatch):
    params, optimizer = made(OPTIMIZERS["groups"], compile=True)
    launches, rows, launch, row_of = [], [], optimizers.Launch, batches.row_of
    monkeypatch.setattr(optimizers, "Launch", lambda *args: launches.append(args) or launch(*args))
    monkeypatch.setattr(batches, "row_of", lambda *args: rows.append(args) or row_of(*args))
    for step in range(20):
        give_some(params, step)
        optimizer.step()
    assert len(launches) == 1
    # One row for each, and one more at most whenever parameters come that had no gradient before.
    assert len(SHAPES) <= len(rows) <= 3 * len(SHAPES)
    rows.clear()
    for step in range(20, 40):
        give_some(params, step)
        optimizer.step()
    assert len(launches) == 1
    assert not rows


def replace_weight(step, params, optimizer):
    if step in (9, 12):  # while it has a gradient, and while it has none
        params[step % 2].data = params[step % 2].data.clone() * 2


def replace_state(step, params, optimizer):
    if step == 9:
        for state in optimizer.state.values():
            state["exp_avg"] = state["exp_avg"].clone()


def set_counts(step, params, optimizer):
    if step in (8, 11):
        for i, p in enumerate(params):
            if p in optimizer.state:
                optimizer.state[p]["step"].fill_(10 * i)


def set_entries(step, params, optimizer):
    group = optimizer.param_groups[step % len(optimizer.param_groups)]
    group.update(lr=0.01 * step, weight_decay=0.1 * (step % 3), maximize=step % 5 == 0)


def give_float32_gradients(step, params, optimizer):
    for p in params:
        if step == 8 and p.grad is not None:
            grad, p.grad = p.grad, None
            p.grad_dtype = None  # any
            p.grad = grad.float()


def give_transposed_gradients(step, params, optimizer):
    if step > 8 and params[7].grad is not None:
        params[7].grad = params[7].grad.t()


def forget_state(step, params, optimizer):
    if step == 10:
        optimizer.state.pop(params[0], None)
        optimizer.state.pop(params[1], None)


def add_group(step, params, optimizer):
    if step == 7:
        params.append(torch.nn.Parameter(torch.ones(16).bfloat16()))
        optimizer.add_param_group({"params": [("new", params[-1])]})
        params[-1].grad = torch.ones_like(params[-1])


def freeze(step, params, optimizer):
    if step == 9:
        params[3].requires_grad_(False)
        params[3].grad = None


CHANGES = {
    change.__name__: change
    for change in (
        replace_weight,
        replace_state,
        set_counts,
        set_entries,
        give_float32_gradients,
        give_transposed_gradients,
        forget_state,
        add_group,
        freeze,
    )
}


@pytest.mark.parametrize("name", CHANGES)
def test_what_a_user_changes_between_steps_is_seen(name):
    compared(OPTIMIZERS["groups"], CHANGES[name], compile="auto")


def test_state_that_is_dropped_without_a_gradient_is_free_after_the_next_step():
    params, optimizer = made(OPTIMIZERS["AdamW"])
    for step in range(8):
        give_some(params, step)
        optimizer.step()
    params[3].grad, params[4].grad = None, torch.ones_like(params[4])
    array = weakref.ref(optimizer.state.pop(params[3])["exp_avg"])
    optimizer.step()
    assert array() is None


def test_a_wrong_entry_of_a_group_is_refused_when_the_group_has_a_gradient():
    params, optimizer = made(OPTIMIZERS["groups"])
    for step in range(10):
        give_some(params, step)
        optimizer.step()
    optimizer.param_groups[0]["lr"] = -1.0
    for i, p in enumerate(params):
        p.grad = torch.ones_like(p) if i > 2 else None
    optimizer.step()
    params[1].grad = torch.ones_like(params[1])
    before = bits(params, optimizer)
    with pytest.raises(ValueError, match=r"lr=-1\.0"):
        optimizer.step()
    assert_same_snapshots(bits(params, optimizer), before)


def test_a_new_parameter_that_shares_memory_is_refused():
    params, optimizer = made(OPTIMIZERS["AdamW"])
    for p in params[1:]:
        p.grad = torch.ones_like(p)
    optimizer.step()
    with torch.no_grad():
        params[0].data = params[5].data.view(24, 16)
    params[0].grad = torch.ones_like(params[0])
    with pytest.raises(ValueError, match="'w0' and 'w5' share memory"):
        optimizer.step()


def test_a_step_that_fails_after_it_added_parameters_is_built_again():
    params, optimizer = made(OPTIMIZERS["AdamW"])
    for step in range(3):
        give_some(params, step, 0.3)
        optimizer.step()
    for p in params:
        p.grad = torch.ones_like(p)
    params[2].grad = torch.ones_like(params[2]).to_sparse()
    with pytest.raises(TypeError, match="the gradient of 'w2' is sparse"):
        optimizer.step()
    params[2].grad = torch.ones_like(params[2])
    optimizer.step()
    assert len(optimizer.state) == len(params)

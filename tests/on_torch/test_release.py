"""Parameters that are stepped during backward, whose gradients are freed at once."""

import contextlib
import gc
import weakref

import pytest
import torch

import halfstep_torch as hs
from on_torch.steps import assert_same_snapshots, snapshot


def model_of(layers: int = 3) -> torch.nn.Sequential:
    torch.manual_seed(0)
    return torch.nn.Sequential(*(torch.nn.Linear(8, 8) for _ in range(layers))).to(torch.bfloat16)


def train(make, release: bool, steps: int = 4) -> torch.optim.Optimizer:
    model = model_of()
    optimizer = make(model)
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 1, 0.5)
    handle = hs.release_gradients(optimizer) if release else None
    for step in range(steps):
        model(torch.ones(2, 8, dtype=torch.bfloat16) * (step + 1)).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()
        scheduler.step()
    if handle:
        handle.remove()
    return optimizer


def adamw(model):
    groups = [
        {"params": [(name, p)], "lr": 1e-2 / (i + 1)} for i, (name, p) in enumerate(model.named_parameters())
    ]
    return hs.AdamW(groups, weight_decay=0.1, seed=3)


def unnamed(model):
    return hs.Lamb(model.parameters(), lr=1e-2, param_storage="split16")


def compiled(model):
    return hs.AdamW(model.named_parameters(), lr=1e-2, compile=True)


@pytest.mark.parametrize("make", [adamw, unnamed, pytest.param(compiled, marks=pytest.mark.exhaustive)])
def test_the_bits_are_those_of_a_step_after_backward(make):
    with_release, without = train(make, True), train(make, False)
    assert_same_snapshots(snapshot(with_release), snapshot(without))


def test_there_is_never_more_than_one_gradient():
    model = model_of(5)
    optimizer = hs.AdamW(model.named_parameters())
    handle, most = hs.release_gradients(optimizer), []

    def count(param):
        most.append(sum(p.grad is not None for p in model.parameters()))

    for p in model.parameters():
        p.register_post_accumulate_grad_hook(count)
    model(torch.ones(1, 8, dtype=torch.bfloat16)).sum().backward()
    assert len(most) == 10
    assert max(most) == 0
    handle.remove()
    model(torch.ones(1, 8, dtype=torch.bfloat16)).sum().backward()
    assert all(p.grad is not None for p in model.parameters())


def test_loaded_state_and_seeds_are_those_of_the_next_backward():
    model, other = model_of(), model_of()
    optimizer, source = hs.AdamW(model.named_parameters(), seed=1), hs.AdamW(other.named_parameters(), seed=2)
    other(torch.ones(1, 8, dtype=torch.bfloat16)).sum().backward()
    source.step(zero_grad=True)
    model.load_state_dict(other.state_dict())
    handle = hs.release_gradients(optimizer)
    optimizer.load_state_dict(source.state_dict())
    for net in (model, other):
        net(torch.ones(1, 8, dtype=torch.bfloat16)).sum().backward()
    source.step()
    handle.remove()
    assert_same_snapshots(snapshot(optimizer), snapshot(source))


def test_a_second_backward_before_step_is_refused():
    """Two micro-batches would be two steps, of other bits than one."""
    model = model_of()
    optimizer = hs.AdamW(model.named_parameters(), compile=False)
    handle = hs.release_gradients(optimizer)
    x = torch.ones(1, 8, dtype=torch.bfloat16)
    model(x).sum().backward()
    before = [p.detach().clone() for p in model.parameters()]
    with pytest.raises(RuntimeError, match=r"'2/bias' was stepped, .* call optimizer.step\(\) after each"):
        model(x).sum().backward()
    assert all(torch.equal(p, q) for p, q in zip(model.parameters(), before, strict=True))
    assert all(int(state["step"]) == 1 for state in optimizer.state.values())
    model.zero_grad()
    optimizer.step()
    model(x).sum().backward()
    optimizer.step()
    optimizer.step(lambda: model(2 * x).sum().backward())
    assert all(int(state["step"]) == 3 for state in optimizer.state.values())
    handle.remove()
    for _ in range(2):
        model(x).sum().backward()
    assert all(p.grad is not None for p in model.parameters())


def test_hooks_keep_no_model_in_memory():
    model = model_of()
    optimizer = hs.AdamW(model.named_parameters(), compile=False)
    hs.release_gradients(optimizer)
    model(torch.ones(1, 8, dtype=torch.bfloat16)).sum().backward()
    weight, other = weakref.ref(model[0].weight), model_of()
    hs.accumulate_gradients(other)
    other(torch.ones(1, 8, dtype=torch.bfloat16)).sum().backward()
    other_weight = weakref.ref(other[0].weight)
    del model, optimizer, other
    gc.collect()
    assert weight() is None
    assert other_weight() is None


def test_an_optimizer_that_nobody_keeps_is_told_of(caplog):
    model, x = model_of(), torch.ones(1, 8, dtype=torch.bfloat16)
    handle = hs.release_gradients(hs.AdamW(model.named_parameters(), compile=False))
    model(x).sum().backward()  # the handle keeps it
    assert model[0].weight.grad is None
    del handle
    gc.collect()
    assert caplog.messages == []
    for _ in range(2):
        model(x).sum().backward()
    assert ["nothing holds its optimizer any more" in text for text in caplog.messages] == [True]


def test_what_needs_all_gradients_is_refused():
    model = model_of()
    clipping = hs.chain(hs.clip_by_global_norm(1.0), hs.scale_by_adam(), hs.scale_by_learning_rate(1e-3))
    with pytest.raises(ValueError, match="clip_by_global_norm needs all gradients"):
        hs.release_gradients(hs.Optimizer(model.named_parameters(), clipping))
    with pytest.raises(TypeError, match="optimizer is SGD"):
        hs.release_gradients(torch.optim.SGD(model.parameters()))
    optimizer = hs.AdamW(model.named_parameters())
    adding = hs.accumulate_gradients(optimizer)
    both = hs.release_gradients(optimizer)
    with pytest.raises(ValueError, match="has the hooks of release_gradients already"):
        hs.release_gradients(optimizer)
    both.remove()
    with pytest.raises(ValueError, match="has the hooks of accumulate_gradients already"):
        hs.accumulate_gradients(optimizer)
    adding.remove()
    model(torch.ones(1, 8, dtype=torch.bfloat16)).sum().backward()
    with pytest.raises(ValueError, match="'0/weight' has a gradient"):
        hs.release_gradients(optimizer)
    optimizer.zero_grad()
    handle = hs.release_gradients(optimizer)
    with pytest.raises(ValueError, match="has the hooks of release_gradients already"):
        hs.release_gradients(optimizer)
    with pytest.raises(RuntimeError, match=r"clip_grad_norm_: release_gradients"):
        hs.clip_grad_norm_(model.parameters(), 1.0)
    handle.remove()


def clip_by_a_norm(params, max_norm):
    """Clip as torchtitan does."""
    params = list(params)
    norm = torch.nn.utils.get_total_norm([p.grad for p in params if p.grad is not None])
    torch.nn.utils.clip_grads_with_norm_(params, max_norm, norm)
    return norm


@pytest.mark.parametrize("clip", [torch.nn.utils.clip_grad_norm_, hs.clip_grad_norm_, clip_by_a_norm])
def test_clipping_of_freed_gradients_is_refused_at_its_first_call(clip):
    model, other = model_of(), model_of()
    handle = hs.release_gradients(hs.AdamW(model.named_parameters()))
    for m in (model, other):
        m(torch.ones(1, 8, dtype=torch.bfloat16)).sum().backward()
    with pytest.raises(RuntimeError, match=r"clip_grad_norm_: release_gradients has freed 6 gradients"):
        clip(model.parameters(), 1.0)
    assert clip(other.parameters(), 0.5) > 0.5
    assert clip(other.parameters(), 0.5) < 0.51
    handle.remove()
    assert clip(model.parameters(), 1.0) == 0


def test_a_scaler_is_refused_before_a_weight_moves():
    model = model_of()
    optimizer, data = hs.AdamW(model.named_parameters()), torch.ones(1, 8, dtype=torch.bfloat16)
    handle = hs.release_gradients(optimizer)
    before, scaler = snapshot(optimizer), torch.amp.GradScaler("cpu")
    for _ in range(2):
        with pytest.raises(RuntimeError, match=r"a GradScaler has scaled a loss by 65536"):
            scaler.scale(model(data).sum()).backward()
        assert_same_snapshots(snapshot(optimizer), before)
        assert all(p.grad is None for p in model.parameters())
    del scaler
    model(data).sum().backward()
    optimizer.step()
    late = torch.amp.GradScaler("cpu")
    late.scale(model(data).sum()).backward()
    with pytest.raises(RuntimeError, match="a GradScaler steps this optimizer"):
        late.step(optimizer)
    handle.remove()


@pytest.mark.parametrize("again", [hs.accumulate_gradients, hs.release_gradients])
def test_after_remove_parameters_are_free_for_other_hooks(again):
    optimizer = hs.AdamW(model_of().named_parameters())
    hs.release_gradients(optimizer).remove()
    again(optimizer).remove()


def test_micro_batches_are_added_and_the_last_backward_steps_and_frees():
    """With sums that lose nothing, too: both as in a step after backward."""
    for exact_sums in (False, True):
        runs = []
        for release in (False, True):
            model = model_of()
            optimizer = adamw(model)
            if exact_sums:
                hs.accumulate_gradients(model)
            handle = hs.release_gradients(optimizer) if release else None
            for step in range(6):
                block = handle.accumulate() if release and step % 3 < 2 else contextlib.nullcontext()
                with block:
                    model(torch.ones(2, 8, dtype=torch.bfloat16) * (step + 1)).square().mean().backward()
                if step % 3 < 2:
                    assert all(p.grad is not None for p in model.parameters())
                    continue
                assert all((p.grad is None) == release for p in model.parameters())
                optimizer.step(zero_grad=True)
            runs.append(optimizer)
        assert {int(state["step"]) for state in runs[1].state.values()} == {2}
        assert_same_snapshots(*map(snapshot, runs))


def test_each_gradient_is_clipped_by_its_own_norm():
    runs = []
    for release in (False, True):
        model = model_of()
        optimizer = hs.SGD(model.named_parameters(), lr=1.0)
        if release:
            hs.release_gradients(optimizer, max_norm=0.01)
        model(torch.ones(2, 8, dtype=torch.bfloat16)).square().mean().backward()
        if not release:
            norms = [hs.clip_grad_norm_([p], 0.01) for p in model.parameters()]
            assert min(norms) > 0.01
        optimizer.step()
        runs.append(optimizer)
    assert_same_snapshots(*map(snapshot, runs))
    with pytest.raises(ValueError, match=r"^release_gradients: max_norm=-1 is negative"):
        hs.release_gradients(adamw(model_of()), max_norm=-1)


def test_step_parameter_is_the_step_of_one_parameter():
    """As trainers call it that step in backward: with the group and the index, in any order."""
    runs = []
    for alone in (False, True):
        model = model_of()
        optimizer = adamw(model)
        for step in range(3):
            model(torch.ones(2, 8, dtype=torch.bfloat16) * (step + 1)).square().mean().backward()
            if alone:
                for group in reversed(optimizer.param_groups):
                    for i, p in enumerate(group["params"]):
                        optimizer.step_parameter(p, group, i)
                        p.grad = None
                        optimizer.step_parameter(p, group, i)  # without a gradient: nothing
            optimizer.step(zero_grad=True)
            if step == 1:
                optimizer.load_state_dict(optimizer.state_dict())
        runs.append(optimizer)
    assert_same_snapshots(*map(snapshot, runs))
    with pytest.raises(ValueError, match=r"^AdamW: step_parameter got a tensor of shape \(3,\), which"):
        runs[1].step_parameter(torch.nn.Parameter(torch.ones(3)))
    tx = hs.chain(hs.clip_by_global_norm(1.0), hs.scale_by_learning_rate(1e-3))
    measuring = hs.Optimizer(model_of().named_parameters(), tx)
    with pytest.raises(ValueError, match=r"clip_by_global_norm needs all gradients before the step, and"):
        measuring.step_parameter(measuring.param_groups[0]["params"][0])

"""What PyTorch asks of an optimizer beside its steps: hooks, copies, state dicts, arguments, refusals."""

import copy
import gc
import inspect
import pickle
import weakref

import pytest
import torch
from torch.optim import lr_scheduler, swa_utils
from torch.optim.optimizer import register_optimizer_step_post_hook, register_optimizer_step_pre_hook

import halfstep_torch as hs
from on_torch.demands import parameters
from on_torch.steps import assert_same_snapshots, give_gradients, run, snapshot, through_a_file


@pytest.fixture
def clean():
    """Hooks on all optimizers, removed afterwards."""
    handles = []
    yield handles
    for handle in handles:
        handle.remove()


def test_hooks_run_in_their_order_those_of_all_optimizers_outside(make, clean):
    params, seen = parameters(), []
    optimizer = make(params, lr=1e-2)
    p = params[0][1]
    old = p.detach().clone()

    def note(name):
        return lambda *_: seen.append((name, torch.equal(p, old)))

    clean.append(register_optimizer_step_pre_hook(note("before all")))
    clean.append(register_optimizer_step_post_hook(note("after all")))
    optimizer.register_step_pre_hook(note("before"))
    removed = optimizer.register_step_post_hook(note("removed"))
    optimizer.register_step_post_hook(note("after"))
    removed.remove()
    run(params, optimizer, [0])
    assert seen == [("before all", True), ("before", True), ("after", False), ("after all", False)]


def test_a_hook_before_a_step_may_change_its_arguments(make):
    params = parameters()
    optimizer = make(params, lr=1e-2)
    optimizer.register_step_pre_hook(lambda _, args, kwargs: (args, {**kwargs, "zero_grad": True}))
    run(params, optimizer, [0])
    assert all(p.grad is None for _, p in params)


def test_hooks_of_state_dicts_run_in_their_order_and_may_replace_them(make):
    params, seen = parameters(), []
    optimizer = make(params, lr=1e-2)
    run(params, optimizer, [0])
    optimizer.register_state_dict_pre_hook(lambda _: seen.append("before saving"))
    optimizer.register_state_dict_post_hook(lambda _, saved: {**saved, "extra": 1})
    optimizer.register_state_dict_post_hook(lambda _, saved: seen.append("first"), prepend=True)
    saved = optimizer.state_dict()
    assert saved["extra"] == 1

    def without_state(_, saved):
        seen.append("before loading")
        return {**saved, "state": {}}

    optimizer.register_load_state_dict_pre_hook(lambda _, saved: seen.append("second"))
    optimizer.register_load_state_dict_pre_hook(without_state, prepend=True)
    optimizer.register_load_state_dict_post_hook(lambda one: seen.append(len(one.state)))
    optimizer.load_state_dict(saved)
    assert seen == ["before saving", "first", "before loading", "second", 0]
    assert optimizer.state_dict()["param_groups"][0]["halfstep"]["names"]


def test_profiles_name_the_step_by_the_optimizer(make):
    params = parameters()
    optimizer = make(params, lr=1e-2)
    name = type(optimizer).__name__
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]) as profile:
        run(params, optimizer, [0])
        optimizer.zero_grad()
    events = {event.name for event in profile.events()}
    assert {f"Optimizer.step#{name}.step", f"Optimizer.zero_grad#{name}.zero_grad"} <= events
    assert optimizer.step.hooked


def test_copies_go_on_by_themselves_with_the_same_bits(make):
    """With the groups that were added."""
    params = parameters()
    optimizer = make(params[:3], lr=1e-2)
    optimizer.add_param_group({"params": params[3:], "lr": 1e-3})
    run(params, optimizer, range(2))
    copies = [copy.deepcopy(optimizer), pickle.loads(pickle.dumps(optimizer))]
    run(params, optimizer, range(2, 4))
    for other in copies:
        own = [
            (name, p)
            for group in other.param_groups
            for name, p in zip(group["param_names"], group["params"], strict=True)
        ]
        assert not any(p is q for (_, p), (_, q) in zip(params, own, strict=True))
        run(own, other, range(2, 4))
        assert_same_snapshots(snapshot(optimizer), snapshot(other))
        assert repr(other) == repr(optimizer)


def test_an_optimizer_is_freed_with_its_last_name(make):
    params = parameters()
    optimizer = make(params, lr=1e-2)
    run(params, optimizer, range(2))
    dead = weakref.ref(optimizer)
    gc.disable()
    try:
        del optimizer
        assert dead() is None
    finally:
        gc.enable()


def test_equal_runs_have_equal_state_dicts_whenever_they_are_asked_for(make):
    runs = []
    for _ in range(2):
        params = parameters()
        optimizer = make(params, lr=1e-2)
        run(params, optimizer, range(2))
        runs.append(optimizer.state_dict())
    assert str(runs[0]) == str(runs[1]) == str(optimizer.state_dict())


def test_what_a_state_dict_lacks_is_as_the_optimizer_has_it(make):
    """As where an older version has saved it, or one with other types of counts."""
    params, others = parameters(), parameters()
    optimizer, other = make(params, lr=1e-2, maximize=False), make(others, lr=1e-2, maximize=True)
    run(params, optimizer, range(2))
    saved = copy.deepcopy(optimizer.state_dict())
    del saved["param_groups"][0]["maximize"]
    for state in saved["state"].values():
        state["step"] = int(state["step"]) if len(state) % 2 else state["step"].float()
    other.load_state_dict(through_a_file(saved))
    assert other.param_groups[0]["maximize"] is True
    assert {int(state["step"]) for state in other.state.values()} == {2}
    assert all(state["step"].dtype == torch.int64 for state in other.state.values())


def test_states_with_and_without_names_load_into_each_other(make):
    named, bare = parameters(), parameters()
    first, second = make(named, lr=1e-2), make([p for _, p in bare], lr=1e-2)
    run(named, first, range(2))
    second.load_state_dict(through_a_file(first.state_dict()))
    back = make(parameters(), lr=1e-2)
    back.load_state_dict(through_a_file(second.state_dict()))
    for states in zip(first.state.values(), second.state.values(), back.state.values(), strict=True):
        for key, x in states[0].items():
            assert torch.equal(x, states[1][key])
            assert torch.equal(x, states[2][key])
    assert back.param_groups[0]["param_names"] == ["w", "t", "scale", "none"]
    assert "param_names" not in second.param_groups[0]


def test_it_is_printed_with_its_groups(make):
    params = parameters()
    optimizer = make(params[:1])
    optimizer.add_param_group({"params": params[1:], "lr": 0.25})
    text = repr(optimizer)
    assert text.startswith(type(optimizer).__name__)
    assert "Parameter Group 1" in text
    assert "lr: 0.25" in text


@pytest.mark.parametrize(
    ("params", "error", "message"),
    [
        (lambda: [], ValueError, "there are no parameters"),
        (lambda: torch.ones(2), TypeError, "the parameters are a tensor"),
        (lambda: [{"params": {torch.nn.Parameter(torch.ones(2))}}], TypeError, "ordered collections"),
        (lambda: ["w"], TypeError, "can only optimize Tensors"),
        (lambda: [{"lr": 1.0}], KeyError, "params"),
        (lambda: [torch.ones(2, requires_grad=True) * 2], ValueError, "non-leaf"),
        (
            lambda: [("w", torch.nn.Parameter(torch.ones(2))), torch.nn.Parameter(torch.ones(3))],
            ValueError,
            "names",
        ),
        (lambda: [torch.nn.Parameter(torch.ones(2, dtype=torch.complex64))], TypeError, "complex64"),
        (lambda: [torch.nn.Parameter(torch.ones(2, dtype=torch.float64))], TypeError, "float64"),
        (lambda: [torch.nn.Parameter(torch.ones(2).to_sparse())], TypeError, "sparse"),
    ],
    ids=[
        "none",
        "a tensor",
        "a set",
        "a name",
        "no params",
        "no leaf",
        "half named",
        "complex",
        "float64",
        "sparse",
    ],
)
def test_parameters_that_cannot_be_stepped_are_refused(make, params, error, message):
    with pytest.raises(error, match=message):
        make(params())


def test_a_parameter_is_in_one_group(make):
    p = torch.nn.Parameter(torch.ones(2))
    with pytest.raises(ValueError, match="more than one parameter group"):
        make([{"params": [p]}, {"params": [p]}])
    optimizer = make([p])
    with pytest.raises(ValueError, match="more than one parameter group"):
        optimizer.add_param_group({"params": [p]})
    with pytest.raises(TypeError, match="must be a dict"):
        optimizer.add_param_group([p])
    assert len(optimizer.param_groups) == 1
    run([("w", p)], optimizer, range(2))


@pytest.mark.parametrize("kind", ["sparse", "complex", "float64"])
def test_a_gradient_that_cannot_be_used_stops_the_step_for_all(make, kind):
    params = parameters()
    optimizer = make(params, lr=1e-2)
    give_gradients(params, 0)
    p = params[1][1]
    if kind == "sparse":
        p.grad = p.detach().to_sparse()
    else:
        dtype = {"complex": torch.complex64, "float64": torch.float64}[kind]
        p.grad = None
        p.grad_dtype = dtype
        p.grad = torch.ones(p.shape, dtype=dtype)
    before = snapshot(optimizer)
    with pytest.raises(TypeError, match=f"the gradient of 't' is {kind}"):
        optimizer.step()
    assert_same_snapshots(before, snapshot(optimizer))


@pytest.mark.parametrize("lr", [-1.0, float("nan"), float("inf"), "1e-3", None, torch.tensor([1e-3, 1e-3])])
def test_a_learning_rate_that_is_none_is_refused(make, lr):
    with pytest.raises((TypeError, ValueError), match=r"lr|learning_rate"):
        make(parameters(), lr=lr)


@pytest.mark.parametrize("name", ["Adam", "AdamW", "SGD"])
def test_the_arguments_of_torch_stand_where_torch_has_them_and_have_its_defaults(name):
    ours, theirs = (inspect.signature(getattr(package, name)).parameters for package in (hs, torch.optim))
    assert theirs.keys() <= ours.keys()
    placed = [key for key, one in theirs.items() if one.kind is not inspect.Parameter.KEYWORD_ONLY]
    assert list(ours)[: len(placed)] == placed
    assert [one.kind for one in list(ours.values())[: len(placed)]] == [theirs[key].kind for key in placed]
    assert {key: one.default for key, one in theirs.items()} == {key: ours[key].default for key in theirs}


@pytest.mark.parametrize("name", ["foreach", "fused", "differentiable", "amsgrad"])
@pytest.mark.parametrize("make", [hs.Adam, hs.AdamW, hs.SGD])
def test_an_argument_of_torch_is_taken_where_it_changes_nothing_and_refused_where_it_would(make, name):
    if name not in inspect.signature(make).parameters:
        pytest.skip("torch has not got it either")
    for value in (None, False, *([True] if name in ("foreach", "fused") else [])):
        make(parameters(), **{name: value}).add_param_group(
            {"params": [("one", torch.nn.Parameter(torch.ones(2)))], name: value}
        )
    if name not in ("foreach", "fused"):
        message = rf"^{make.__name__}: {name}=True is not supported\. Use {name}=False\.$"
        with pytest.raises(ValueError, match=message):
            make(parameters(), **{name: True})
        with pytest.raises(ValueError, match=message):
            make([{"params": parameters(), name: True}])


def test_averaged_models_and_their_schedule_work(make):
    torch.manual_seed(0)
    model = torch.nn.Sequential(torch.nn.Linear(4, 3), torch.nn.BatchNorm1d(3))
    optimizer = make(model.named_parameters(), lr=0.1)
    averaged = swa_utils.AveragedModel(model)
    scheduler = swa_utils.SWALR(optimizer, swa_lr=0.05, anneal_epochs=2)
    batches = torch.randn(3, 8, 4)
    seen = []
    for x in batches:
        optimizer.zero_grad()
        model(x).square().sum().backward()
        optimizer.step()
        averaged.update_parameters(model)
        scheduler.step()
        seen.append(model[0].weight.detach().clone())
    swa_utils.update_bn(batches, averaged)
    torch.testing.assert_close(averaged.module[0].weight, torch.stack(seen).mean(0))
    assert optimizer.param_groups[0]["lr"] == pytest.approx(0.05)


def test_a_schedulers_state_goes_with_the_optimizers(make):
    runs = []
    for stops in (False, True):
        params = parameters()
        optimizer = make(params, lr=1e-2)
        scheduler = lr_scheduler.CosineAnnealingLR(optimizer, 4)
        for seed in range(4):
            if stops and seed == 2:
                saved = through_a_file([optimizer.state_dict(), scheduler.state_dict()])
                optimizer = make(params, lr=0.5)
                scheduler = lr_scheduler.CosineAnnealingLR(optimizer, 4)
                optimizer.load_state_dict(saved[0])
                scheduler.load_state_dict(saved[1])
            run(params, optimizer, [seed])
            scheduler.step()
        runs.append((snapshot(optimizer), optimizer.param_groups[0]["lr"], scheduler.get_last_lr()))
    assert_same_snapshots(runs[0][0], runs[1][0])
    assert runs[0][1:] == runs[1][1:]

"""What PyTorch asks of an optimizer, its own tests of them as a model: of all of ours."""

import copy
import functools
import gc
import inspect
import io
import pickle
import weakref

import pytest
import torch
from torch.optim import lr_scheduler, swa_utils
from torch.optim.optimizer import register_optimizer_step_post_hook, register_optimizer_step_pre_hook

import halfstep_torch as hs
from on_torch.steps import assert_same_snapshots, snapshot


def adan(params, lr=1e-3, weight_decay=0.0, maximize=False):
    links = (hs.scale_by_adan(), hs.add_decayed_weights(weight_decay), hs.scale_by_learning_rate(lr))
    return hs.Optimizer(params, hs.chain(*links, hs.round_stochastically()), maximize=maximize, compile=False)


MAKERS = {
    "AdamW": functools.partial(hs.AdamW, compile=False),
    "SGD": functools.partial(hs.SGD, compile=False, momentum=0.9),
    "Lion": functools.partial(hs.Lion, compile=False),
    "Lamb": functools.partial(hs.Lamb, compile=False),
    "Lamb16": functools.partial(hs.Lamb16, compile=False),
    "Optimizer": adan,
}


@pytest.fixture(params=MAKERS)
def make(request):
    return MAKERS[request.param]


@pytest.fixture
def clean():
    """Hooks on all optimizers, removed afterwards."""
    handles = []
    yield handles
    for handle in handles:
        handle.remove()


def normal(shape, generator, dtype):
    return torch.randn(shape, generator=generator, dtype=torch.float32).to(dtype)


def parameters(dtype=torch.bfloat16):
    """Return named parameters: a matrix, one that is not row-major, a scalar, one without elements."""
    generator = torch.Generator().manual_seed(0)
    drawn = {shape: normal(shape, generator, dtype) for shape in [(4, 3), (3, 5), (), (0, 2)]}
    of_names = zip(("w", "t", "scale", "none"), drawn.values(), strict=True)
    return [(name, torch.nn.Parameter(x.T if name == "t" else x)) for name, x in of_names]


def give_grads(params, seed):
    generator = torch.Generator().manual_seed(seed)
    for _, p in params:
        p.grad = normal(p.shape, generator, p.dtype)


def run(params, optimizer, seeds):
    for seed in seeds:
        give_grads(params, seed)
        optimizer.step()


def through_a_file(saved):
    file = io.BytesIO()
    torch.save(saved, file)
    file.seek(0)
    return torch.load(file, weights_only=True)


# --- steps ---


def test_a_step_goes_downhill(make):
    torch.manual_seed(0)
    x, y = torch.randn(8, 6), torch.randn(8, 1)
    weight, bias = torch.nn.Parameter(torch.randn(6, 1)), torch.nn.Parameter(torch.randn(1))
    optimizer = make([weight, bias], lr=1e-2)
    scheduler = lr_scheduler.ExponentialLR(optimizer, 0.99)

    def closure():
        optimizer.zero_grad()
        loss = (x @ weight + bias - y).square().mean()
        loss.backward()
        return loss

    losses = []
    for _ in range(20):
        losses.append(optimizer.step(closure).item())
        scheduler.step()
    assert losses[-1] < losses[0]


def test_to_maximize_is_to_minimize_the_opposite(make):
    runs = []
    for maximize in (False, True):
        params = parameters()
        optimizer = make(params, lr=1e-2, maximize=maximize)
        for seed in range(3):
            give_grads(params, seed)
            for _, p in params:
                p.grad = -p.grad if maximize else p.grad
            optimizer.step()
        runs.append(snapshot(optimizer))
    assert_same_snapshots(*runs)


def test_parameters_of_all_dtypes_step_together_as_they_do_alone(make):
    def of(dtypes):
        params = [(f"{name}.{dtype}", p) for dtype in dtypes for name, p in parameters(getattr(torch, dtype))]
        optimizer = make(params, lr=1e-2, weight_decay=0.1)
        for step in range(2):
            for i in range(0, len(params), 4):
                give_grads(params[i : i + 4], step)
            optimizer.step()
        return snapshot(optimizer)

    dtypes = ["float32", "bfloat16", "float16"]
    assert_same_snapshots(of(dtypes), [x for dtype in dtypes for x in of([dtype])])


def test_nothing_happens_without_gradients(make):
    params = parameters()
    optimizer = make(params, lr=1e-2, weight_decay=0.1)
    before = [p.detach().clone() for _, p in params]
    optimizer.step()
    assert not optimizer.state
    assert all(torch.equal(p, old) for (_, p), old in zip(params, before, strict=True))


def test_gradients_of_zero_move_nothing(make):
    params = parameters()
    optimizer = make(params, lr=1e-2, weight_decay=0.0)
    before = [p.detach().clone() for _, p in params]
    for _ in range(2):
        for _, p in params:
            p.grad = torch.zeros_like(p)
        optimizer.step()
    assert all(torch.equal(p, old) for (_, p), old in zip(params, before, strict=True))


def test_a_parameter_without_gradient_is_left_alone(make):
    params = parameters()
    optimizer = make(params, lr=1e-2, weight_decay=0.1)
    run(params, optimizer, range(2))
    give_grads(params, 2)
    frozen = params[0][1]
    frozen.grad = None
    before, state = frozen.detach().clone(), copy.deepcopy(optimizer.state[frozen])
    optimizer.step()
    assert torch.equal(frozen, before)
    assert all(torch.equal(x, optimizer.state[frozen][key]) for key, x in state.items())
    assert int(optimizer.state[params[1][1]]["step"]) == 3


def test_a_group_has_its_own_learning_rate(make):
    params = parameters()
    optimizer = make([{"params": params[:1], "lr": 0.0}, {"params": params[1:]}], lr=1e-1)
    still, moves = (p.detach().clone() for _, p in params[:2])
    run(params, optimizer, range(2))
    assert torch.equal(params[0][1], still)
    assert not torch.equal(params[1][1], moves)


def test_a_group_has_its_own_decay(make):
    params = parameters(torch.float32)
    optimizer = make(
        [{"params": params[:1], "weight_decay": 0.5}, {"params": params[1:]}], lr=1e-1, weight_decay=0.0
    )
    before = [p.detach().clone() for _, p in params]
    for _, p in params:
        p.grad = torch.zeros_like(p)
    optimizer.step()
    assert (params[0][1].abs() < before[0].abs()).all()
    assert all(torch.equal(p, old) for (_, p), old in zip(params[1:], before[1:], strict=True))


@pytest.mark.parametrize(
    "rate",
    [
        torch.tensor(0.125),
        torch.tensor([0.125]),
        torch.tensor([[0.125]]),
        torch.tensor(0.125, dtype=torch.float64),
    ],
    ids=["()", "(1,)", "(1, 1)", "float64"],
)
def test_a_learning_rate_in_a_tensor_is_that_number(make, rate):
    runs = []
    for lr in (0.125, rate.clone()):
        params = parameters()
        optimizer = make(params, lr=lr)
        scheduler = lr_scheduler.StepLR(optimizer, 1, 0.5)
        for seed in range(3):
            run(params, optimizer, [seed])
            scheduler.step()
        runs.append([p.detach() for _, p in params])
        given = lr
    assert all(torch.equal(p, q) for p, q in zip(*runs, strict=True))
    assert optimizer.param_groups[0]["lr"] is given  # a compiled program may hold it
    assert given == 0.125 / 8


@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16])
def test_the_default_dtype_changes_no_bit(make, dtype):
    runs = []
    for default in (torch.float32, dtype):
        torch.set_default_dtype(default)
        try:
            params = parameters(torch.float32)  # which show every bit
            optimizer = make(params, lr=1e-2, weight_decay=0.1)
            run(params, optimizer, range(3))
        finally:
            torch.set_default_dtype(torch.float32)
        runs.append(snapshot(optimizer))
    assert_same_snapshots(*runs)


def test_deterministic_mode_changes_no_bit(make):
    """It fills memory that is asked for with NaN: nothing is read that was not written."""
    runs = []
    for deterministic in (False, True):
        torch.use_deterministic_algorithms(deterministic)
        try:
            params = parameters()
            optimizer = make(params, lr=1e-2, weight_decay=0.1)
            run(params, optimizer, range(3))
        finally:
            torch.use_deterministic_algorithms(False)
        runs.append(snapshot(optimizer))
    assert_same_snapshots(*runs)


def test_weights_stay_leaves_that_want_gradients(make):
    params = parameters()
    run(params, make(params, lr=1e-2), range(2))
    assert all(p.is_leaf and p.requires_grad and p.grad_fn is None for _, p in params)


def test_zero_grad_drops_gradients_or_fills_them_with_zeros(make):
    params = parameters()
    optimizer = make(params)
    give_grads(params, 0)
    grads = [p.grad for _, p in params]
    optimizer.zero_grad(set_to_none=False)
    assert all(p.grad is g and not g.any() for (_, p), g in zip(params, grads, strict=True))
    optimizer.zero_grad()
    assert all(p.grad is None for _, p in params)


# --- closures, hooks, profiles ---


def test_a_closure_runs_once_with_gradients_and_its_value_is_returned(make):
    params, called = parameters(), []
    optimizer = make(params, lr=1e-2)

    def closure():
        assert torch.is_grad_enabled()
        called.append(1)
        loss = sum(p.float().square().sum() for _, p in params)
        loss.backward()
        return loss

    with torch.no_grad():
        loss = optimizer.step(closure)
    assert called == [1]
    assert loss.requires_grad
    assert int(optimizer.state[params[0][1]]["step"]) == 1


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


# --- copies ---


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


# --- what is refused ---


@pytest.mark.parametrize(
    ("params", "error", "message"),
    [
        (lambda: [], ValueError, "empty parameter list"),
        (lambda: torch.ones(2), TypeError, "should be an iterable of Tensors or dicts"),
        (lambda: [{"params": {torch.nn.Parameter(torch.ones(2))}}], TypeError, "ordered collections"),
        (lambda: ["w"], TypeError, "can only optimize Tensors"),
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
    ids=["none", "a tensor", "a set", "a name", "no leaf", "half named", "complex", "float64", "sparse"],
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
    give_grads(params, 0)
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


@pytest.mark.parametrize("name", ["foreach", "fused", "differentiable", "capturable", "amsgrad"])
@pytest.mark.parametrize("make", [hs.Adam, hs.AdamW, hs.SGD])
def test_an_argument_of_torch_is_taken_where_it_changes_nothing_and_refused_where_it_would(make, name):
    if name not in inspect.signature(make).parameters:
        pytest.skip("torch has not got it either")
    for value in (None, False, *([True] if name in ("foreach", "fused") else [])):
        make(parameters(), **{name: value})
    if name not in ("foreach", "fused"):
        with pytest.raises(ValueError, match=rf"{name}=True is not supported\. Use {name}=False"):
            make(parameters(), **{name: True})


# --- what stands around ---


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

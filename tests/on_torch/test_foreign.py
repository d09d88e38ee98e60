"""Optimizers of others step 16-bit weights by `round_weights`."""

import copy
import io
import pickle

import pytest
import torch
from torch.optim.optimizer import register_optimizer_step_post_hook, register_optimizer_step_pre_hook

import halfstep_torch as hs
from halfstep.random_words import leaf_id, mix
from halfstep_torch.engine.float32_copies import row_places, row_words
from halfstep_torch.numbers.arrays import XP
from halfstep_torch.numbers.random_words import leaf_keys
from on_torch.steps import step_by_ones


def net(dtype=torch.bfloat16):
    torch.manual_seed(0)
    return torch.nn.Sequential(torch.nn.Linear(32, 64), torch.nn.Linear(64, 32)).to(dtype)


def train(model, optimizer, steps, first=0):
    for step in range(first, first + steps):
        x = torch.randn(4, 32, generator=torch.Generator().manual_seed(step))
        model(x.to(model[0].weight.dtype)).float().square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()
    return [p.detach().clone() for p in model.parameters()]


def equal(xs, ys):
    return all(torch.equal(x, y) for x, y in zip(xs, ys, strict=True))


def test_the_words_and_the_weights_are_those_of_our_own_rule():
    """Of plain SGD whose learning rate is a power of two: both compute w - lr g without an error between."""
    ours, theirs = net(), net()
    wrapped = hs.round_weights(torch.optim.SGD(theirs.parameters(), lr=2.0**-9), seed=3)
    own = hs.SGD(ours.named_parameters(), lr=2.0**-9, seed=3)
    assert equal(train(ours, own, 3), train(theirs, wrapped, 3))


@pytest.mark.parametrize("shape", [(3, 5, 7), (300, 257), (1 << 18,), (), (0, 4)])
def test_words_are_those_of_the_row_major_index_in_any_shape(shape):
    """In rows of 256, of memory in another order too; one of more elements than are rounded at once."""
    p = torch.nn.Parameter(torch.linspace(1, 2, int(torch.Size(shape).numel())).reshape(shape).bfloat16())
    q = torch.nn.Parameter(p.detach().t().contiguous().t() if p.dim() == 2 else p.detach().clone())
    before = torch.nn.Parameter(torch.ones(3, dtype=torch.bfloat16))
    ours = hs.SGD([("a", torch.nn.Parameter(before.detach().clone())), ("b", p)], lr=2.0**-9)
    theirs = hs.round_weights(torch.optim.SGD([("a", before), ("b", q)], lr=2.0**-9))
    for optimizer in (ours, theirs):
        step_by_ones(optimizer)
    assert torch.equal(p, q)


@pytest.mark.slow
def test_a_parameter_whose_index_passes_2_to_the_32_has_the_high_half_in_its_words():
    """By rows alone: the parameter would take 8 GB."""
    keys, places = leaf_keys(5, [1], [leaf_id("w")], [hs.Role.PARAM]).T, row_places([(1 << 24) + 2])
    first, k0, k1 = (torch.from_numpy(x[-2:]) for x in row_words(keys, *places))
    index = first[:, None] + torch.arange(256, dtype=torch.int32)
    words = mix(XP, index * k0[:, None] + k1[:, None])
    expected = hs.random_words(5, 1, "w", hs.Role.PARAM, (2, 256), offset=1 << 32)
    assert torch.equal(words, expected.view(torch.int32))


@pytest.mark.parametrize("piece_size", [300, None])
def test_copies_and_words_follow_what_is_frozen_memory_that_is_swapped_and_counts_set_by_hand(piece_size):
    """Copies stay from step to step on a CPU, and keys are made ahead; the bits are those of our own SGD."""
    runs = []
    for make in (
        hs.SGD,
        lambda params, lr: hs.round_weights(torch.optim.SGD(params, lr), piece_size=piece_size),
    ):
        params = [torch.nn.Parameter(torch.linspace(1, 2, n).bfloat16()) for n in (300, 280, 7)]
        optimizer = make([(str(i), p) for i, p in enumerate(params)], lr=2.0**-9)
        for step in range(8):
            for p in params:
                p.grad = torch.full_like(p, 1 + step / 4)
            if step == 6:
                state = optimizer.state[params[2]]
                state["round_step" if "round_step" in state else "step"].fill_(10)
            if step in (1, 2):
                params[step].grad = None
            if step == 4:
                params[0].data = params[0].data * 2
            optimizer.step()
        runs.append(params)
    assert equal(*runs)


class Replaces(torch.optim.SGD):
    """A rule that gives weights other memory."""

    def step(self, closure=None):
        for p in self.param_groups[0]["params"]:
            if p.grad is not None:
                p.data = p.data - self.param_groups[0]["lr"] * p.grad


@pytest.mark.parametrize("piece_size", [300, None])
def test_a_rule_may_give_weights_other_memory(piece_size):
    ours, theirs = net(), net()
    runs = [
        train(model, hs.round_weights(make(model.parameters(), lr=2.0**-9), piece_size=piece_size), 4)
        for model, make in ((ours, Replaces), (theirs, torch.optim.SGD))
    ]
    assert equal(*runs)


FOREIGN = [torch.optim.AdamW, torch.optim.RAdam, torch.optim.RMSprop, torch.optim.Adamax, torch.optim.NAdam]


@pytest.mark.parametrize("make", FOREIGN)
@pytest.mark.parametrize("piece_size", [1, 1 << 24, None])
def test_pieces_change_no_bit_and_state_is_that_of_float32_weights(make, piece_size):
    model, whole = net(), net()
    optimizer = hs.round_weights(make(model.parameters(), lr=1e-3), piece_size=piece_size)
    schedule = torch.optim.lr_scheduler.StepLR(optimizer, 1, 0.5)
    got = train(model, optimizer, 1)
    schedule.step()
    got = train(model, optimizer, 2, first=1)
    other = hs.round_weights(make(whole.parameters(), lr=1e-3), piece_size=None)
    train(whole, other, 1)
    other.param_groups[0]["lr"] = 5e-4
    assert equal(got, train(whole, other, 2, first=1))
    floats = [x for state in optimizer.state.values() for x in state.values() if x.is_floating_point()]
    assert {x.dtype for x in floats} == {torch.float32}


def test_small_updates_arrive_on_average():
    w = torch.nn.Parameter(torch.ones(1 << 16, dtype=torch.bfloat16))
    optimizer = hs.round_weights(torch.optim.SGD([w], lr=1e-4))
    for _ in range(10):
        w.grad = torch.ones_like(w)
        optimizer.step()
    # A step moves by 2^-8 with probability 1e-4 / 2^-8; 5 deviations of the mean of 2^16 such sums of 10.
    assert abs(w.detach().float().mean().item() - (1 - 1e-3)) < 5 * (10 * 1e-4 * 2**-8 / 2**16) ** 0.5


def test_a_run_goes_on_from_its_state_dict_to_the_bit():
    whole = net()
    run = train(whole, hs.round_weights(torch.optim.AdamW(whole.parameters(), lr=1e-3), seed=7), 4)
    model, file = net(), io.BytesIO()
    optimizer = hs.round_weights(torch.optim.AdamW(model.parameters(), lr=1e-3), seed=7)
    train(model, optimizer, 2)
    torch.save({"model": model.state_dict(), "optimizer": optimizer.state_dict()}, file)
    file.seek(0)
    saved, other = torch.load(file, weights_only=True), net()
    resumed = hs.round_weights(torch.optim.AdamW(other.parameters(), lr=5.0), seed=1)
    train(other, resumed, 2)  # as often as the other, by words of another seed
    other.load_state_dict(saved["model"])
    resumed.load_state_dict(saved["optimizer"])
    assert equal(run, train(other, resumed, 2, first=2))


def test_a_copy_of_a_run_goes_on_to_the_bit():
    model = net()
    run = model, hs.round_weights(torch.optim.AdamW(model.parameters(), lr=1e-3))
    train(*run, 2)
    copies = copy.deepcopy(run), pickle.loads(pickle.dumps(run))
    after = train(*run, 3, first=2)
    assert all(equal(after, train(*other, 3, first=2)) for other in copies)


def test_the_optimizer_that_was_passed_is_not_stepped_alone():
    optimizer = torch.optim.AdamW(net().parameters())
    for kept in (hs.round_weights(optimizer), None):
        with pytest.raises(RuntimeError, match=r"Step what was returned: optimizer = round_weights"):
            optimizer.step()
        del kept


def test_diagnose_refuses_what_was_returned_and_leaves_weights():
    model = net()
    optimizer = hs.round_weights(torch.optim.RAdam(model.parameters(), lr=1e-5))
    model(torch.ones(1, 32, dtype=torch.bfloat16)).sum().backward()
    before = [p.detach().clone() for p in model.parameters()]
    with pytest.raises(TypeError, match="Diagnose the optimizer before it is wrapped"):
        hs.diagnose(model, optimizer)
    assert equal(before, list(model.parameters()))


def test_a_scheduler_of_the_optimizer_that_was_passed_is_refused():
    model = net()
    optimizer = torch.optim.AdamW(model.parameters())
    torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.9)
    with pytest.raises(RuntimeError, match="a scheduler was built with the optimizer that was passed"):
        train(model, hs.round_weights(optimizer), 1)


def test_float32_weights_are_stepped_as_they_are():
    ours, theirs = net(torch.float32), net(torch.float32)
    wrapped = hs.round_weights(torch.optim.AdamW(ours.parameters(), lr=1e-3))
    assert equal(train(ours, wrapped, 3), train(theirs, torch.optim.AdamW(theirs.parameters(), lr=1e-3), 3))


class LooksAtAll(torch.optim.SGD):
    """As Prodigy does: an entry of the group grows with all gradients."""

    def step(self, closure=None):
        for group in self.param_groups:
            grads = [p.grad for p in group["params"] if p.grad is not None]
            group["d"] = group.get("d", 0.0) + sum(float(g.abs().sum()) for g in grads)
        super().step(closure)


def test_what_cannot_be_wrapped_is_refused():
    model = net()
    with pytest.raises(TypeError, match=r"^round_weights: int is no optimizer"):
        hs.round_weights(3)
    with pytest.raises(TypeError, match=r"^round_weights: AdamW rounds weights itself"):
        hs.round_weights(hs.AdamW(model.parameters()))
    with pytest.raises(TypeError, match=r"^round_weights: LBFGS needs a closure"):
        hs.round_weights(torch.optim.LBFGS(model.parameters()))
    with pytest.raises(ValueError, match=r"^round_weights: piece_size=0 is no length"):
        hs.round_weights(torch.optim.SGD(model.parameters()), piece_size=0)
    stepped = torch.optim.AdamW(net(torch.float32).parameters())
    stepped.state[stepped.param_groups[0]["params"][0]]["step"] = torch.tensor(1)
    with pytest.raises(ValueError, match=r"^round_weights: the optimizer has state of steps"):
        hs.round_weights(stepped)
    optimizer = hs.round_weights(torch.optim.SGD(model.parameters(), lr=1e-3))
    with pytest.raises(
        ValueError, match=r"^round_weights: a parameter of shape \(3,\) of a new group has no"
    ):
        optimizer.add_param_group({"params": [torch.nn.Parameter(torch.ones(3))]})
    pieces = hs.round_weights(LooksAtAll(model.parameters(), lr=1e-3), piece_size=1)
    with pytest.raises(ValueError, match=r"the rule looks at all parameters\. Build it with"):
        train(model, pieces, 1)
    model = net()
    whole = hs.round_weights(LooksAtAll(model.parameters(), lr=1e-3), piece_size=None)
    train(model, whole, 1)
    assert whole.param_groups[0]["d"] > 0


def test_a_state_dict_of_the_optimizer_alone_is_refused_and_nothing_changes():
    model, plain = net(), net(torch.float32)
    optimizer, theirs = torch.optim.AdamW(model.parameters()), torch.optim.AdamW(plain.parameters())
    rounded = hs.round_weights(optimizer)
    train(model, rounded, 2)
    train(plain, theirs, 1)
    for wrong, message in ((theirs.state_dict(), "'round_seed' of a group"), ({}, "not a state dict")):
        with pytest.raises(
            (TypeError, ValueError), match=f"load_state_dict: .*{message}.*Pass what state_dict"
        ):
            rounded.load_state_dict(wrong)
        assert {int(rounded.state[p]["round_step"]) for p in model.parameters()} == {2}


def momentum(params, **options):
    return torch.optim.SGD(params, lr=2.0**-4, momentum=0.5, **options)


def rounded(params, **options):
    return hs.round_weights(momentum(params, **options))


def ones(*names, dtype=torch.float32):
    return [(name, torch.nn.Parameter(torch.ones(3, dtype=dtype))) for name in names]


def clear(optimizer, _):
    optimizer.state.clear()


def pop(optimizer, params):
    optimizer.state.pop(params[0])


def replace_array(optimizer, params):
    optimizer.state[params[0]]["momentum_buffer"] = torch.full((3,), 8.0)


def change_in_place(optimizer, params):
    optimizer.state[params[0]]["momentum_buffer"].mul_(0.25)


def freeze(optimizer, params):
    optimizer.param_groups[0]["params"] = params[1:]


def add(optimizer, params):
    [(name, p)] = ones("later")
    p.grad = torch.ones(3)
    params.append(p)
    optimizer.add_param_group({"params": [(name, p)], "lr": 0.5})


@pytest.mark.parametrize("edit", [clear, pop, replace_array, change_in_place, freeze, add])
def test_state_and_groups_are_used_as_they_stand(edit):
    """float32 weights have the bits of torch's own class, after an edit of the result's state or groups."""
    runs = []
    for make in (momentum, rounded):
        named = ones("a", "b")
        params = [p for _, p in named]
        optimizer = make(named)
        for step in range(5):
            for p in params:
                p.grad = torch.full_like(p, 1.0 + step)
            if step == 2:
                edit(optimizer, params)
            optimizer.step()
        runs.append(params)
    assert equal(*runs)


def test_a_state_dict_of_another_optimizer_is_copied():
    runs = []
    for _ in range(2):
        named = ones("a", dtype=torch.bfloat16)
        runs.append((named[0][1], hs.round_weights(torch.optim.AdamW(named))))
        step_by_ones(runs[-1][1])
    (p, one), (q, other) = runs
    other.load_state_dict(one.state_dict())
    before = {key: x.clone() for key, x in other.state[q].items()}
    for _ in range(2):
        p.grad = torch.full_like(p, 5.0)
        one.step()
    assert all(torch.equal(x, before[key]) for key, x in other.state[q].items())


def test_hooks_of_all_optimizers_run_once_a_step():
    ran = []
    handles = [
        register_optimizer_step_pre_hook(lambda o, *_: ran.append(type(o).__name__)),
        register_optimizer_step_post_hook(lambda o, *_: ran.append(type(o).__name__)),
    ]
    try:
        inner = momentum(ones("a"))
        inner.register_step_post_hook(lambda *_: ran.append("its own"))
        step_by_ones(hs.round_weights(inner))
    finally:
        for handle in handles:
            handle.remove()
    assert ran == ["RoundedWeights", "its own", "RoundedWeights"]


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float64])
def test_a_default_dtype_changes_no_bit(dtype):
    def run():
        model = net()
        return train(model, hs.round_weights(torch.optim.AdamW(model.parameters(), lr=1e-3)), 3)

    wanted = run()
    x = torch.get_default_dtype()
    model = net()
    torch.set_default_dtype(dtype)
    try:
        optimizer = hs.round_weights(torch.optim.AdamW(model.parameters(), lr=1e-3))
        for step in range(3):
            batch = torch.randn(4, 32, generator=torch.Generator().manual_seed(step), dtype=torch.float32)
            model(batch.to(torch.bfloat16)).float().square().mean().backward()
            optimizer.step()
            optimizer.zero_grad()
    finally:
        torch.set_default_dtype(x)
    assert equal(list(model.parameters()), wanted)


class Fails(torch.optim.SGD):
    """Of which a step fails after moments have changed."""

    fails = False

    def step(self, closure=None):
        super().step(closure)
        if self.fails:
            raise MemoryError


def test_a_step_that_failed_in_the_middle_is_not_repeated_on_its_state():
    inner = Fails(ones("a", dtype=torch.bfloat16), lr=0.5, momentum=0.5)
    optimizer = hs.round_weights(inner)
    step_by_ones(optimizer)
    saved = copy.deepcopy(optimizer.state_dict())
    inner.fails = True
    with pytest.raises(MemoryError):
        step_by_ones(optimizer)
    inner.fails = False
    for call in (optimizer.step, optimizer.state_dict):
        with pytest.raises(
            RuntimeError, match=r"a step failed .* Load a state dict and the model, or clear opt"
        ):
            call()
    optimizer.load_state_dict(saved)
    step_by_ones(optimizer)
    optimizer.state.clear()
    step_by_ones(optimizer)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32])
def test_a_scaler_of_gradients_changes_no_bit_and_skips_infinities(dtype):
    runs = []
    for scaled in (False, True):
        named = [("a", torch.nn.Parameter(torch.linspace(1, 2, 300).to(dtype))), *ones("b")]
        optimizer = hs.round_weights(torch.optim.AdamW(named, lr=2.0**-6))
        scaler = torch.amp.GradScaler("cpu", init_scale=1024.0, enabled=scaled)
        for step in range(4):
            loss = sum(((step + 1) * p.float()).sum() for _, p in named)
            scaler.scale(loss).backward()
            if step == 2:
                named[0][1].grad[0] = torch.inf
            if step != 2 or scaled:
                scaler.step(optimizer)
                scaler.update()
            optimizer.zero_grad()
        runs.append([p for _, p in named])
    assert equal(*runs)


def test_a_group_that_is_added_resumes_with_the_others():
    named = ones("a", "b", dtype=torch.bfloat16)
    optimizer = hs.round_weights(torch.optim.AdamW(named[:1], lr=1e-2))
    step_by_ones(optimizer)
    optimizer.add_param_group({"params": named[1:]})
    step_by_ones(optimizer)
    model = copy.deepcopy(named)
    other = hs.round_weights(torch.optim.AdamW([{"params": model[:1]}, {"params": model[1:]}], lr=1e-2))
    other.load_state_dict(optimizer.state_dict())
    for each in (optimizer, other):
        step_by_ones(each)
    assert equal([p for _, p in named], [p for _, p in model])
    assert {int(state["round_step"]) for state in optimizer.state.values()} == {2, 3}


def test_what_does_not_take_the_result_names_an_alternative(tmp_path):
    model = net()
    optimizer = hs.round_weights(torch.optim.AdamW(model.parameters()))
    for call in (
        lambda: hs.describe(optimizer),
        lambda: hs.memory_report(model, optimizer),
        lambda: hs.float32_params(optimizer),
        lambda: hs.save_state(tmp_path / "file", model, optimizer),
    ):
        with pytest.raises(
            TypeError, match=r"is RoundedWeights\. .* use an optimizer of halfstep_torch, such as Ad"
        ):
            call()


def test_the_monitor_counts_no_update_as_lost():
    model = net()
    optimizer = hs.round_weights(torch.optim.RAdam(model.parameters(), lr=1e-5))
    monitor, rows = hs.Monitor(optimizer, every=1), []
    for step in range(3):
        train(model, optimizer, 1, first=step)
        rows.append(monitor.read())
    assert [row["updates_lost"] for row in rows if row] == [0.0] * sum(map(bool, rows))
    assert any(rows)


def test_frozen_parameters_of_other_kinds_stay_and_shared_memory_is_refused():
    frozen = torch.nn.Parameter(torch.zeros(3, dtype=torch.uint8), requires_grad=False)
    [(_, a), (_, b)] = named = ones("a", "b", dtype=torch.bfloat16)
    optimizer = rounded([*named, ("frozen", frozen)])
    a.grad, b.grad = torch.ones_like(a), torch.ones_like(b)
    optimizer.step()
    b.data = a.data
    before = a.detach().clone()
    with pytest.raises(ValueError, match=r"^round_weights: the weights 'a' and 'b' share memory"):
        optimizer.step()
    assert torch.equal(a, before)
    with pytest.raises(ValueError, match=r"^round_weights: the weights 'a' and 'b' share memory"):
        rounded(named)


def test_a_negative_count_of_words_is_refused():
    [(_, a)] = named = ones("a", dtype=torch.bfloat16)
    optimizer = rounded(named)
    step_by_ones(optimizer)
    optimizer.state[a]["round_step"].fill_(-5)
    with pytest.raises(ValueError, match=r"^round_weights: the step of 'a' is -5, and counts start at 0"):
        step_by_ones(optimizer)

"""`capturable=True`: a step that a CUDA graph replays has the bits of plain steps."""

import contextlib
import io
import operator
import types

import numpy as np
import pytest
import torch
import torch.distributed as dist
from torch.distributed.tensor import DTensor, Shard, init_device_mesh

import halfstep_torch as hs
from halfstep.rule import Rule, moment
from halfstep_torch.engine.capture import check_capture
from halfstep_torch.engine.number_places import flat
from halfstep_torch.numbers.random_words import leaf_keys
from halfstep_torch.numbers.tensor_numbers import tensor_keys
from halfstep_torch.say_once import say_once
from on_torch.emulated_device import Graph, emulated_device
from on_torch.kernel_steps import MAKES, needs_compiler, parameters
from on_torch.steps import assert_same_snapshots, snapshot

SHAPES = [(15,), (3, 100), (1,), (9, 456)]
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


def make(name="default", entries=None, **options):
    params = parameters(shapes=SHAPES)
    optimizer = MAKES[name]([{"params": params, **(entries or {})}], compile=True, **options)
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


class AtCount(Rule):
    """A rule whose numbers compare the step count in each way."""

    name = "at_count"
    how: str = "eq"
    mu = moment(always="float32")

    def numbers(self, h, t, op):
        return {"now": op.float32(getattr(operator, self.how)(t, 3)), "at": op.float32((t + 1) % 2)}

    def update(self, g, p, n, m, op):
        return m.mu.round(m.mu.value + g * (n.now + n.at))


@pytest.mark.parametrize("how", ["eq", "ne", "lt", "le", "gt", "ge"])
def test_a_comparison_of_counts_on_a_device_is_that_of_the_host(how):
    link = hs.chain(AtCount(how), hs.scale_by_learning_rate(0.1)).links[0]
    h = link.read("test", {})
    made = link.tensor_numbers({}, torch.arange(1, 7)[:, None], torch.ones(6, 1))
    host = np.array([flat(link.step_numbers(h, step)) for step in range(1, 7)], np.float32)
    assert np.array_equal(torch.cat([x.expand(6, 1) for x in made], 1).numpy(), host)
    assert {0, 1} == {*host[:, 0]}


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
    assert len(graph.launches) == 2 * len(ours[1]._launches[None].batches)
    assert {*graph.operations} <= NO_COPIES


@contextlib.contextmanager
def captured(name="default", steps=2, **entries):
    """Yield the parameters of an optimizer, the optimizer, and a graph of its step."""
    with emulated_device():
        params, optimizer = make(name, entries, capturable=True)
        for step in range(steps):
            give(params, step)
            optimizer.step()
        graph = Graph()
        with graph.capture():
            optimizer.step()
        yield params, optimizer, graph


@needs_compiler
@pytest.mark.parametrize("name", ["default", "feedback"])
def test_a_rate_on_the_device_is_read_at_each_replay(name):
    rate, plain = torch.tensor(1e-2), make(name, {"lr": torch.tensor(1e-2)})
    with captured(name, lr=rate, weight_decay=torch.tensor(0.1)) as (params, optimizer, graph):
        step_both((params, None), plain, range(2), lambda: None)
        for step in range(2, 5):
            step_both((params, optimizer), plain, [step], graph.replay)
            for of_group in (rate, plain[1].param_groups[0]["lr"]):
                of_group.mul_(8 if step % 2 else 0.25)  # as schedulers of torch do
        assert optimizer.param_groups[0]["lr"] is rate
        assert_same_snapshots(snapshot(optimizer), snapshot(plain[1]))


@needs_compiler
@pytest.mark.parametrize("entry", [{"lr": 1e-3}, {"weight_decay": 0.5}, {"betas": (0.8, 0.999)}])
def test_a_number_of_the_host_that_changes_after_a_capture_is_named(entry, caplog):
    with captured() as (_, optimizer, _):
        caplog.clear()
        optimizer.zero_grad(set_to_none=False)
        assert not caplog.records
        optimizer.param_groups[0].update(entry)
        say_once.cache_clear()
        optimizer.zero_grad(set_to_none=False)
        (key,) = entry
        assert f"{key} of a param group is" in caplog.text
        assert "Capture anew" in caplog.text


@needs_compiler
def test_the_rate_of_a_capture_is_named_where_it_is_a_float(caplog):
    say_once.cache_clear()
    with captured():
        assert "lr of param group 0 is a float, so replays keep 0.01" in caplog.text


@needs_compiler
def test_counts_are_whole_numbers_beside_the_weights_and_go_past_256():
    with captured() as (params, optimizer, graph):
        for state in optimizer.state.values():
            state["step"].fill_(254)
        for _ in range(4):
            graph.replay()
        count = optimizer.state[params[0][1]]["step"]
        assert (count.dtype, count.shape, int(count)) == (torch.int64, (), 258)
        saved = optimizer.state_dict()
        optimizer.load_state_dict(state_dict=saved)
        assert int(optimizer.state[params[0][1]]["step"]) == 258


@needs_compiler
def test_a_weight_without_gradient_in_a_capture_is_named():
    with captured() as (params, optimizer, graph):
        params[1][1].grad = None
        with graph.capture(), pytest.raises(RuntimeError, match="the weight 'w1' has no gradient in this"):
            optimizer.step()
        params[1][1].requires_grad_(False)
        optimizer.step()
        with graph.capture():
            optimizer.step()


@needs_compiler
def test_gradients_that_stay_in_place_are_advised_where_backward_is_outside(caplog):
    say_once.cache_clear()
    with captured() as (params, optimizer, _):
        assert "zero_grad(set_to_none=False)" in caplog.text
        caplog.clear()
        say_once.cache_clear()
        for _, p in params:  # as a backward inside of the graph makes them
            p.grad = p.grad.clone()
        again = Graph()
        with again.capture():
            optimizer.step()
        assert "set_to_none" not in caplog.text
        before = snapshot(optimizer)
        again.replay()
        assert any(map(np.any, map(np.not_equal, snapshot(optimizer), before)))


@needs_compiler
def test_replays_read_the_gradients_and_numbers_of_the_capture_after_other_steps():
    plain = make()
    with captured() as (params, optimizer, graph):
        step_both((params, None), plain, range(2), lambda: None)
        held = [p.grad for _, p in params]
        for step in range(2, 6):
            replays, lr = step % 2, (5e-2, 1e-2)[step % 2]
            for (_, p), grad in zip(params, held, strict=True):
                p.grad = grad if replays else grad.clone()
            optimizer.param_groups[0]["lr"] = plain[1].param_groups[0]["lr"] = lr
            step_both((params, optimizer), plain, [step], graph.replay if replays else optimizer.step)
        assert_same_snapshots(snapshot(optimizer), snapshot(plain[1]))


@needs_compiler
def test_a_rate_on_the_device_stays_there_when_it_is_loaded():
    rate = torch.tensor(1e-2)
    with captured(lr=rate) as (_, optimizer, _):
        file = io.BytesIO()
        torch.save(optimizer.state_dict(), file)
        rate.fill_(0.5)
        saved = torch.load(io.BytesIO(file.getvalue()), weights_only=True)
        for lr in (saved["param_groups"][0]["lr"], 1e-2):
            saved["param_groups"][0]["lr"] = lr
            optimizer.load_state_dict(saved)
            loaded = optimizer.param_groups[0]["lr"]
            assert isinstance(loaded, torch.Tensor)
            assert loaded.dtype == torch.float32
            assert float(loaded) == np.float32(1e-2)
        hs.load_float32_state_dict(optimizer, hs.float32_state_dict(optimizer))
        assert isinstance(optimizer.param_groups[0]["lr"], torch.Tensor)


def load(params, optimizer):
    optimizer.load_state_dict(state_dict=optimizer.state_dict())


def load_float32(params, optimizer):
    hs.load_float32_state_dict(optimizer, hs.float32_state_dict(optimizer))


def add_group(params, optimizer):
    optimizer.add_param_group({"params": [("more", torch.nn.Parameter(torch.zeros(3)))]})


def move_state(params, optimizer):
    state = optimizer.state[params[0][1]]
    state["exp_avg"] = state["exp_avg"].clone()
    optimizer.step()


@needs_compiler
@pytest.mark.parametrize("change", [load, load_float32, add_group, move_state])
def test_replays_change_nothing_once_their_state_is_replaced(change, caplog):
    say_once.cache_clear()
    with captured() as (params, optimizer, graph):
        change(params, optimizer)
        assert "replays of steps that were captured before change nothing" in caplog.text
        before = snapshot(optimizer)
        graph.replay()
        assert_same_snapshots(snapshot(optimizer), before)
        optimizer.step()
        say_once.cache_clear()


@needs_compiler
def test_float32_weights_with_bfloat16_gradients_are_captured():
    ours, plain = (parameters(torch.float32, SHAPES) for _ in "ab")
    for _, p in [*ours, *plain]:
        p.grad_dtype = None
    options = {"lr": 1e-2, "nu_dtype": "bfloat16"}
    graph, (a, b) = Graph(), (hs.AdamW(x, compile=True, **options) for x in (ours, plain))
    with emulated_device():
        a.param_groups[0]["capturable"] = True
        for step in range(4):
            for _, p in [*ours, *plain]:
                g = torch.randn(p.shape, generator=torch.Generator().manual_seed(step)).bfloat16()
                p.grad = g if p.grad is None else p.grad.copy_(g)
            b.step()
            if step == 2:
                with graph.capture():
                    a.step()
            (a.step if step < 2 else graph.replay)()
    assert_same_snapshots(snapshot(a), snapshot(b))


def scaled_loss(params, optimizer):
    optimizer.grad_scale = torch.tensor(4.0)
    give(params, 0)
    optimizer.step()


def transposed(params, optimizer):
    params[1][1].data = torch.zeros(100, 3, dtype=torch.bfloat16).t()
    give(params, 0)
    optimizer.step()


def stepped(params, optimizer):
    give(params, 0)
    optimizer.step()


CANNOT = {
    "a schedule": (
        lambda p: hs.AdamW(p, lr=lambda t: 1e-3),
        stepped,
        "is a Python function.*Pass lr as a tensor",
    ),
    "norms": (MAKES["Lamb"], stepped, "scale_by_trust_ratio reads whole arrays"),
    "clipping": (MAKES["clipped"], stepped, "clip_by_global_norm reads whole arrays"),
    "a power": (hs.Adafactor, stepped, "reads whole arrays"),
    "a scaler": (hs.AdamW, scaled_loss, "a GradScaler gives the host the scale"),
    "layouts": (hs.AdamW, transposed, "the weight 'w1', or its gradient, is not contiguous"),
    "a decay of 0": (
        lambda p, **o: hs.AdamW(p, weight_decay=torch.tensor(0.0), **o),
        stepped,
        "the number in weight_decay of param group 0, a tensor, leaves add_decayed_weights out",
    ),
}


@needs_compiler
@pytest.mark.parametrize("case", CANNOT)
def test_what_cannot_be_captured_is_named_at_the_first_step(case):
    build, step, problem = CANNOT[case]
    with emulated_device():
        params = parameters(shapes=SHAPES)
        optimizer = build(params, compile=True) if case != "a schedule" else build(params)
        optimizer._compile.choice = True
        optimizer.param_groups[0]["capturable"] = True
        with pytest.raises(RuntimeError, match=f"capturable=True, but .*{problem}"):
            step(params, optimizer)
        assert all(int(state["step"]) == 0 for state in optimizer.state.values())


def test_a_sharded_weight_is_named_because_processes_agree_on_the_host(tmp_path):
    dist.init_process_group("gloo", init_method=f"file://{tmp_path / 'store'}", rank=0, world_size=1)
    try:
        mesh = init_device_mesh("cpu", (1,))
        p = torch.nn.Parameter(DTensor.from_local(torch.ones(4, 3), mesh, [Shard(0)]))
        optimizer = hs.AdamW([("w", p)], capturable=True, compile=False)
        p.grad = torch.ones_like(p)
        with emulated_device(), pytest.raises(RuntimeError, match="the weight 'w' is sharded"):
            optimizer.step()
    finally:
        dist.destroy_process_group()


def test_a_step_in_a_capture_needs_capturable_and_a_step_before():
    params, graph = parameters(shapes=SHAPES), Graph()
    give(params, 0)
    for capturable, problem in ((False, "capturable is False"), (True, "records a step that is not built")):
        optimizer = hs.AdamW(params, capturable=capturable, compile=False)
        with graph.capture(), pytest.raises(RuntimeError, match=problem):
            optimizer.step()
        optimizer.step()  # outside it works, and on a CPU it is a plain step
        with graph.capture(), pytest.raises(RuntimeError, match=r"Build the optimizer with|is not built"):
            optimizer.step()


def test_a_rate_elsewhere_is_named_in_a_capture():
    group = types.SimpleNamespace(capturable=True, index=0, entries={"lr": torch.tensor(1e-3)})
    batch = types.SimpleNamespace(group=group, device=torch.device("meta"))
    with pytest.raises(RuntimeError, match=r"lr of param group 0 is a tensor on cpu.*Write lr\.to\('meta'\)"):
        check_capture("AdamW", [batch], [])


def test_on_a_cpu_a_capturable_step_is_a_plain_one():
    ours, plain = make(capturable=True), make()
    step_both(ours, plain, range(3))
    assert_same_snapshots(snapshot(ours[1]), snapshot(plain[1]))
    assert ours[1].param_groups[0]["capturable"] is True
    assert "capturable" not in plain[1].param_groups[0]

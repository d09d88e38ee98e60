"""What is said once at the first step, and what processes that train replicas compare."""

import collections
import contextlib
import logging

import pytest
import torch

import halfstep_torch as hs
from halfstep_torch.distributed.replicas import compare, compare_gradients
from halfstep_torch.distributed.window import Window
from halfstep_torch.engine.plan import Plan
from halfstep_torch.engine.slots import Slot
from halfstep_torch.say_once import say_once
from on_torch.processes import in_processes


@pytest.fixture(autouse=True)
def _nothing_was_said():
    say_once.cache_clear()


def step(make, grads, dtype=torch.bfloat16, steps=1, **options):
    """Step parameters with such gradients, and return them."""
    params = [torch.nn.Parameter(torch.ones(len(grad), dtype=dtype)) for grad in grads]
    optimizer = make(params, **options)
    for _ in range(steps):
        for p, grad in zip(params, grads, strict=True):
            p.grad = torch.tensor(grad).to(dtype)
        optimizer.step()
    return params


def said(caplog) -> list[str]:
    return [record.getMessage() for record in caplog.records]


def test_parameters_without_names_are_spoken_of_once(caplog):
    step(hs.AdamW, [[1.0], [2.0]], steps=2)
    assert len(said(caplog)) == 1
    assert said(caplog)[0].startswith("AdamW: the parameters have no names, so their random words follow")


def test_a_second_optimizer_without_names_is_spoken_of_once(caplog):
    for _ in range(3):
        step(hs.AdamW, [[1.0]], steps=2)
    assert len(said(caplog)) == 1
    assert said(caplog)[0].startswith("AdamW: several optimizers without names have one seed. Each draws")


@pytest.mark.parametrize("quiet", ["named", "one parameter", "no random words"])
def test_names_are_not_spoken_of_where_they_do_not_matter(quiet, caplog):
    if quiet == "named":
        step(lambda params: hs.AdamW([(f"w{i}", p) for i, p in enumerate(params)]), [[1.0], [2.0]])
    elif quiet == "one parameter":
        step(hs.AdamW, [[1.0]])
    else:
        step(hs.SGD, [[1.0], [2.0]], param_storage="split16")
    assert said(caplog) == []


def test_float16_gradients_without_a_scaler_are_spoken_of_once(caplog):
    step(hs.SGD, [[1.0]], torch.float16, steps=2, param_storage="master")
    assert [message[:60] for message in said(caplog)] == [
        "SGD: gradients are float16 and the loss is not scaled: those"
    ]


@pytest.mark.parametrize(("size", "word"), [(200.0, "large"), (1e-8, "small"), (1e-3, None)])
def test_gradients_that_8_bits_without_a_scale_do_not_hold_are_spoken_of(size, word, caplog):
    step(hs.AdamW, [[size, 0.0]], **hs.recipes.one_pass)
    assert [f"gradients of '0' are so {word}" in message for message in said(caplog)] == (
        [True] if word else []
    )


# --- replicas ---


def slots(names=("a", "b"), grad=1.0, step=1, size=3):
    plan = Plan((), (), (), (), 0, torch.float32, False)
    params = [torch.nn.Parameter(torch.ones(size)) for _ in names]
    for p in params:
        p.grad = torch.full((size,), grad)
    made = [Slot(p, name, plan, Window.full(p.shape)) for p, name in zip(params, names, strict=True)]
    for slot in made:
        slot.counter = torch.tensor(step - 1)
    return made


def compared(first, second, seeds=((0,), (0,))):
    """Let two processes compare, by one store."""
    store = torch.distributed.HashStore()
    compare("AdamW", store, 0, first, [seeds[0]], collections.Counter())
    compare("AdamW", store, 1, second, [seeds[1]], collections.Counter())


def test_replicas_that_agree_are_left_alone():
    compared(slots(), slots())


def test_replicas_with_other_seeds_or_steps_are_refused():
    with pytest.raises(RuntimeError) as error:
        compared(slots(), slots(), seeds=((7, None), (8, None)))
    assert str(error.value) == (
        "AdamW: replicas of a model would drift apart: rank 1 has the seeds [8], rank 0 [7]. "
        "Use one seed on all ranks, and load the same state."
    )
    with pytest.raises(RuntimeError, match="rank 1 has the steps 4, rank 0 1"):
        compared(slots(), slots(step=4))


@pytest.mark.parametrize("other", [{"names": ("a", "c")}, {"grad": 2.0}])
def test_processes_that_train_models_of_their_own_are_not_compared(other):
    compared(slots(), slots(**other), seeds=((7,), (8,)))


def test_a_second_run_in_the_same_processes_may_have_another_seed():
    store, counters = torch.distributed.HashStore(), [collections.Counter(), collections.Counter()]
    for seed in (1, 2):
        for rank in range(2):
            compare("AdamW", store, rank, slots(), [[seed]], counters[rank])


def test_processes_whose_gradients_differ_behind_zeros_are_not_compared():
    def embedding(grad):
        (slot,) = slots(["a"], grad=0.0, size=9)
        slot.param.grad[8] = grad
        return [slot]

    compared(embedding(1.0), embedding(2.0), seeds=((7,), (8,)))


@pytest.mark.parametrize("apart", [False, True])
def test_replicas_whose_counts_come_apart_are_spoken_of_at_a_hundredth_step(apart, caplog):
    """At the same count each has another gradient: that of another step."""
    store = torch.distributed.HashStore()
    for rank in range(2):
        compare_gradients("AdamW", store, rank, "key", slots(grad=1.0 + rank * apart, step=100))
    lines = said(caplog)
    assert len(lines) == apart
    assert all("on ranks 0 and 1 have different gradients at step 100" in line for line in lines)


def join_with_uneven_inputs(rank: int) -> None:
    """After `join` the second process has made three steps more; zeros at first tell nothing of replicas."""
    say_once.cache_clear()
    torch.manual_seed(0)
    model = torch.nn.parallel.DistributedDataParallel(torch.nn.Linear(8, 8).bfloat16())
    optimizer, messages = hs.SGD(model.named_parameters(), 0.01), []
    handler = logging.Handler()
    handler.emit = lambda record: messages.append(record.getMessage())
    logging.getLogger("halfstep_torch").addHandler(handler)
    for p in model.parameters():
        p.grad = torch.zeros_like(p)
    optimizer.step()
    torch.manual_seed(rank)
    for epoch, count in enumerate((5 + 3 * rank, 95)):
        with model.join() if epoch == 0 else contextlib.nullcontext():
            for x in torch.randn(count, 2, 8).bfloat16():
                optimizer.zero_grad()
                model(x).square().mean().backward()
                optimizer.step()
    logging.getLogger("halfstep_torch").removeHandler(handler)
    outcomes = [None, None]
    torch.distributed.all_gather_object(outcomes, messages)
    assert sum("have different gradients at step 100" in line for lines in outcomes for line in lines) == 1


def train_apart_or_alike(rank: int) -> None:
    for apart in (False, True):
        torch.manual_seed(0)
        model = torch.nn.Linear(3, 2, dtype=torch.bfloat16)
        replica = torch.nn.parallel.DistributedDataParallel(model)
        optimizer, problem = hs.AdamW(replica.named_parameters(), seed=rank if apart else 0), ""
        replica(torch.full((1, 3), rank + 1.0).bfloat16()).sum().backward()
        try:
            optimizer.step()
        except RuntimeError as error:
            problem = str(error)
        outcomes = [None, None]
        weights = [p.float().tolist() for p in model.parameters()]
        torch.distributed.all_gather_object(outcomes, (problem, weights))
        assert any("replicas of a model would drift apart" in problem for problem, _ in outcomes) == apart
        assert apart or outcomes[0] == outcomes[1]


@pytest.mark.slow
def test_two_processes_find_out_at_the_first_step():
    in_processes(2, train_apart_or_alike)


@pytest.mark.slow
def test_two_processes_find_out_after_uneven_inputs():
    in_processes(2, join_with_uneven_inputs)


def test_a_chain_that_stores_no_weights_or_has_no_rate_is_spoken_of_once(caplog):
    def make(params):
        return hs.Optimizer([("w", params[0])], hs.chain(hs.scale_by_adam()))

    for _ in range(2):
        step(make, [[1.0]], steps=2)
    assert said(caplog) == [
        "Optimizer: no link stores the bfloat16 weights: they are rounded to nearest, and updates below half "
        "a unit in their last place are lost. End the chain with round_stochastically().",
        "Optimizer: the chain has no scale_by_learning_rate, so weights move by the whole update, up the "
        "gradient. Put scale_by_learning_rate(1e-3) behind the update rule.",
    ]


@pytest.mark.parametrize("storage", ["nearest", "stochastic", "split8"])
def test_a_storage_that_was_chosen_is_not_spoken_of(storage, caplog):
    step(lambda params: hs.AdamW([("w", params[0])], param_storage=storage), [[1.0]])
    assert said(caplog) == []


def test_three_steps_without_a_gradient_are_spoken_of_once(caplog):
    p = torch.nn.Parameter(torch.ones(2, dtype=torch.bfloat16))
    optimizer = hs.AdamW([("w", p)])
    for _ in range(2):
        optimizer.step()
    assert said(caplog) == []
    for _ in range(3):
        optimizer.step()
    assert said(caplog) == [
        "AdamW: no parameter had a gradient in 3 steps, so nothing moves. Build the optimizer with the "
        "parameters of the model that is trained, and call backward before step."
    ]


def test_steps_without_a_gradient_between_others_are_not_spoken_of(caplog):
    p = torch.nn.Parameter(torch.ones(2, dtype=torch.bfloat16))
    optimizer = hs.AdamW([("w", p)])
    for step in range(9):
        p.grad = torch.ones_like(p) if step == 1 else None
        optimizer.step()
    assert said(caplog) == []


@pytest.mark.parametrize(("outside", "kind"), [(200.0, "large"), (1e-9, "small")])
def test_gradients_that_leave_the_range_of_one_pass_in_mid_run_are_spoken_of(outside, kind, caplog):
    """At step 100 and at every hundredth from there: of two arrays one alone leaves it."""
    params = [(name, torch.nn.Parameter(torch.zeros(4, dtype=torch.bfloat16))) for name in "ab"]
    optimizer = hs.AdamW(params, recipe="one_pass", compile=False)
    for step in range(1, 201):
        for name, p in params:
            p.grad = torch.full_like(p, outside if step == 200 and name == "a" else 1.0)
        optimizer.step()
        assert bool(said(caplog)) == (step == 200)
    (line,) = said(caplog)
    assert line.startswith(f"AdamW: gradients of 'a' are so {kind} that squares of 100% of them")


@pytest.mark.parametrize("share", [0.125, 0.5])
def test_a_quarter_of_a_weights_gradients_below_the_range_of_one_pass_is_spoken_of_at_step_10(share, caplog):
    params = [(name, torch.nn.Parameter(torch.zeros(64, dtype=torch.bfloat16))) for name in ("embed", "b")]
    optimizer = hs.AdamW(params, recipe="one_pass", compile=False)
    for step in range(1, 11):
        for _, p in params:
            p.grad = torch.ones_like(p)
        if step == 10:
            params[0][1].grad[: int(64 * share)] = 1e-8
        optimizer.step()
    lines = said(caplog)
    assert bool(lines) == (share > 0.25)
    if lines:
        assert lines[0].startswith("AdamW: gradients of 'embed' are so small that squares of 50% of them")
        assert "Embeddings of language models have such gradients. Use the recipe eight_bit" in lines[0]


def test_gradients_below_the_range_are_spoken_of_once_though_their_share_changes(caplog):
    p = torch.nn.Parameter(torch.zeros(64, dtype=torch.bfloat16))
    optimizer = hs.AdamW([("w", p)], recipe="one_pass", compile=False)
    for step in range(1, 11):
        p.grad = torch.ones_like(p)
        p.grad[: 64 - step] = 1e-8
        optimizer.step()
    (line,) = said(caplog)
    assert "98% of them" in line


@pytest.mark.parametrize(("gradient", "is_said"), [(2.0**-10, False), (2.0**-30, True)])
def test_the_range_of_one_pass_is_that_of_gradients_without_their_scale(gradient, is_said, caplog):
    """Times 2^18: the first would then be 256, and the second 2^-12."""
    p = torch.nn.Parameter(torch.zeros(4, dtype=torch.bfloat16))
    optimizer = hs.AdamW([("w", p)], recipe="one_pass", compile=False)
    optimizer.grad_scale, optimizer.found_inf = torch.tensor(2.0**18), torch.tensor(0.0)
    p.grad = torch.full_like(p, gradient * 2.0**18)
    optimizer.step()
    assert bool(said(caplog)) == is_said

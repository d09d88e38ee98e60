"""Gradients of micro-batches, rounded stochastically as backward adds them up."""

import copy

import pytest
import torch

import halfstep_torch as hs


@pytest.fixture
def p():
    return torch.nn.Parameter(torch.zeros(4000, dtype=torch.bfloat16))


@pytest.fixture
def accumulate():
    """Return `accumulate_gradients`, whose hooks go when the test ends."""
    handles = []

    def call(*args, **options):
        handles.append(hs.accumulate_gradients(*args, **options))
        return handles[-1]

    yield call
    for handle in handles:
        handle.remove()


def gradients(count: int, size: int) -> torch.Tensor:
    generator = torch.Generator().manual_seed(0)
    return (torch.rand(count, size, generator=generator) * 0.1 + 0.01).to(torch.bfloat16)


def add_up(p: torch.nn.Parameter, rows: torch.Tensor) -> torch.Tensor:
    for row in rows:
        p.backward(row)
    return p.grad.double()


def test_sums_of_64_gradients_are_unbiased_where_plain_sums_are_off(accumulate):
    """A hundred elements of each value: nearest errs alike in all, stochastic rounding does not."""
    values = gradients(1, 40).reshape(40, 1).expand(40, 100).contiguous()
    rows = values.expand(64, 40, 100)
    errors = []
    for hooks in (False, True):
        p = torch.nn.Parameter(torch.zeros(40, 100, dtype=torch.bfloat16))
        if hooks:
            accumulate([("p", p)])
        errors.append((add_up(p, rows) / (64 * values.double()) - 1).mean(1))
    plain, ours = (error.square().mean().sqrt() for error in errors)
    assert plain > 0.02
    # A sum of k summands is rounded to a gap of at most k 2^-7 of them, with a deviation of at most half of
    # it: over k up to 64, in units of the last sum, 2^-8 sqrt(64 / 3); the mean of a hundred a tenth of that.
    assert ours < 2 * 2**-8 * (64 / 3) ** 0.5 / 10


def test_summands_below_half_a_gap_arrive_on_average(p, accumulate):
    rows = torch.ones(64, 4000, dtype=torch.bfloat16)
    rows[0] = 256
    assert (add_up(p, rows) == 256).all()
    p.grad = None
    accumulate([("p", p)])
    # 63 ones onto 256, whose gap is 2: each arrives with a chance of one half, or a deviation of 1.
    assert abs(add_up(p, rows).mean() - 319) < 5 * (63 / 4000) ** 0.5


def test_grad_is_where_autograd_puts_it_and_the_step_is_unchanged(accumulate):
    torch.manual_seed(0)
    model = torch.nn.Sequential(torch.nn.Linear(4, 4), torch.nn.Linear(4, 2)).to(torch.bfloat16)
    model.register_parameter("unused", torch.nn.Parameter(torch.zeros(3, dtype=torch.bfloat16)))
    optimizer = hs.AdamW(model.named_parameters(), lr=1e-2)
    accumulate(optimizer)
    for _ in range(3):
        model[0].weight.grad = None
        for _ in range(4):
            model[1](model[0](torch.ones(2, 4, dtype=torch.bfloat16))).square().sum().backward()
        hs.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step(zero_grad=True)
    assert model.unused.grad is None
    assert int(optimizer.state[model[0].weight]["step"]) == 3


@pytest.mark.parametrize("layout", [torch.contiguous_format, torch.channels_last])
def test_words_are_those_of_the_index_past_the_first_piece(accumulate, layout):
    shape = (40, 64, 8, 8)
    rows = gradients(2, 40 * 64 * 64).reshape(2, *shape)
    w = torch.nn.Parameter(torch.zeros(shape, dtype=torch.bfloat16).to(memory_format=layout))
    accumulate([("w", w)], seed=5, compile=False)
    add_up(w, rows)
    words = hs.random_words(5, 2, "w", hs.Role.ACCUMULATOR, shape)
    assert torch.equal(w.grad, hs.round_to(rows[0].float() + rows[1].float(), "bfloat16", words))


def test_removed_hooks_leave_plain_addition(p):
    rows = gradients(5, p.numel())
    plain = add_up(p, rows).clone()
    p.grad = None
    handle = hs.accumulate_gradients([("p", p)])
    assert not torch.equal(add_up(p, rows), plain)
    handle.remove()
    p.grad = None
    assert torch.equal(add_up(p, rows), plain)
    hs.accumulate_gradients([("p", p)]).remove()


def test_float32_gradients_are_added_as_before(accumulate):
    p = torch.nn.Parameter(torch.zeros(100))
    rows = gradients(9, 100).float() / 3
    plain = add_up(p, rows).clone()
    p.grad = None
    accumulate([("p", p)])
    assert torch.equal(add_up(p, rows), plain)


def test_autograd_grad_leaves_the_sum_alone(p, accumulate):
    accumulate([("p", p)])
    p.backward(torch.ones_like(p))
    torch.autograd.grad((p * 2).sum(), [p])
    assert (p.grad == 1).all()
    p.backward(torch.ones_like(p))
    assert (p.grad == 2).all()


def test_a_resumed_run_rounds_as_the_one_that_was_saved(p, accumulate):
    rows = gradients(12, p.numel())
    handle = accumulate([("p", p)], seed=3)
    add_up(p, rows[:6])
    saved, grad = copy.deepcopy(handle.state_dict()), p.grad.clone()
    whole = add_up(p, rows[6:])
    handle.remove()
    p.grad = grad
    accumulate([("p", p)]).load_state_dict(saved)
    assert torch.equal(add_up(p, rows[6:]), whole)
    assert saved == {"seed": 3, "counts": {"p": 6}}


def test_what_cannot_be_added_is_refused_and_the_sum_stays(p, accumulate):
    accumulate([("p", p)])
    p.backward(torch.ones_like(p))
    with pytest.raises(TypeError, match="'p' has a graph"):
        (p * p).sum().backward(create_graph=True)
    assert (p.grad == 1).all()
    with pytest.raises(ValueError, match="'p' has the hooks of accumulate_gradients already"):
        hs.accumulate_gradients([("p", p)])
    with pytest.raises(TypeError, match="str is no parameter"):
        hs.accumulate_gradients(["p"])
    with pytest.raises(ValueError, match="'q' is not a parameter of both"):
        accumulate([]).load_state_dict({"seed": 0, "counts": {"q": 1}})


def test_moving_the_model_afterwards_is_refused(accumulate):
    layer = torch.nn.Linear(2, 2, dtype=torch.float16)
    accumulate(layer)
    layer.to(torch.bfloat16)
    with pytest.raises(RuntimeError, match="has new data since its hooks were made"):
        layer(torch.ones(1, 2, dtype=torch.bfloat16)).sum().backward()

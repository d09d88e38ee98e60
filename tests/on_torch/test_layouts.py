"""Layouts: the bits are those of a row-major copy, and weights stay in the memory that they have."""

import functools

import pytest
import torch

import halfstep_torch as hs
from on_torch.steps import assert_same_snapshots, snapshot, step_in_pieces

SHAPE = (6, 5, 4, 3)


def strided(x: torch.Tensor) -> torch.Tensor:
    """Return every other element of a larger array, holding `x`."""
    big = torch.zeros((2 * x.shape[0], *x.shape[1:-1], 3 * x.shape[-1]), dtype=x.dtype)
    view = big[::2, ..., ::3]
    view.copy_(x)
    return view


LAYOUTS = {
    "channels_last": lambda x: x.contiguous(memory_format=torch.channels_last),
    "transposed": lambda x: x.transpose(0, 3).contiguous().transpose(0, 3),
    "strided": strided,
    "offset": lambda x: torch.cat([x.new_zeros(7), x.reshape(-1)])[7:].view(x.shape),
    "flipped strides": lambda x: x.permute(3, 2, 1, 0).contiguous().permute(3, 2, 1, 0),
}


def run(layout, grad_layout, compile: bool, scale: int = 1):
    generator = torch.Generator().manual_seed(0)
    shape = (SHAPE[0] * scale, *SHAPE[1:])
    p = torch.nn.Parameter(layout(torch.randn(shape, generator=generator).bfloat16()))
    optimizer = hs.AdamW([("w", p)], lr=1e-2, weight_decay=0.1, compile=compile)
    storage, strides = p.data_ptr(), p.stride()
    for _ in range(3):
        p.grad = grad_layout(torch.randn(shape, generator=generator).bfloat16())
        optimizer.step()
    assert (p.data_ptr(), p.stride()) == (storage, strides)
    return snapshot(optimizer)


def plain(x):
    return x.contiguous()


@functools.cache
def run_of_plain(compile: bool, scale: int = 1):
    return run(plain, plain, compile, scale)


@pytest.mark.parametrize("compile", [False, True])
@pytest.mark.parametrize("grads", ["same", "row-major"])
@pytest.mark.parametrize("name", LAYOUTS)
def test_a_layout_gives_the_bits_of_a_row_major_copy(name, grads, compile):
    layout = LAYOUTS[name]
    ours = run(layout, layout if grads == "same" else plain, compile)
    assert_same_snapshots(ours, run_of_plain(compile))


@pytest.mark.parametrize("compile", [False, True])
@pytest.mark.parametrize("name", LAYOUTS)
def test_a_long_leaf_of_any_layout_has_the_same_bits_in_pieces(name, compile):
    ours = run(LAYOUTS[name], LAYOUTS[name], compile, scale=1000)
    assert_same_snapshots(ours, run_of_plain(compile, 1000))


@pytest.mark.parametrize("length", [1, 70, 10**9])
@pytest.mark.parametrize("name", LAYOUTS)
def test_pieces_of_any_layout_hold_whole_blocks(name, length):
    # Both formats leave short blocks.
    formats = {
        "mu_dtype": hs.scaled("int8", 25, min_size=0),
        "nu_dtype": hs.codebook("udynamic8", 50, min_size=0),
    }
    runs = []
    for layout in (LAYOUTS[name], plain):
        p = torch.nn.Parameter(layout(torch.linspace(-1, 1, 360).view(SHAPE).bfloat16()))
        optimizer = hs.AdamW([("w", p)], lr=1e-2, compile=False, **formats)
        for step in range(2):
            p.grad = layout(torch.linspace(1, -step, 360).view(SHAPE).bfloat16())
            optimizer.step() if layout is plain else step_in_pieces(optimizer, length)
        runs.append(snapshot(optimizer))
    assert_same_snapshots(*runs)


@pytest.mark.parametrize("compile", [False, True])
@pytest.mark.parametrize("name", LAYOUTS)
def test_memory_outside_the_parameter_is_not_touched(name, compile):
    marked = LAYOUTS[name](torch.zeros(SHAPE, dtype=torch.bfloat16))
    memory = marked.as_strided((marked.untyped_storage().nbytes() // 2,), (1,), 0)
    memory.fill_(3.0)
    p = torch.nn.Parameter(marked)
    p.grad = torch.ones(SHAPE, dtype=torch.bfloat16)
    hs.AdamW([p], lr=1.0, compile=compile).step()
    assert (memory != 3.0).sum() == p.numel()


@pytest.mark.parametrize("compile", [False, True])
@pytest.mark.parametrize("rows_of_9", [10, 30_000])
def test_what_moves_between_steps_is_stepped_where_it_is(rows_of_9, compile):
    runs = []
    for moves in (False, True):
        p = torch.nn.Parameter(torch.linspace(-1, 1, 9 * rows_of_9).view(-1, 9).bfloat16())
        optimizer = hs.AdamW([("w", p)], lr=1e-2, compile=compile)
        for step in range(4):
            p.grad = (torch.arange(9 * rows_of_9) % (7 + step)).view(-1, 9).bfloat16()
            if moves and step == 1:
                p.data = p.data.clone()
            if moves and step == 3:
                p.grad = p.grad.t().contiguous().t()
            if moves and step == 2:
                optimizer.state[p]["exp_avg_sq"] = optimizer.state[p]["exp_avg_sq"].clone()
            optimizer.step()
        runs.append(snapshot(optimizer))
    assert_same_snapshots(*runs)


@pytest.mark.parametrize("compile", [False, True])
def test_views_of_the_weights_stay_tied(compile):
    linear = torch.nn.Linear(8, 8, dtype=torch.bfloat16)
    row = linear.weight.detach()[3]
    linear.weight.grad = torch.ones_like(linear.weight)
    hs.AdamW([linear.weight], lr=0.1, compile=compile).step()
    assert torch.equal(row, linear.weight.detach()[3])


@pytest.mark.parametrize("compile", [False, True])
@pytest.mark.parametrize("length", [(), (0,), (1,), (3, 0, 2), (2,), (5000,)])
def test_autograd_sees_that_weights_changed(length, compile):
    p = torch.nn.Parameter(torch.ones(length))
    p.grad = torch.ones(length)
    loss = (p * p).sum()
    hs.AdamW([p], compile=compile).step()
    if p.numel():
        with pytest.raises(RuntimeError, match="modified by an inplace operation"):
            loss.backward()


@pytest.mark.parametrize("count", [1_000, 200_000])
@pytest.mark.parametrize("way", ["tied before", "tied after a step", "overlapping", "two groups"])
def test_weights_that_come_to_share_memory_are_refused(count, way):
    a, b = (torch.nn.Parameter(torch.ones(count)) for _ in range(2))
    groups = [[("a", a)], [("b", b)]] if way == "two groups" else [[("a", a), ("b", b)]]
    optimizer = hs.SGD([{"params": group} for group in groups], lr=0.1)
    a.grad, b.grad = torch.ones(count), torch.ones(count)
    if way != "tied before":
        optimizer.step()
    both = torch.ones(count + 1)
    a.data, b.data = (both[:-1], both[1:]) if way == "overlapping" else (a.data, a.data)
    before = a.detach().clone()
    with pytest.raises(ValueError, match="the weights 'a' and 'b' share memory, and one of their updates"):
        optimizer.step()
    assert torch.equal(a, before)
    b.data = b.data.clone()
    optimizer.step()


@pytest.mark.parametrize("side", [30, 600])
@pytest.mark.parametrize("later", [False, True])
def test_a_gradient_that_is_another_view_of_its_weight_is_read_before_the_weight_moves(side, later):
    """As torch does it; 600 x 600 is stepped in pieces. Also if a plain gradient came before."""
    w = torch.randn(side, side, generator=torch.Generator().manual_seed(0))
    p = torch.nn.Parameter(w.clone())
    optimizer = hs.SGD([("p", p)], lr=0.5)
    if later:
        p.grad = torch.zeros(side, side).t()
        optimizer.step()
    for _ in range(2):
        with torch.no_grad():
            p.copy_(w)
        p.grad = p.detach().t()
        optimizer.step()
        assert torch.equal(p, w - 0.5 * w.t())

"""`Monitor` measures the step that was taken, of any optimizer, and says the same in both packages."""

import functools
import logging

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

import halfstep_jax
import halfstep_torch
from halfstep import monitor

SHAPE = (64, 128)
GRADIENT = np.random.default_rng(0).standard_normal(SHAPE).astype(np.float32)
START = 1 + np.abs(np.random.default_rng(1).standard_normal(SHAPE).astype(np.float32))


def jax_rows(tx, steps=4, every=2, scale=1.0, dtype=jnp.bfloat16):
    """Return what is read after every step, and the weights after it."""
    watch = halfstep_jax.Monitor(tx, every)
    params, g = {"w": jnp.asarray(START, dtype)}, {"w": jnp.asarray(GRADIENT * scale, dtype)}
    state, rows = tx.init(params), []

    @jax.jit
    def step(params, state):
        updates, state = tx.update(g, state, params)
        return optax.apply_updates(params, updates), state

    for _ in range(steps):
        params, state = step(params, state)
        rows.append((watch.read(params, state), np.asarray(params["w"].astype(jnp.float32))))
    return rows


def torch_rows(make, steps=4, every=2, scale=1.0, dtype=torch.bfloat16):
    param = torch.nn.Parameter(torch.tensor(START).to(dtype))
    param.grad = torch.tensor(GRADIENT * scale).to(dtype)
    optimizer = make([("w", param)])
    watch, rows = halfstep_torch.Monitor(optimizer, every), []
    for _ in range(steps):
        optimizer.step()
        rows.append((watch.read(), param.detach().float().numpy().copy()))
    return rows


def jax_ours(**options):
    return jax_rows(halfstep_jax.adamw(1e-4, **options))


def torch_ours(**options):
    return torch_rows(lambda named: halfstep_torch.AdamW(named, lr=1e-4, **options))


OURS = {"jax": jax_ours, "torch": torch_ours}
THEIRS = {
    "jax": lambda lr: jax_rows(optax.adamw(lr)),
    "torch": lambda lr: torch_rows(lambda named: torch.optim.AdamW([p for _, p in named], lr=lr)),
}


@pytest.mark.parametrize("package", OURS)
def test_a_row_comes_at_every_second_call_and_holds_what_the_weights_did(package):
    rows = OURS[package]()
    assert [row is None for row, _ in rows] == [True, False, True, False]
    for i in (1, 3):
        row, before, after = rows[i][0], rows[i - 1][1], rows[i][1]
        assert row["step"] == i + 1
        assert row["weight_norm"] == pytest.approx(np.linalg.norm(after), rel=1e-4)
        assert row["update_norm"] == pytest.approx(np.linalg.norm(after - before), rel=1e-4)
        assert (row["updates_lost"], row["nonfinite"]) == (0, 0)
        assert all(isinstance(x, float) for x in row.values())


@pytest.mark.parametrize("package", THEIRS)
def test_an_optimizer_of_another_library_is_told_what_it_loses(package, caplog):
    row, after = THEIRS[package](1e-5)[3]
    before = THEIRS[package](1e-5)[2][1]
    assert row["updates_lost"] == pytest.approx((after == before).mean(), abs=1e-6)
    assert row["updates_lost"] > 0.9
    assert THEIRS[package](0.5)[3][0]["updates_lost"] < 0.05


def test_both_packages_say_the_same_of_a_run():
    for options in ({}, {"recipe": "one_pass"}, {"recipe": "eight_bit"}, {"param_storage": "split16"}):
        in_jax, in_torch = (ours(weight_decay=0.1, **options)[3][0] for ours in OURS.values())
        assert in_jax.keys() == in_torch.keys()
        for name, x in in_jax.items():
            assert in_torch[name] == pytest.approx(x, rel=1e-5), (options, name)


@pytest.mark.parametrize(("scale", "end"), [(1e6, "moments_at_largest"), (1e-9, "moments_at_smallest")])
@pytest.mark.parametrize("package", OURS)
def test_one_pass_outside_of_its_range_shows_and_is_said(package, scale, end, caplog):
    make = {
        "jax": lambda: jax_rows(halfstep_jax.adamw(1e-3, recipe="one_pass"), scale=scale),
        "torch": lambda: torch_rows(
            lambda named: halfstep_torch.AdamW(named, recipe="one_pass"), scale=scale
        ),
    }[package]
    monitor.SAID.clear()
    with caplog.at_level(logging.WARNING):
        row = make()[1][0]
    assert row[end] > 0.5
    said = [record.getMessage() for record in caplog.records if "Monitor" in record.getMessage()]
    assert len(said) == 1
    assert "use the recipe eight_bit" in said[0]


@pytest.mark.parametrize("package", OURS)
def test_an_embedding_below_the_range_of_one_pass_is_named_at_the_tenth_step(package, caplog):
    """Squares of 1e-8 are below the range, and those of 1e-4 inside of it from the first step on."""
    shares = {"small": 1e-8, "ordinary": 1e-4}
    monitor.SAID.clear()
    if package == "jax":
        params = {name: jnp.ones(256, jnp.bfloat16) for name in shares}
        grads = {name: jnp.full(256, g, jnp.bfloat16) for name, g in shares.items()}
        tx = halfstep_jax.adamw(1e-3, recipe="one_pass")
        watch, state, update = halfstep_jax.Monitor(tx), tx.init(params), jax.jit(tx.update)
        rows = []
        for _ in range(10):
            updates, state = update(grads, state, params)
            params = optax.apply_updates(params, updates)
            rows.append(watch.read(params, state))
    else:
        named = [(name, torch.nn.Parameter(torch.ones(256, dtype=torch.bfloat16))) for name in shares]
        for name, p in named:
            p.grad = torch.full_like(p, shares[name])
        optimizer = halfstep_torch.AdamW(named, recipe="one_pass")
        watch, rows = halfstep_torch.Monitor(optimizer), []
        for _ in range(10):
            optimizer.step()
            rows.append(watch.read())
    assert rows == [None] * 10
    (line,) = (record.getMessage() for record in caplog.records if "Monitor" in record.getMessage())
    assert "of 'small' at the smallest number of uroot4_e4m4" in line
    assert line.startswith("Monitor: 100% of ")
    assert "Embeddings of language models have such gradients." in line


def test_a_link_behind_the_one_that_stores_shows():
    tx = optax.chain(halfstep_jax.adamw(1e-4), optax.scale(0.5))
    assert jax_rows(tx)[3][0]["updates_lost"] > 0.9


@pytest.mark.parametrize("scale", [np.nan, 1e26], ids=["NaN", "infinite squares"])
@pytest.mark.parametrize("package", ["jax", "torch"])
def test_weights_that_are_no_numbers_are_counted(package, scale, caplog):
    monitor.SAID.clear()
    if package == "jax":
        rows = jax_rows(halfstep_jax.adamw(1e-4), scale=scale)
    else:
        rows = torch_rows(lambda named: halfstep_torch.AdamW(named), scale=scale)
    assert rows[1][0]["nonfinite"] == START.size
    assert (
        "as after a gradient above 1.8e19, whose square is infinite. Go back to a checkpoint" in caplog.text
    )


def test_read_under_jit_is_refused():
    watch, params = halfstep_jax.Monitor(optax.sgd(0.1), 1), {"w": jnp.ones(4)}
    with pytest.raises(TypeError, match=r"Call it in the training loop, with the params and state that"):
        jax.jit(lambda p: watch.read(p, ()))(params)
    assert watch.read(params, ()) is None
    assert watch.read(params, ())["step"] == 2  # the refused call is not counted


@pytest.mark.parametrize("wrap", [
    lambda tx: optax.MultiSteps(tx, 2).gradient_transformation(),
    lambda tx: halfstep_jax.accumulate_gradients(tx, every_k=2),
])  # fmt: skip
def test_gradients_that_are_still_added_lose_no_update(wrap):
    rows = jax_rows(wrap(optax.sgd(1e-5)), steps=6, every=1)
    lost = [row["updates_lost"] for row, _ in rows[1:]]
    assert (lost[1], lost[3]) == (0, 0)
    assert min(lost[2], lost[4]) > 0.9


@pytest.mark.parametrize("wrap", [
    lambda tx: optax.apply_if_finite(tx, 8),
    lambda tx: halfstep_jax.skip_nonfinite(tx),
])  # fmt: skip
def test_a_step_that_is_left_out_loses_no_update(wrap):
    tx, params = wrap(optax.sgd(1e-5)), {"w": jnp.ones(8, jnp.bfloat16)}
    watch, state = halfstep_jax.Monitor(tx, 1), tx.init(params)
    for value, lost in ((1.0, 1), (jnp.nan, 0)):
        _, after = tx.update({"w": jnp.full(8, value, jnp.bfloat16)}, state, params)
        watch.read(params, state)
        assert watch.read(params, after)["updates_lost"] == lost


def test_a_step_that_a_scaler_leaves_out_loses_nothing():
    param = torch.nn.Parameter(torch.ones(64, dtype=torch.bfloat16))
    param.grad = torch.ones_like(param)
    optimizer = torch.optim.AdamW([param], lr=1e-5)
    watch = halfstep_torch.Monitor(optimizer, 1)
    optimizer.step()
    watch.read()
    assert watch.read()["updates_lost"] == 0
    optimizer.step()
    assert watch.read()["updates_lost"] == 1


def test_float32_weights_lose_nothing():
    assert jax_rows(optax.adamw(1e-7), dtype=jnp.float32)[3][0]["updates_lost"] == 0
    rows = torch_rows(lambda named: torch.optim.SGD([p for _, p in named], 1e-9), dtype=torch.float32)
    assert rows[3][0]["updates_lost"] == 0


def test_only_the_corner_of_a_large_weight_is_compared():
    tx, params = optax.sgd(1e-9), {"w": jnp.ones((100, 2**12), jnp.bfloat16)}
    watch = halfstep_jax.Monitor(tx, 2)
    state = tx.init(params)
    assert watch.read(params, state) is None
    moved = {"w": params["w"].at[0].set(2.0).at[4:].set(2.0)}  # one of the first four rows
    row = watch.read(moved, state)
    assert row["updates_lost"] == 0.75
    assert row["update_norm"] == pytest.approx(np.sqrt(25 * 2**12), rel=1e-4)


@pytest.mark.parametrize("every", [0, -1, 1.5, True, "100", None])
def test_a_number_of_steps_that_is_none_is_refused(every):
    message = rf"Monitor: every={every!r} is not a number of steps\. Use an integer >= 1\."
    with pytest.raises(ValueError, match=message):
        halfstep_jax.Monitor(optax.sgd(0.1), every)
    with pytest.raises(ValueError, match=message):
        halfstep_torch.Monitor(torch.optim.SGD([torch.ones(1)]), every)


def test_what_is_no_optimizer_is_refused():
    with pytest.raises(TypeError, match=r"Monitor: optimizer is Linear\. Pass a torch\.optim\.Optimizer"):
        halfstep_torch.Monitor(torch.nn.Linear(1, 1))


class WholeReads(TorchDispatchMode):
    """Names the operations that read an array of more elements than four samples have."""

    def __init__(self):
        super().__init__()
        self.names = []

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        name = function.overloadpacket.__name__
        if name not in ("detach", "slice", "view") and any(
            isinstance(x, torch.Tensor) and x.numel() > 65_536 for x in args
        ):
            self.names.append(name)
        return function(*args, **(kwargs or {}))


ENDS = ["bitwise_and", "ne", "eq", "sum", "eq", "bitwise_and", "sum"]


@pytest.mark.parametrize(
    ("optimizer", "of_codes"),
    [
        (torch.optim.AdamW, []),
        (halfstep_torch.AdamW, []),
        (functools.partial(halfstep_torch.AdamW, recipe="one_pass"), ENDS),
    ],
    ids=["foreign", "default", "one_pass"],
)
def test_a_read_passes_over_each_weight_once(optimizer, of_codes):
    """And over second moments in codes that have ends, which are a byte each."""
    model = torch.nn.Sequential(*(torch.nn.Linear(512, 512) for _ in range(3))).bfloat16()
    optimizer = optimizer(model.named_parameters())
    watch = halfstep_torch.Monitor(optimizer, 1)
    for _ in range(2):
        model(torch.ones(4, 512, dtype=torch.bfloat16)).sum().backward()
        optimizer.step()
        with WholeReads() as reads:
            watch.read()
    assert reads.names == 3 * ["linalg_vector_norm"] + 3 * of_codes

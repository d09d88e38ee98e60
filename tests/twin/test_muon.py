"""Muon: its factor against the reference, whole steps against Optax's and torch's, and its storage."""

import functools
import warnings

import jax
import jax.numpy as jnp
import numpy as np
import optax
import optax.contrib
import pytest
import safetensors.numpy
import torch

import halfstep_jax
import halfstep_torch
from halfstep_spec.numbers.newton_schulz import newton_schulz
from twin.moving import jax_run, torch_run

SLOPE = 3.4445**5
MATRIX = (48, 80)
FINE = ("int8", 32, 0, 0)
MOMENT_WARNING = "too coarse for the factor of a matrix"


def bound(rank: int) -> float:
    """Clause A14: the relative distance of two factors of one matrix."""
    return SLOPE * 10 * 2.0**-24 * rank**0.5


def steep(shape: tuple[int, int], power: float) -> np.ndarray:
    """Return a matrix whose singular values fall as 1, 2^-power, 3^-power, ..."""
    rng, rank = np.random.default_rng(5), min(shape)
    u, _ = np.linalg.qr(rng.normal(size=(shape[0], rank)))
    v, _ = np.linalg.qr(rng.normal(size=(shape[1], rank)))
    return ((u * np.arange(1, rank + 1) ** -power) @ v.T).astype(np.float32)


def factor_in_jax(x: np.ndarray, **options) -> np.ndarray:
    options = {"beta": 0.0, "nesterov": False, "scale": None, "mu_dtype": "float32"} | options
    tx = halfstep_jax.scale_by_muon(**options)
    return np.asarray(jax.jit(tx.update)({"w": x}, tx.init({"w": x}))[0]["w"])


def factor_in_torch(x: np.ndarray, **options) -> np.ndarray:
    options = {"beta": 0.0, "nesterov": False, "scale": None, "mu_dtype": "float32"} | options
    p = torch.nn.Parameter(torch.zeros(x.shape))
    p.grad = torch.tensor(x)
    ascent = halfstep_torch.scale_by_learning_rate(1.0, flip_sign=False)
    tx = halfstep_torch.chain(halfstep_torch.scale_by_muon(**options), ascent)
    halfstep_torch.Optimizer([("w", p)], tx).step()
    return p.detach().numpy()


FACTORS = {"jax": factor_in_jax, "torch": factor_in_torch}


def distance(x: np.ndarray, y: np.ndarray) -> float:
    return float(np.linalg.norm(np.float64(x) - y) / np.linalg.norm(np.float64(y)))


def test_five_steps_magnify_no_singular_value_more_than_those_near_0():
    """The slope of clause A14: of x -> a x + b x^3 + c x^5, five times, from anywhere in (0, 1]."""
    start = x = np.geomspace(1e-9, 1, 100_001)
    for _ in range(5):
        x = 3.4445 * x - 4.7750 * x**3 + 2.0315 * x**5
    assert np.max(x / start) <= SLOPE < 485
    assert np.max(x / start) > 0.999999 * SLOPE


@pytest.mark.parametrize("framework", FACTORS)
@pytest.mark.parametrize("shape", [MATRIX, MATRIX[::-1]])
def test_the_factor_is_within_its_bound(framework, shape):
    """Of flat spectra and of steep ones, whose last directions are a millionth of the first."""
    stack = np.stack([steep(shape, power) for power in (0.0, 0.5, 1.5, 3.5)])
    factors = FACTORS[framework](stack, reduction_axis=1, output_axis=2)
    for x, factor in zip(stack, factors, strict=True):
        assert distance(factor, newton_schulz(x, [0], [1])) <= bound(min(shape))


@pytest.mark.parametrize("framework", FACTORS)
def test_products_in_bfloat16_are_past_the_bound_and_of_the_same_directions(framework):
    x = steep(MATRIX, 0.5)
    exact = newton_schulz(x, [0], [1])
    rough = FACTORS[framework](x, ns_dtype="bfloat16")
    assert bound(min(MATRIX)) < distance(rough, exact) < 0.1


@pytest.mark.parametrize("framework", FACTORS)
def test_a_zero_matrix_gives_exactly_0_and_leaves_its_neighbours_alone(framework):
    stack = np.stack([steep(MATRIX, 0.5), np.zeros(MATRIX, np.float32)])
    factors = FACTORS[framework](stack, reduction_axis=1, output_axis=2)
    assert not factors[1].any()
    alone = FACTORS[framework](stack[0], reduction_axis=0, output_axis=1)
    assert distance(factors[0], alone) <= bound(min(MATRIX))


@pytest.mark.parametrize("framework", FACTORS)
@pytest.mark.parametrize("scale", [1e-5, 3e37])
def test_a_factor_does_not_depend_on_the_size_of_the_matrix(framework, scale):
    """At 3e37 squares overflow. Below eps, 1e-7, the norm counts as eps."""
    x = steep(MATRIX, 0.5)
    scaled = x * np.float32(scale)
    assert distance(FACTORS[framework](scaled), FACTORS[framework](x)) <= bound(min(MATRIX))


@pytest.mark.parametrize("framework", FACTORS)
def test_a_convolution_is_the_matrix_that_its_axes_say(framework):
    x = steep((24, 36), 0.5).reshape(24, 4, 3, 3)
    factor = FACTORS[framework](x, reduction_axis=(1, 2, 3), output_axis=0)
    exact = newton_schulz(x.reshape(24, 36), [1], [0])
    assert distance(factor.reshape(24, 36), exact) <= bound(24)


def gradients(steps: int) -> np.ndarray:
    rng = np.random.default_rng(2)
    return (rng.normal(size=MATRIX) + 0.3 * rng.normal(size=(steps, *MATRIX))).astype(np.float32)


@pytest.mark.slow
def test_float32_follows_optax():
    """Each step adds lr s times factors that are apart by the bound; weights are rounded by 2^-24 of them."""
    options = {"weight_decay": 0.1}
    ours = halfstep_jax.muon(0.02, bias_correction=True, mu_dtype="float32", **options)
    theirs = optax.contrib.muon(0.02, eps=1e-7, **options)
    with jax.default_matmul_precision("highest"):
        ends = [jax_run(tx, steep(MATRIX, 0.5), gradients(8), "float32")[0] for tx in (ours, theirs)]
    moved = 8 * 0.02 * (80 / 48) ** 0.5 * (1.2 * 48**0.5)
    allowed = moved * bound(48) + 8 * 2.0**-24 * np.linalg.norm(ends[1])
    assert np.linalg.norm(np.float64(ends[0]) - ends[1]) <= allowed


@pytest.mark.parametrize("adjust_lr_fn", [None, "match_rms_adamw"])
def test_float32_follows_torch(adjust_lr_fn, monkeypatch):
    """The factor of torch.optim.Muon is in bfloat16: here its own code makes it in float32."""
    monkeypatch.setattr(torch.Tensor, "bfloat16", torch.Tensor.float)
    options = {"lr": 0.02, "weight_decay": 0.1, "adjust_lr_fn": adjust_lr_fn}
    makes = functools.partial(halfstep_torch.Muon, **options), functools.partial(torch.optim.Muon, **options)
    ends = [torch_run(make, steep(MATRIX, 0.5), gradients(8), "float32")[0] for make in makes]
    scale = 1 if adjust_lr_fn is None else 0.2 * 80**0.5
    allowed = 8 * 0.02 * scale * 1.2 * 48**0.5 * bound(48) + 8 * 2.0**-24 * np.linalg.norm(ends[1])
    assert np.linalg.norm(np.float64(ends[0]) - ends[1]) <= allowed


def test_jax_and_torch_take_the_same_steps_on_transposed_weights():
    """Momentum and storage have the same bits, factors are within their bound: so is the end of a run."""
    start = steep(MATRIX, 0.5)
    tx = halfstep_jax.muon(0.02, weight_decay=0.1, mu_dtype="float32", param_storage="split16")
    p, state = jax_run(tx, start, gradients(5))
    options = {"lr": 0.02, "mu_dtype": "float32", "param_storage": "split16"}
    turned = [g.T.copy() for g in gradients(5)]
    _, optimizer = torch_run(lambda named: halfstep_torch.Muon(named, **options), start.T.copy(), turned)
    (kept,) = optimizer.state.values()
    mu = np.asarray(optax.tree.get(state, "ScaleByMuonState").mu["w"])
    np.testing.assert_array_equal(mu, kept["momentum_buffer"].numpy().T)
    ends = [
        np.asarray(halfstep_jax.float32_params({"w": jnp.asarray(p, jnp.bfloat16)}, state)["w"]),
        halfstep_torch.float32_params(optimizer)["w"].numpy().T,
    ]
    moved = 5 * 0.02 * (80 / 48) ** 0.5 * 1.2 * 48**0.5
    allowed = moved * bound(48) + 5 * 2.0**-23 * np.linalg.norm(ends[1])
    assert np.linalg.norm(np.float64(ends[0]) - ends[1]) <= allowed


@pytest.mark.parametrize("framework", FACTORS)
def test_small_updates_of_bfloat16_weights_arrive_whole(framework):
    """At lr 1e-6 an update is a thirtieth of half a unit of weights at 2^-10: torch.optim.Muon does not move.

    Each of 3,840 weights is rounded stochastically: in the mean they move along the factor as in float32.
    """
    start, steps, lr = np.full(MATRIX, 2.0**-10, np.float32), 50, 1e-6
    g = np.asarray(jnp.asarray(steep(MATRIX, 0.0), jnp.bfloat16), np.float32)
    if framework == "jax":
        tx = halfstep_jax.muon(lr)
        params = {"w": jnp.asarray(start, jnp.bfloat16)}

        def step(carry, _):
            params, state = carry
            updates, state = tx.update({"w": jnp.asarray(g)}, state, params)
            return (optax.apply_updates(params, updates), state), None

        (params, _), _ = jax.jit(lambda c: jax.lax.scan(step, c, None, steps))((params, tx.init(params)))
        end = np.asarray(params["w"], np.float32)
    else:
        p = torch.nn.Parameter(torch.tensor(start).bfloat16())
        optimizer = halfstep_torch.Muon([("w", p)], lr=lr, weight_decay=0.0)
        for _ in range(steps):
            p.grad = torch.tensor(g).bfloat16()
            optimizer.step()
        end = p.detach().float().numpy()
        still = torch.nn.Parameter(torch.tensor(start).bfloat16())
        theirs = torch.optim.Muon([still], lr=lr, weight_decay=0.0)
        still.grad = torch.tensor(g).bfloat16()
        theirs.step()
        assert (still == 2.0**-10).all()
    axes = ([0], [1]) if framework == "jax" else ([1], [0])
    factor = newton_schulz(g, *axes).astype(np.float64)
    due = -lr * steps * factor * ((80 / 48) ** 0.5 if framework == "jax" else 1)
    share = ((end - start) * due).sum() / (due**2).sum()
    # A movement d, rounded to a unit of 2^-17 or less, has the variance |d| 2^-17 at most.
    deviation = (np.abs(due) ** 3 * 2.0**-17).sum() ** 0.5 / (due**2).sum()
    assert abs(share - 1) < 4 * deviation < 0.12


def momentum_of(package, dtype: str, shape=(64, 64), **options):
    """Return the array, the scale and the rounding of the momentum of such a weight."""
    if package is halfstep_jax:
        params = {"w": jnp.zeros(shape, dtype)}
        tx = halfstep_jax.muon(1e-3, **options)
        row = halfstep_jax.describe(tx, params).of("w", "mu")
        return row.format, row.rounding
    p = torch.nn.Parameter(torch.zeros(shape, dtype=getattr(torch, dtype)))
    ((_, _, plan),) = halfstep_torch.Muon([("w", p)], **options).plans()
    (moment,) = plan.rules[0].moments
    return moment.format.text, moment.rounding if moment.format.rounds else "none"


@pytest.mark.parametrize("package", [halfstep_jax, halfstep_torch])
def test_what_the_momentum_is_kept_in(package):
    assert momentum_of(package, "bfloat16") == ("float16, blocks of 128", "nearest")
    assert momentum_of(package, "float32") == ("float32", "none")
    assert momentum_of(package, "float16") == ("float32", "none")
    assert momentum_of(package, "bfloat16", mu_dtype="bfloat16") == ("bfloat16", "nearest")
    fine = package.scaled(*FINE, scale="fine")
    assert momentum_of(package, "bfloat16", mu_dtype=fine)[1] == "nearest"


@pytest.mark.parametrize("package", [halfstep_jax, halfstep_torch])
def test_eight_bits_that_are_too_coarse_are_warned_of(package):
    for fmt in (package.scaled("float8_e4m3fn"), package.scaled("int8", 128), package.codebook("dynamic8")):
        with pytest.warns(UserWarning, match=MOMENT_WARNING):
            momentum_of(package, "bfloat16", mu_dtype=fmt)


@pytest.mark.slow
def test_a_state_of_bfloat16_weights_reads_as_it_was_made_and_a_run_goes_on_to_the_bit(tmp_path):
    params = {"w": jnp.ones((64, 64), jnp.bfloat16), "b": jnp.ones(64, jnp.bfloat16)}
    tx = halfstep_jax.muon(1e-2)
    update = jax.jit(tx.update)
    g = {"w": jnp.asarray(np.random.default_rng(1).normal(size=(64, 64))), "b": jnp.ones(64)}
    updates, state = update(g, tx.init(params), params)
    params = optax.apply_updates(params, updates)
    halfstep_jax.save_state(tmp_path / "run", params, state, tx)
    loaded, again = halfstep_jax.load_state(tmp_path / "run", params, tx)
    ends = [update(g, s, p)[0] for p, s in ((params, state), (loaded, again))]
    assert jax.tree.all(jax.tree.map(lambda x, y: bool((x == y).all()), *ends))


@pytest.mark.exhaustive
def test_a_compiled_step_has_the_bits_of_an_eager_one():
    ends = []
    for compile in (False, True):
        p = torch.nn.Parameter(torch.tensor(steep((64, 96), 0.5)).bfloat16())
        optimizer = halfstep_torch.Muon([("w", p)], lr=0.02, compile=compile)
        for k in range(3):
            p.grad = torch.tensor(steep((64, 96), 0.5 + k)).bfloat16()
            optimizer.step()
        ends.append([p.detach(), *(x for key, x in optimizer.state[p].items() if key != "step")])
    for eager, compiled in zip(*ends, strict=True):
        assert torch.equal(eager, compiled)


def test_no_warning_is_given_for_what_is_recommended():
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        halfstep_jax.scale_by_muon(mu_dtype=halfstep_jax.scaled("int8", 32, scale="fine"))
        halfstep_torch.scale_by_muon(mu_dtype=halfstep_torch.scaled("int8", 32, scale="fine"))


def test_autocast_around_a_step_changes_no_bit():
    """Its products would be of bfloat16 matrices."""
    weights = []
    for enabled in (False, True):
        p = torch.nn.Parameter(torch.ones(MATRIX, dtype=torch.bfloat16))
        optimizer = halfstep_torch.Muon([("w", p)], lr=0.1)
        p.grad = torch.from_numpy(steep(MATRIX, 0.5)).to(torch.bfloat16)
        with torch.autocast("cpu", torch.bfloat16, enabled=enabled):
            optimizer.step()
            assert torch.is_autocast_enabled("cpu") is enabled
        weights.append(p.detach())
    assert torch.equal(*weights)


@pytest.mark.parametrize("framework", [factor_in_jax, factor_in_torch])
def test_of_a_table_with_more_rows_than_steps_the_last_ones_are_used(framework):
    table = [(3.4445, -4.775, 2.0315), (3.0, -3.0, 1.0), (1.875, -1.25, 0.375)]
    x = steep((8, 8), 1.0)
    np.testing.assert_array_equal(
        framework(x, ns_coeffs=table, ns_steps=2), framework(x, ns_coeffs=table[1:], ns_steps=2)
    )


@pytest.mark.parametrize(
    ("name", "steps", "spread"), [("jordan", 5, 0.4), ("deepseek_v4", 10, 0.03), ("polar_express", 8, 0.03)]
)
def test_coefficients_by_name_make_a_factor_in_both(name, steps, spread):
    """Of a matrix of singular values 0.1 to 1: Jordan's end within 0.4 of 1, the others converge."""
    rng = np.random.default_rng(0)
    u, v = (np.linalg.qr(rng.normal(size=(8, 8)))[0] for _ in range(2))
    x = (u * np.linspace(0.1, 1, 8) @ v).astype(np.float32)
    options = {"ns_coeffs": name, "ns_steps": steps, "beta": 0.0, "nesterov": False, "scale": None}
    tx = halfstep_jax.scale_by_muon(**options)
    of_jax = np.asarray(jax.jit(tx.update)(jnp.asarray(x), tx.init(jnp.asarray(x)))[0])
    p = torch.nn.Parameter(torch.zeros(8, 8))
    p.grad = torch.from_numpy(x)
    up = halfstep_torch.scale_by_learning_rate(1.0, flip_sign=False)
    links = halfstep_torch.chain(halfstep_torch.scale_by_muon(**options), up)
    halfstep_torch.Optimizer([("w", p)], links, compile=False).step()
    for factor in (of_jax, p.detach().numpy()):
        assert np.abs(np.linalg.svd(factor, compute_uv=False) - 1).max() < spread
    np.testing.assert_allclose(of_jax, p.detach().numpy(), atol=1e-4)


def test_a_name_without_coefficients_is_refused():
    for muon in (lambda: halfstep_jax.muon(1e-3, "kimi"), lambda: halfstep_torch.scale_by_muon("kimi")):
        with pytest.raises(
            ValueError, match=r"uon: 'kimi' names no Newton-Schulz coefficients\. Use \"jordan\", "
        ):
            muon()


def normuon(outputs_first: bool, steps: int, scale: float) -> np.ndarray:
    """Return weights after steps of the paper's published code, in float64, for outputs by inputs."""
    x, momentum, average = steep(MATRIX, 0.5).astype(np.float64).T, 0.0, 0.0
    for g in gradients(steps).astype(np.float64).transpose(0, 2, 1):
        momentum = 0.95 * momentum + 0.05 * g
        o = newton_schulz((0.05 * g + 0.95 * momentum).astype(np.float32), [1], [0]).astype(np.float64)
        average = 0.95 * average + 0.05 * (o * o).mean(1, keepdims=True)
        rows = o / (np.sqrt(average) + 1e-10)
        x = x - 0.02 * scale * rows * np.linalg.norm(o) / np.linalg.norm(rows)
    return x if outputs_first else x.T


# A step of JAX takes seconds to compile.
SLOW_IN_JAX = [pytest.param("jax", marks=pytest.mark.slow), "torch"]


@pytest.mark.parametrize("framework", SLOW_IN_JAX)
@pytest.mark.parametrize("scale", ["original", "consistent_rms"])
def test_rows_follow_the_published_normuon(framework, scale):
    """As far as factors are apart (A14), and their rows: a row may be smaller than the mean by the spread."""
    steps, s = 6, {"original": (80 / 48) ** 0.5, "consistent_rms": 0.2 * 80**0.5}[scale]
    options = {"scale": scale, "normalize": "rows", "mu_dtype": "float32"}
    if framework == "jax":
        tx = optax.chain(halfstep_jax.scale_by_muon(**options), halfstep_jax.scale_by_learning_rate(0.02))
        end, _ = jax_run(tx, steep(MATRIX, 0.5), gradients(steps), "float32")
    else:
        links = halfstep_torch.scale_by_muon(**options), halfstep_torch.scale_by_learning_rate(0.02)
        tx = halfstep_torch.chain(*links)
        turned = [g.T.copy() for g in gradients(steps)]
        make = lambda named: halfstep_torch.Optimizer(named, tx)  # noqa: E731
        end, optimizer = torch_run(make, steep(MATRIX, 0.5).T.copy(), turned, "float32")
        (state,) = optimizer.state.values()
        assert state["second_momentum_buffer"].shape == (80, 1)
    exact = normuon(framework == "torch", steps, s)
    moved = steps * 0.02 * s * 1.2 * 48**0.5
    allowed = 4 * moved * bound(48) + steps * 2.0**-23 * np.linalg.norm(exact)
    assert np.linalg.norm(np.float64(end) - exact) <= allowed
    plain = steps * 0.02 * s * 0.1
    assert np.linalg.norm(end - (steep(MATRIX, 0.5) if framework == "jax" else steep(MATRIX, 0.5).T)) > plain


@pytest.mark.parametrize("framework", SLOW_IN_JAX)
def test_outputs_of_every_matrix_of_a_stack_and_of_a_convolution_move_alike(framework):
    """At the first step the average is a twentieth of the row's own mean square: all rows become equal."""
    x = steep((24, 36), 0.5) * np.geomspace(1, 4, 24, dtype=np.float32)[:, None]
    stack = np.stack([x, 3 * x[::-1]])
    rows = FACTORS[framework](stack, reduction_axis=2, output_axis=1, normalize="rows")
    kernel = x.reshape(24, 4, 3, 3)
    of_kernel = FACTORS[framework](kernel, reduction_axis=(1, 2, 3), output_axis=0, normalize="rows")
    for matrix in (*rows, of_kernel.reshape(24, 36)):
        lengths = np.linalg.norm(matrix, axis=1)
        assert lengths.max() < 1.0001 * lengths.min()
    factor = FACTORS[framework](x, reduction_axis=1, output_axis=0)
    lengths = np.linalg.norm(factor, axis=1)
    assert lengths.max() > 1.1 * lengths.min()
    assert abs(np.linalg.norm(rows[0]) / np.linalg.norm(factor) - 1) < 1e-4


@pytest.mark.slow
def test_a_run_with_rows_goes_on_in_the_other_framework(tmp_path):
    """Of one given factor all bits are the same: vectors of A22. Here the file has every array, in both."""
    w, g = steep((16, 24), 0.5), gradients(2)[:, :16, :24]
    tx = halfstep_jax.muon(0.02, normalize="rows", matrices=lambda name, x: True)
    params = {"w": jnp.asarray(w, jnp.bfloat16)}
    state, update = tx.init(params), jax.jit(tx.update)
    updates, state = update({"w": jnp.asarray(g[0], jnp.bfloat16)}, state, params)
    params = optax.apply_updates(params, updates)
    halfstep_jax.save_state(tmp_path / "jax", params, state, tx)

    model = torch.nn.Module()
    p = model.w = torch.nn.Parameter(torch.zeros(16, 24, dtype=torch.bfloat16))
    axes = halfstep_torch.MatrixAxes(reduction_axis=0, output_axis=1)
    optimizer = halfstep_torch.Muon(
        [("w", p)], 0.02, 0.0, normalize="rows", matrices={"w": axes}, compile=False
    )
    halfstep_torch.load_state(tmp_path / "jax", model, optimizer)
    halfstep_torch.save_state(tmp_path / "torch", model, optimizer)
    arrays = [safetensors.numpy.load_file(tmp_path / side) for side in ("torch", "jax")]
    assert arrays[0].keys() == arrays[1].keys() >= {"nu_row/w"}
    assert all(arrays[0][name].tobytes() == x.tobytes() for name, x in arrays[1].items())
    loaded, again = halfstep_jax.load_state(tmp_path / "torch", params, tx)
    assert (optax.tree.get(again, "nu_row")["w"] == optax.tree.get(state, "nu_row")["w"]).all()
    p.grad = torch.tensor(g[1]).bfloat16()
    optimizer.step()
    updates, state = update({"w": jnp.asarray(g[1], jnp.bfloat16)}, again, loaded)
    ends = (
        np.asarray(optax.tree.get(state, "nu_row")["w"]),
        optimizer.state[p]["second_momentum_buffer"].numpy(),
    )
    np.testing.assert_allclose(*ends, rtol=2 * bound(16))


def test_what_cannot_be_normalized_is_refused():
    for muon in (
        lambda: halfstep_jax.muon(1e-3, normalize="columns"),
        lambda: halfstep_torch.scale_by_muon(normalize="columns"),
    ):
        with pytest.raises(ValueError, match=r"normalize='columns' is none of ours\. Use \"rows\", or None"):
            muon()
    with pytest.raises(ValueError, match="beta2=1"):
        halfstep_torch.Muon([("w", torch.nn.Parameter(torch.ones(2, 2)))], normalize="rows", beta2=1.0)

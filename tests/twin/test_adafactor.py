"""Adafactor against its paper, Optax's and torch's; means and powers that all frameworks agree on."""

import math

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
import torch

import halfstep_jax
import halfstep_torch
from halfstep.rules.adafactor import factored_axes
from halfstep_spec.numbers.means import inverse_power, mean
from halfstep_spec.rules.adafactor import ScaleByFactoredRms
from on_torch.steps import step_by_ones
from twin.moving import assert_both_end_alike

STEPS, HALF = 10, 2.0**-24
# A root of two averages: 7 additions and 4 roundings of a mean, 3 of each of 10 averages, and the power's
# error of 2^-19 in what is new, all under a root; then two roots, a quotient, a product and a quotient.
U_ERROR = 2.0**-19 + (0.5 * 2 * (11 + 3 * STEPS) + 6) * HALF


def draws(*shape, seed=0):
    """Gradients whose sizes differ by rows, columns and steps."""
    rng = np.random.default_rng(seed)
    sizes = np.exp(rng.normal(size=(STEPS, *[1] * len(shape))) + rng.normal(size=shape))
    return (rng.normal(size=(STEPS, *shape)) * sizes).astype(np.float32)


def by_the_paper(gradients, axes, eps=1e-30):
    """Return the last update of algorithm 4, in float64: V = R C / (1^T R), of sums."""
    row = col = 0.0
    for t, g in enumerate(gradients.astype(np.float64), 1):
        rate = 1 - t**-0.8
        square = g * g + eps
        row = rate * row + (1 - rate) * square.sum(axes[0], keepdims=True)
        col = rate * col + (1 - rate) * square.sum(axes[1], keepdims=True)
    return gradients[-1] / np.sqrt(row * col / row.sum(axes[1], keepdims=True))


@pytest.mark.parametrize(("shape", "axes"), [((12, 20), (1, 0)), ((3, 2, 20, 12), (2, 3)), ((8, 8), (1, 0))])
def test_the_reference_follows_the_paper(shape, axes):
    gradients, rule = draws(*shape), ScaleByFactoredRms(min_dim_size_to_factor=8)
    state = rule.init(shape)
    for g in gradients:
        u, state = rule.step(g, state, "w")
    np.testing.assert_allclose(u, by_the_paper(gradients, axes), rtol=U_ERROR)
    assert [state.moments[name].codes.shape for name in ("nu", "nu_row", "nu_col")] == [
        (1,),
        *(tuple(1 if axis == reduced else n for axis, n in enumerate(shape)) for reduced in axes),
    ]


def test_a_vector_and_a_thin_matrix_keep_the_whole_average():
    for shape in ((24,), (20, 5)):
        gradients, rule = draws(*shape), ScaleByFactoredRms(min_dim_size_to_factor=8)
        state, nu = rule.init(shape), np.zeros(shape)
        for t, g in enumerate(gradients, 1):
            u, state = rule.step(g, state, "w")
            nu = (1 - t**-0.8) * nu + t**-0.8 * (np.float64(g) ** 2 + 1e-30)
        np.testing.assert_allclose(u, g / np.sqrt(nu), rtol=U_ERROR)


@pytest.mark.parametrize("size", [1, 2, 3, 127, 1000])
def test_a_mean_errs_by_the_depth_of_its_sum(size):
    x = np.exp(np.random.default_rng(size).normal(size=size) * 3).astype(np.float32)
    exact = math.fsum(map(float, x)) / size
    assert abs(float(mean(x)) - exact) <= (math.ceil(math.log2(size)) + 2) * HALF * exact


def test_powers_of_the_count_are_within_their_bound():
    for t in (1, 2, 7, 1000, 2**20 + 1, 2**24):
        for c in (0.0, 0.3, 0.8, 0.999, 1.0):
            exact = t ** -float(np.float32(c))
            # What c has below 2^-24 does not count: at most 2^-24 log(t).
            assert abs(float(inverse_power(t, c)) / exact - 1) <= 2.0**-19 + HALF * math.log(t)


def adafactors(package, chain):
    return chain(
        package.scale_by_factored_rms(min_dim_size_to_factor=8, nu_dtype="bfloat16", seed=1),
        package.clip_by_block_rms(0.5),
        package.scale_by_learning_rate(0.01),
        package.scale_by_param_block_rms(),
        package.add_decayed_weights(1e-3, absolute=True),
        package.round_stochastically(3),
    )


@pytest.mark.parametrize("shape", [(16, 25), (16, 7)], ids=["factored", "whole"])
def test_jax_and_torch_agree_to_the_bit(shape):
    assert_both_end_alike(adafactors, draws(*shape)[:6])


def params():
    rng = np.random.default_rng(3)
    shapes = {"matrix": (12, 20), "vector": (20,), "conv": (3, 2, 8, 12)}
    return {name: rng.normal(size=shape).astype(np.float32) for name, shape in shapes.items()}


def test_float32_follows_optax():
    """Updates are at most sqrt(n) long, n = 576, but clipped to a root mean square of 1.

    Optax takes 1 - decay from a rounded decay, off by 2^-24 in 10^-0.8, and the rest as above; averages of 10
    steps of size 1e-2 rms(p) sqrt(n), rms(p) = 1, and weights rounded once a step.
    """
    ends, start = [], jax.tree.map(jnp.asarray, params())
    options = {"min_dim_size_to_factor": 8, "momentum": 0.9, "weight_decay_rate": 1e-3}
    for package in (halfstep_jax, optax):
        tx, p = package.adafactor(1e-2, **options), start
        state, update = tx.init(p), jax.jit(tx.update)
        for t in range(STEPS):
            g = {name: jnp.asarray(draws(*x.shape)[t]) for name, x in start.items()}
            u, state = update(g, state, p)
            p = optax.apply_updates(p, u)
        ends.append(p)
    atol = STEPS * (1e-2 * 1.1 * math.sqrt(576) * (U_ERROR + HALF * 10**0.8) + 4 * HALF)
    for name in start:
        assert float(jnp.abs(ends[0][name] - start[name]).max()) > 1e-2
        np.testing.assert_allclose(ends[0][name], ends[1][name], atol=atol)


@pytest.mark.parametrize(("scale", "lr"), [(1.0, 0.5), (1e-5, 1e-2)], ids=["large steps", "small gradients"])
def test_float32_follows_torch(scale, lr):
    """Within the bound of Optax's, of weights up to 4: small gradients reach the floors, which are torch's.

    Steps of 1/2 are more than 1/sqrt(t) from the fifth on.
    """
    ends, start = [], {name: x for name, x in params().items() if name != "conv"}
    for optimizer in (halfstep_torch.Adafactor, torch.optim.Adafactor):
        named = {name: torch.nn.Parameter(torch.tensor(x)) for name, x in start.items()}
        ours = optimizer is halfstep_torch.Adafactor
        opt = optimizer(list(named.items() if ours else named.values()), lr=lr, weight_decay=0.1)
        for t in range(STEPS):
            for p in named.values():
                p.grad = torch.from_numpy(scale * draws(*p.shape)[t])
            opt.step()
        ends.append({name: p.detach().numpy() for name, p in named.items()})
    atol = STEPS * (lr * 4 * math.sqrt(240) * (U_ERROR + HALF * 10**0.8) + 4 * HALF)
    for name in start:
        assert np.abs(ends[0][name] - start[name]).max() > 1e-2
        np.testing.assert_allclose(ends[0][name], ends[1][name], atol=atol)


def test_bfloat16_weights_keep_rows_and_columns_in_float32_and_small_steps():
    """At a relative step of 1e-4 every weight rounded to nearest stays: half an ulp is 2^-9 of it."""
    p = torch.nn.Parameter(torch.full((64, 48), 1.25, dtype=torch.bfloat16))
    stays = torch.nn.Parameter(p.detach().clone())
    for param, storage in ((p, "stochastic"), (stays, "nearest")):
        optimizer = halfstep_torch.Adafactor([("w", param)], lr=1e-4, param_storage=storage)
        for _ in range(20):
            step_by_ones(optimizer)
    state = optimizer.state[stays]
    assert {state[key].dtype for key in ("row_var", "col_var")} == {torch.float32}
    assert state["variance"].dtype == torch.bfloat16
    assert bool((stays == 1.25).all())
    # 20 steps of 1e-4 rms(p); the mean of 3072 weights, each off by under an ulp of 2^-7, has an error of
    # 4 sigma under 4 2^-7 / (2 sqrt(3072)).
    moved = 1.25 - p.detach().float().mean().item()
    assert abs(moved - 20 * 1e-4 * 1.25) < 4 * 2.0**-8 / math.sqrt(3072)


def test_in_jax_too_rows_and_columns_are_float32_under_bfloat16_weights():
    state = halfstep_jax.adafactor(1e-2).init({"w": jnp.zeros((128, 256), jnp.bfloat16)})
    kinds = {name: optax.tree.get(state, name)["w"] for name in ("nu_row", "nu_col", "nu")}
    assert {name: (x.shape, str(x.dtype)) for name, x in kinds.items()} == {
        "nu_row": ((128, 1), "float32"),
        "nu_col": ((1, 256), "float32"),
        "nu": ((1,), "bfloat16"),
    }


def test_a_state_dict_goes_on_to_the_bit():
    def steps(optimizer, p, gradients):
        for g in gradients:
            p.grad = torch.from_numpy(g).bfloat16()
            optimizer.step()
        return p.detach().clone()

    p = torch.nn.Parameter(torch.ones(12, 20, dtype=torch.bfloat16))
    first = halfstep_torch.Adafactor([("w", p)], eps=(1e-6, 1e-3), d=0.5)
    middle, saved = steps(first, p, draws(12, 20)[:4]), first.state_dict()
    saved = {"state": {k: {n: x.clone() for n, x in s.items()} for k, s in saved["state"].items()}, **{
        k: x for k, x in saved.items() if k != "state"}}  # fmt: skip
    end = steps(first, p, draws(12, 20)[4:])
    again = torch.nn.Parameter(middle)
    second = halfstep_torch.Adafactor([("w", again)])
    second.load_state_dict(saved)
    assert torch.equal(steps(second, again, draws(12, 20)[4:]), end)
    assert second.param_groups[0]["eps"] == (1e-6, 1e-3)


@pytest.mark.parametrize("package", [halfstep_jax, halfstep_torch])
def test_bad_numbers_name_value_rule_and_way_out(package):
    chain = optax.chain if package is halfstep_jax else lambda tx: halfstep_torch.Optimizer(
        [torch.nn.Parameter(torch.ones(2))], halfstep_torch.chain(tx)
    )  # fmt: skip
    for make, message in (
        (lambda: package.scale_by_factored_rms(decay_rate=1.5), r"decay_rate=1.5 .*Use a power"),
        (lambda: package.scale_by_factored_rms(epsilon=-1.0), r"epsilon=-1.0 is negative. Use"),
        (lambda: package.scale_by_factored_rms(min_dim_size_to_factor=-1), r"min_dim_size.*=-1 .*Use 0"),
        (lambda: package.scale_by_factored_rms(step_offset=0.5), r"step_offset=0.5 is no integer"),
        (lambda: package.scale_by_factored_rms(nu_rounding="nearest"), r'freezes nu.*Use "stochastic"'),
        (lambda: package.scale_by_factored_rms(nu_dtype="float16"), r"cannot hold a second moment"),
        (lambda: package.clip_by_block_rms(0.0), r"threshold=0.0 .*leave the link out"),
        (lambda: package.scale_by_param_block_rms(-1e-3), r"min_scale=-0.001 is negative"),
    ):
        with pytest.raises(ValueError, match=message):
            chain(make())


def test_torchs_arguments_are_refused_by_their_names():
    params = [("w", torch.nn.Parameter(torch.ones(4, 4)))]
    for options, message in (
        ({"beta2_decay": 0.8}, r"Adafactor: beta2_decay=0.8 is outside \[-1, 0\]"),
        ({"d": 0.0}, "Adafactor: d=0.0"),
        ({"eps": (None, -1.0)}, r"eps\[1\]=-1.0 is negative"),
        ({"weight_decay": -0.1}, "weight_decay=-0.1 is negative"),
        ({"nu_rounding": "auto"}, 'nu_rounding="auto" freezes nu'),
    ):
        with pytest.raises(ValueError, match=message):
            halfstep_torch.Adafactor(params, **options)
    with pytest.raises(TypeError, match="eps=1e-30 is not a pair"):
        halfstep_torch.Adafactor(params, eps=1e-30)


def test_axes_of_one_element_may_be_factored_and_empty_ones_may_not():
    for least in (0, 1):
        assert factored_axes((5, 1), True, least) == (0, 1)
        assert factored_axes((5, 0), True, least) is None
    assert factored_axes((5, 1), True, 2) is None

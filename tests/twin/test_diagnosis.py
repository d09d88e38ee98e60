"""What `diagnose` tells of a run of ours in both packages: moments at an end, updates and numbers lost."""

import jax.numpy as jnp
import numpy as np
import optax
import pytest

import halfstep_jax
import halfstep_torch
from twin.moving import jax_run, torch_run

BOTH = pytest.mark.parametrize("framework", ["jax", "torch"])
SECOND = {"jax": "nu", "torch": "exp_avg_sq"}
P, *GRADIENTS = np.random.default_rng(0).normal(size=(3, 64, 128)).astype(np.float32)


def diagnosed(framework, gradients=GRADIENTS, lr=1e-3, start=P, links=None, dtype="bfloat16", **options):
    """Return the diagnosis of a run of AdamW, or of the links that a function of (package, chain) returns."""
    options = {"weight_decay": 0.0} | options
    if framework == "jax":
        tx = links(halfstep_jax, optax.chain) if links else halfstep_jax.adamw(lr, **options)
        w, state = jax_run(tx, start, gradients, dtype)
        params, grads = ({"w": jnp.asarray(x, dtype)} for x in (w, gradients[-1]))
        return halfstep_jax.diagnose(tx, params, grads, state)

    def make(named):
        if links:
            return halfstep_torch.Optimizer(named, links(halfstep_torch, halfstep_torch.chain))
        return halfstep_torch.AdamW(named, lr, compile=False, **options)

    _, optimizer = torch_run(make, start, gradients, dtype)
    return halfstep_torch.diagnose([("w", optimizer.param_groups[0]["params"][0])], optimizer)


ENDS = {1e-8: "at the smallest number of uroot4_e4m4, so that steps are too short", 1e5: "at the largest"}


@BOTH
@pytest.mark.parametrize("scale", ENDS)
def test_second_moments_at_the_ends_of_a_root_are_told(framework, scale):
    found = diagnosed(framework, [scale * g for g in GRADIENTS], recipe="one_pass")
    moment = found.moments[SECOND[framework]]
    assert (moment.lowest > 0.9, moment.highest > 0.9) == (scale < 1, scale > 1)
    assert any(ENDS[scale] in line and "use the recipe eight_bit" in line for line in found.advice)
    assert ("at the smallest number" if scale < 1 else "at the largest") in str(found)


@BOTH
@pytest.mark.parametrize("recipe", ["one_pass", "eight_bit", "four_bit"])
def test_weights_that_have_had_no_gradient_stand_at_no_end(framework, recipe):
    half = GRADIENTS[0] * (np.arange(64) >= 32)[:, None]
    moment = diagnosed(framework, [half], recipe=recipe).moments[SECOND[framework]]
    assert (moment.lowest, moment.highest) == (0, 0)


@BOTH
def test_what_is_not_finite_comes_first(framework):
    found = diagnosed(framework, [1e10 * g for g in GRADIENTS], nu_dtype="ufloat16_e7m9")
    assert found.nonfinite["weights"] > 0.9
    assert "of the weights" in found.advice[0]
    assert found.advice[0].endswith(
        "are infinite or NaN, and stay so. Go back to a checkpoint, and clip gradients."
    )
    assert found.advice[1].startswith("Gradients of 'w' are so large that squares of 100% of them are above")


@BOTH
@pytest.mark.parametrize(("rows", "advised"), [(12, False), (40, True)])
def test_the_share_of_gradients_below_the_range_of_a_format_is_reported_by_weight(framework, rows, advised):
    """Zeros are no gradients; a quarter of small ones may be."""
    g = np.clip(np.abs(GRADIENTS[0]), 0.01, None)
    g[:rows] *= 1e-9
    g[rows : rows + 4] = 0
    found = diagnosed(framework, [g], recipe="one_pass")
    assert found.out_of_range == {"w": rows / 60}
    assert f"gradients out of range: w  {rows / 60:.1%}" in str(found)
    told = [line for line in found.advice if "squares of 67% of them are below what uroot4_e4m4" in line]
    assert [line.startswith("Gradients of 'w' are so small") for line in told] == [True] * advised
    assert diagnosed(framework, [g], recipe="eight_bit").out_of_range == {}


# Without scales a NaN is one element's; with them it marks a block of 128.
NAN_SHARES = {"sixteen_bit": 1 / 8192, "one_pass": 1 / 8192, "eight_bit": 1 / 64, "four_bit": 1 / 64}


@BOTH
@pytest.mark.parametrize("recipe", NAN_SHARES)
def test_a_second_moment_that_is_nan_is_told(framework, recipe):
    broken = GRADIENTS[0].copy()
    broken[0, 0] = np.nan
    found = diagnosed(framework, [broken, GRADIENTS[1]], recipe=recipe)
    assert found.nonfinite[SECOND[framework]] == NAN_SHARES[recipe]
    assert f"of the {SECOND[framework]}" in found.advice[0]


@pytest.mark.parametrize("select", ["mu", "nu"])
def test_state_of_another_transform_that_is_nan_is_told_stored_or_not(select):
    tx = halfstep_jax.store_state(
        optax.adam(1e-3), halfstep_jax.scaled("int8"), select=lambda name, _: select in name.split("/")
    )
    params = {"w": jnp.ones((64, 128), jnp.bfloat16)}
    _, state = tx.update({"w": params["w"].at[0, 0].set(jnp.nan)}, tx.init(params), params)
    found = halfstep_jax.diagnose(tx, params, params, state).nonfinite
    shares = {"weights": 0.0, "gradients": 0.0, "mu": 1 / 8192, "nu": 1 / 8192}
    assert found == shares | {select: 1 / 64}


@BOTH
def test_updates_that_compensation_loses_have_an_advice_of_their_own(framework):
    found = diagnosed(framework, lr=1e-9, param_storage="compensated")
    assert found.updates_lost > 0.9
    assert [line for line in found.advice if "split8" in line and "2^-18" in line]
    assert not any(line.startswith("Rounding drops") for line in found.advice)
    kept = diagnosed(framework, lr=1e-4, param_storage="compensated")
    assert kept.updates_lost < 0.05
    assert "Nothing is lost." in str(kept)


@BOTH
def test_a_norm_above_the_largest_float_is_told(framework):
    def links(package, chain):
        return chain(package.clip_by_global_norm(1.0), package.scale_by_learning_rate(1.0))

    found = diagnosed(framework, [np.full(8, 3e38)], start=np.zeros(8), links=links, dtype="float32")
    assert "finite: clipping by it makes every update zero" in found.advice[-1]


@pytest.mark.slow
@BOTH
@pytest.mark.parametrize("table", [False, True], ids=["uroot8", "udynamic8"])
def test_moments_are_counted_by_format_though_codes_are_packed(framework, table):
    nu = halfstep_jax.codebook("udynamic8") if table else halfstep_jax.recipes.four_bit["nu_dtype"]
    found = diagnosed(framework, recipe="four_bit", nu_dtype=nu)
    assert found.advice == ()
    first, second = (moment.dtypes for moment in found.moments.values())
    assert first == {"relative int4, blocks of 32, fine scales": 8192}
    assert second == {nu.text: 8192}

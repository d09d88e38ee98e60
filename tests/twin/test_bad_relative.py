"""What moments in units of a root, and second moments, are refused for: by both packages, alike."""

import re

import jax.numpy as jnp
import pytest
import torch

import halfstep_jax
import halfstep_torch
from halfstep.storage.relative import LARGEST_BOUND, bound, rates_within
from on_torch.steps import step_by_ones

PACKAGES = {"jax": halfstep_jax, "torch": halfstep_torch}


def build(name: str, rule: str, **options) -> None:
    """Build a rule and its state for a matrix: what a user would do first."""
    if name == "jax":
        getattr(halfstep_jax, rule)(**options).init({"w": jnp.zeros((64, 64))})
    else:
        link = getattr(halfstep_torch, rule)(**options)
        halfstep_torch.Optimizer([("w", torch.nn.Parameter(torch.zeros(64, 64)))], link)


@pytest.mark.parametrize("name", PACKAGES)
def test_relative_with_blocks_needs_no_bound(name):
    build(name, "scale_by_adam", mu_dtype=PACKAGES[name].relative("int8", 128), b2=0.9999)


def test_the_count_stops_at_its_largest_value_in_both():
    last = 2**31 - 1
    tx = halfstep_jax.scale_by_adam()
    state = tx.init({"w": jnp.zeros(2)})._replace(count=jnp.int32(last - 1))
    p = torch.nn.Parameter(torch.ones(2))
    optimizer = halfstep_torch.Adam([("w", p)])
    step_by_ones(optimizer)
    saved = optimizer.state_dict()
    header = saved["param_groups"][0]["halfstep"]
    saved["state"][0]["step"], header["counts"] = torch.tensor(last - 1), str(last - 1)
    optimizer.load_state_dict(saved)
    for _ in range(2):
        _, state = tx.update({"w": jnp.ones(2)}, state)
        optimizer.step()
        assert int(state.count) == int(optimizer.state[p]["step"]) == last
    saved["state"][0]["step"], header["counts"] = torch.tensor(last + 1), str(last + 1)
    with pytest.raises(ValueError, match=r"step of .* is 2147483648, no whole number in \[0, 2\^31 - 1\]"):
        optimizer.load_state_dict(saved)


@pytest.mark.parametrize("name", PACKAGES)
@pytest.mark.parametrize("recipe", ["one_pass", "eight_bit"])
@pytest.mark.parametrize("rates", [{"b1": 0.5, "b2": 0.999}, {"b1": 0.9, "b2": 0.9999}])
def test_what_a_refusal_of_rates_advises_takes_them(name, recipe, rates):
    recipes, relative = PACKAGES[name].recipes, PACKAGES[name].relative
    advised = (
        r" from (0\.9\d?) to 0\.99, constant or in a schedule, or mu_dtype=relative\(\"int8\", 128\) with "
        r"nu_dtype=scaled\(\"uroot8\"\), or the recipe four_bit or sixteen_bit: these take any rates"
    )
    chosen = _moments(getattr(recipes, recipe))
    with pytest.raises(ValueError, match=advised) as refused:
        build(name, "scale_by_adam", **chosen, **rates)
    chosen["mu_rounding"] = "stochastic"
    for b1 in (float(re.search(advised, str(refused.value))[1]), 0.99):
        build(name, "scale_by_adam", **chosen, b1=b1, b2=rates["b2"])
    for way_out in (recipes.eight_bit | {"mu_dtype": relative("int8", 128)}, recipes.four_bit):
        build(name, "scale_by_adam", **_moments(way_out), **rates)


@pytest.mark.parametrize("name", PACKAGES)
@pytest.mark.parametrize("recipe", ["one_pass", "eight_bit", "four_bit"])
def test_recipes_take_slow_first_moments(name, recipe):
    """What feeds errors back warns, and is silent if it follows the warning."""
    chosen = _moments(getattr(PACKAGES[name].recipes, recipe))
    if "mu_rounding" in chosen:
        build(name, "scale_by_adam", **chosen, b1=0.99, b2=0.999)
        said = r'b1=0\.995 with mu_rounding="feedback" .* 199 errors .* Use mu_rounding="stochastic"'
        with pytest.warns(UserWarning, match=said):
            build(name, "scale_by_adam", **chosen, b1=0.995, b2=0.999)
        chosen["mu_rounding"] = "stochastic"
    build(name, "scale_by_adam", **chosen, b1=0.99, b2=0.999)


@pytest.mark.parametrize("name", PACKAGES)
def test_sixteen_bits_are_fed_back_at_any_rate(name):
    build(name, "scale_by_adam", mu_dtype="bfloat16", mu_rounding="feedback", b1=0.99)


def _moments(recipe):
    return {key: x for key, x in recipe.items() if key != "param_storage"}


@pytest.mark.parametrize("name", PACKAGES)
def test_a_second_moment_of_18_binades_is_warned_of(name):
    fmt = PACKAGES[name].scaled("float8_e4m3fn")
    with pytest.warns(
        UserWarning, match=r"nu_dtype=float8_e4m3fn holds 18 binades .* 28 % of all get over 4 times"
    ):
        build(name, "scale_by_adam", nu_dtype=fmt)
    build(name, "scale_by_adam", mu_dtype=fmt)


@pytest.mark.parametrize("b2", [0.9, 0.95, 0.98, 0.999, 0.9999, 0.99999])
def test_the_rates_that_a_message_names_are_within_the_bound_and_no_others_are(b2):
    ends = rates_within(b2)
    for b1 in (n / 100 for n in range(100)):
        fits = ends is not None and ends[0] <= b1 <= ends[1]
        assert fits == (bound(b1, b2) <= LARGEST_BOUND)

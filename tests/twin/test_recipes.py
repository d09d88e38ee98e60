"""The named recipes: the same names, bytes and bits in both packages."""

import inspect
from collections.abc import Mapping

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
import torch

import halfstep_jax
import halfstep_torch
from halfstep_jax import transform as jax_transform
from halfstep_spec import PARAM_STORAGES
from halfstep_torch.say_once import say_once
from twin.moving import jax_run, torch_run

SHAPE = (64, 128)
# Weights and moments, and a byte per scale.
BYTES = {
    "full_precision": 12,
    "near_float32": 7,
    "sixteen_bit": 6,
    "eight_bit": 2 + 2 + 1 / 128,
    "one_pass": 4,
    "four_bit": 2 + 1.5 + 1 / 32 + 1 / 128,
}


@pytest.fixture
def draws():
    return np.random.default_rng(5).normal(size=(4, *SHAPE)).astype(np.float32)


def bytes_per_param(arrays) -> float:
    """Return the bytes of weights and state, without counts and seeds."""
    return sum(x.nbytes for x in arrays if x.nbytes > 8) / (SHAPE[0] * SHAPE[1])


def run_jax(name, draws):
    """Return the weights, and the bytes per parameter, after some steps."""
    tx = halfstep_jax.adamw(1e-2, weight_decay=0.1, seed=3, **getattr(halfstep_jax.recipes, name))
    w, state = jax_run(tx, draws[0], draws[1:])
    return w, bytes_per_param([jnp.asarray(w, jnp.bfloat16), *jax.tree.leaves(state)])


def run_torch(name, draws):
    options = {"weight_decay": 0.1, "seed": 3, "compile": False, **getattr(halfstep_torch.recipes, name)}
    w, made = torch_run(lambda named: halfstep_torch.AdamW(named, 1e-2, **options), draws[0], draws[1:])
    (param,), (state,) = made.param_groups[0]["params"], made.state.values()
    return w, bytes_per_param([param, *state.values()])


@pytest.mark.parametrize("package", [halfstep_jax, halfstep_torch], ids=["jax", "torch"])
def test_every_recipe_is_tested(package):
    found = {
        name for name, value in vars(package.recipes).items() if isinstance(value, Mapping) and name[0] != "_"
    }
    assert found == set(BYTES)


@pytest.mark.slow
@pytest.mark.parametrize("name", BYTES)
def test_a_recipe_has_the_same_bits_in_both_packages_and_its_bytes(name, draws):
    (mine, kept), (theirs, kept_there) = run_jax(name, draws), run_torch(name, draws)
    np.testing.assert_array_equal(mine, theirs)
    assert kept == kept_there == BYTES[name]


@pytest.mark.parametrize("name", BYTES)
def test_an_infinite_gradient_takes_its_weight_or_its_block_and_no_other(name, draws):
    """As in torch, where it is NaN at once; under one_pass it is infinite for one step."""
    draws[1, 3, 5] = np.inf
    first, second = (torch.from_numpy(run_torch(name, draws[:n])[0]) for n in (2, 3))
    taken = torch.zeros(SHAPE, dtype=torch.bool)
    taken[3, slice(None) if name in ("eight_bit", "four_bit") else 5] = True  # blocks of 128
    assert torch.equal(second.isnan(), taken)
    assert torch.equal(first.isinf() if name == "one_pass" else first.isnan(), taken)
    assert (first[~taken].isfinite() & second[~taken].isfinite()).all()


@pytest.mark.slow
@pytest.mark.parametrize("name", BYTES)
def test_a_recipe_suits_lamb(name, draws):
    params = {"w": jnp.asarray(draws[0], jnp.bfloat16)}
    tx = halfstep_jax.lamb16(1e-2, **getattr(halfstep_jax.recipes, name))
    updates, _ = jax.jit(tx.update)(params, tx.init(params), params)
    assert np.isfinite(updates["w"]).all()
    p = torch.nn.Parameter(torch.from_numpy(draws[0]).bfloat16())
    p.grad = torch.from_numpy(draws[1]).bfloat16()
    halfstep_torch.Lamb16([p], lr=1e-2, compile=False, **getattr(halfstep_torch.recipes, name)).step()
    assert p.isfinite().all()


@pytest.mark.parametrize("package", [halfstep_jax, halfstep_torch], ids=["jax", "torch"])
def test_a_recipe_cannot_be_changed(package):
    with pytest.raises(TypeError, match="item assignment"):
        package.recipes.one_pass["nu_dtype"] = "float32"


@pytest.mark.parametrize("name", BYTES)
def test_a_recipe_may_be_given_by_its_name(name):
    arguments = inspect.signature(halfstep_torch.AdamW).parameters
    assert "recipe" in arguments
    settings = getattr(halfstep_torch.recipes, name)
    by_name, spread = (
        halfstep_torch.AdamW([torch.nn.Parameter(torch.ones(64, 128).bfloat16())], **options)
        for options in ({"recipe": name}, settings)
    )
    assert (
        by_name.param_groups[0].items()
        >= {key: x for key, x in spread.param_groups[0].items() if key not in ("params", "halfstep")}.items()
    )
    params = {"w": jax.ShapeDtypeStruct((64, 128), "bfloat16")}
    described = [
        halfstep_jax.describe(halfstep_jax.adamw(1e-3, **x), params) for x in ({"recipe": name}, settings)
    ]
    assert described[0] == described[1]


def test_what_is_given_beside_a_recipe_wins():
    params = {"w": jax.ShapeDtypeStruct((64, 128), "bfloat16")}
    tx = halfstep_jax.adamw(1e-3, recipe="near_float32", mu_dtype="float32", param_storage="stochastic")
    described = halfstep_jax.describe(tx, params)
    assert [described.of("w", name).format for name in ("mu", "nu")] == ["float32", "bfloat16"]
    assert described.of("w").why == "round_stochastically"


def with_all_defaults(make):
    """Return the arguments of a signature, as a caller passes them that reads it."""
    fields = inspect.signature(make).parameters.values()
    return {x.name: x.default for x in fields if x.default is not x.empty and x.kind is x.KEYWORD_ONLY}


@pytest.mark.parametrize(
    "alias", ["adam", "adamw", "sgd", "lion", "adan", "ademamix", "lamb", "lamb16", "muon"]
)
def test_injecting_numbers_keeps_the_recipe(alias):
    make, params = getattr(halfstep_jax, alias), {"w": jax.ShapeDtypeStruct((64, 128), "bfloat16")}
    momentum = {"momentum": 0.9} if alias == "sgd" else {}
    inject = optax.inject_hyperparams(
        make, static_args=("beta", "eps", "ns_steps") if alias == "muon" else (), hyperparam_dtype=jnp.float32
    )
    for recipe in ("full_precision", "eight_bit"):
        plain = halfstep_jax.describe(make(1e-3, recipe=recipe, **momentum), params)
        injected = inject(learning_rate=1e-3, recipe=recipe, **momentum)
        assert halfstep_jax.describe(injected, params).arrays == plain.arrays, recipe


@pytest.mark.parametrize(
    "name", ["Adam", "AdamW", "SGD", "Lion", "Adan", "AdEMAMix", "Lamb", "Lamb16", "Muon"]
)
def test_arguments_as_by_default_leave_a_recipe_as_it_is(name):
    make = getattr(halfstep_torch, name)
    momentum = {"momentum": 0.9} if name == "SGD" else {}
    for recipe in ("full_precision", "eight_bit"):
        named = [(n, torch.nn.Parameter(torch.ones(64, 128).bfloat16())) for n in ("w", "head")]
        plain, spelt_out = (
            halfstep_torch.describe(make(named, **{**others, "recipe": recipe, **momentum}))
            for others in ({}, with_all_defaults(make))
        )
        assert spelt_out == plain, recipe


P = [("w", torch.nn.Parameter(torch.ones(64, 128).bfloat16()))]
ONE_MOMENT = r'Use "full_precision", "near_float32", "sixteen_bit" or "eight_bit"\.$'


REFUSED = [
    (lambda recipe: halfstep_jax.lion(1e-3, recipe=recipe),
     r"lion: recipe='one_pass' does not apply: .*" + ONE_MOMENT),
    (lambda recipe: halfstep_torch.SGD(P, recipe=recipe),
     r"SGD: recipe='one_pass' does not apply: .*" + ONE_MOMENT),
    (lambda recipe: halfstep_jax.muon(1e-3, recipe="four_bit"),
     r"muon: recipe='four_bit' does not apply: .* \"one_pass\" or \"eight_bit\"\.$"),
    (lambda recipe: halfstep_torch.Muon(P, **halfstep_torch.recipes.one_pass),
     r"Muon: mu_dtype=.* is for Adam and LAMB\. Use mu_dtype=\.\.\., adam_mu_dtype=.* or recipe="),
    (lambda recipe: halfstep_torch.scale_by_muon(recipe="near_float32"),
     r"scale_by_muon: recipe='near_float32' says how weights are stored"),
    (lambda recipe: halfstep_torch.AdamW(P, recipe=recipe + "x"),
     r"AdamW: recipe='one_passx' is not a recipe\. Did you mean .one_pass.\? Use"),
    (lambda recipe: halfstep_jax.adamw(1e-3, halfstep_jax.recipes.one_pass),
     r"adamw: a recipe is given by position\."),
    (lambda recipe: halfstep_torch.Lion(P, **halfstep_torch.recipes.one_pass),
     r"Lion: nu_dtype=.* is for Adam and LAMB\. Use mu_dtype=\.\.\., or recipe=.full_precision"),
    (lambda recipe: halfstep_jax.sgd(0.1, **halfstep_jax.recipes.one_pass),
     r"sgd: mu_dtype=.* Use accumulator_dtype"),
    (lambda recipe: halfstep_jax.scale_by_lion(**halfstep_jax.recipes.one_pass),
     r'scale_by_lion: nu_dtype=.* or recipe="sixteen_bit" or "eight_bit"\.$'),
    (lambda recipe: halfstep_torch.scale_by_adan(**halfstep_torch.recipes.eight_bit),
     r"scale_by_adan: mu_dtype=.* is for Adam and LAMB\. Use mu_dtype=\.\.\., diff_dtype="),
    (lambda recipe: halfstep_jax.scale_by_adam(recipe="near_float32"),
     r"scale_by_adam: recipe='near_float32' says how weights are stored, .* split_params"),
    (lambda recipe: halfstep_torch.scale_by_adam(**halfstep_torch.recipes.near_float32),
     r"scale_by_adam: param_storage='split8' says how weights are stored"),
    (lambda recipe: halfstep_torch.Optimizer(P, recipe=recipe),
     r"Optimizer: recipe is no argument: .* Pass chain"),
    (lambda recipe: halfstep_torch.Optimizer(P, halfstep_torch.trace(0.9), lr=1e-3),
     r"Optimizer: lr is no argument: .* or use AdamW"),
    (lambda recipe: halfstep_torch.Optimizer(P), r"Optimizer: tx is missing"),
]  # fmt: skip


@pytest.mark.parametrize(("call", "message"), REFUSED)
def test_a_recipe_that_does_not_apply_is_named_and_what_does(call, message):
    with pytest.raises((TypeError, ValueError), match=message):
        call("one_pass")


@pytest.mark.parametrize("name", ["full_precision", "near_float32", "sixteen_bit", "one_pass", "eight_bit"])
def test_muon_takes_a_recipe_for_what_adamw_steps_and_keeps_its_momentum_in_as_many_bytes(name):
    shape = (64, 128)
    params = {"w": jax.ShapeDtypeStruct(shape, "bfloat16"), "head": jax.ShapeDtypeStruct(shape, "bfloat16")}
    by_adamw = halfstep_jax.describe(halfstep_jax.adamw(1e-3, recipe=name), params)
    in_jax = halfstep_jax.describe(halfstep_jax.muon(1e-3, recipe=name), params)
    named = [(n, torch.nn.Parameter(torch.ones(shape).bfloat16())) for n in params]
    in_torch = halfstep_torch.describe(halfstep_torch.Muon(named, recipe=name))
    for moment, key in (("mu", "exp_avg"), ("nu", "exp_avg_sq")):
        due = by_adamw.of("head", moment)
        found = in_jax.of("head", moment)
        assert (found.format, found.rounding) == (due.format, due.rounding)
        assert in_torch.of("head", key).format == due.format
        assert in_torch.of("head", key).rounding == due.rounding
    momentum = "float32" if name == "full_precision" else "float16, blocks of 128"
    assert in_jax.of("w", "mu").format == in_torch.of("w", "momentum_buffer").format == momentum
    assert in_jax.of("w").why == by_adamw.of("w").why


@pytest.mark.parametrize("name", ["sixteen_bit", "eight_bit"])
def test_links_take_recipes(name):
    params = {"w": jax.ShapeDtypeStruct((64, 128), "bfloat16")}
    by_name = halfstep_jax.scale_by_adam(recipe=name)
    spread = halfstep_jax.scale_by_adam(**getattr(halfstep_jax.recipes, name))
    assert halfstep_jax.describe(by_name, params) == halfstep_jax.describe(spread, params)
    in_jax = halfstep_jax.describe(halfstep_jax.scale_by_adan(recipe=name), params).of("w", "grad")
    in_torch = halfstep_torch.describe(halfstep_torch.Optimizer(P, halfstep_torch.scale_by_adan(recipe=name)))
    assert in_torch.of("w", "last_grad").format == in_jax.format
    assert in_jax.format == {"sixteen_bit": "bfloat16", "eight_bit": "float8_e4m3fn, blocks of 128"}[name]


def test_a_param_group_has_a_recipe_of_its_own():
    """ZeroRedundancyOptimizer hands the arguments of an optimizer to it as entries of every group."""
    norm = torch.nn.Parameter(torch.ones(128).bfloat16())
    groups = [
        {"params": P, "recipe": "eight_bit", "mu_dtype": "float32"},
        {"params": [("norm", norm)], "recipe": "full_precision"},
    ]
    optimizer = halfstep_torch.AdamW(groups, recipe="one_pass")
    found = halfstep_torch.describe(optimizer)
    assert [found.of(name, "exp_avg").format for name in ("w", "norm")] == ["float32", "float32"]
    assert [found.of(name, "exp_avg_sq").format for name in ("w", "norm")] == [
        "uroot8, blocks of 128",
        "float32",
    ]
    assert [group["param_storage"] for group in optimizer.param_groups] == ["stochastic", "split16"]
    with pytest.raises(ValueError, match="AdamW: recipe='none' is not a recipe"):
        halfstep_torch.AdamW([{"params": P, "recipe": "none"}])


@pytest.mark.parametrize("storage", PARAM_STORAGES)
def test_both_say_how_weights_of_a_storage_are_rounded(storage):
    rounding = "stochastic" if storage in ("stochastic", "split8") else "nearest"
    params = {"w": jnp.ones(4, "bfloat16")}
    weight = torch.nn.Parameter(torch.ones(4).bfloat16())
    in_jax = halfstep_jax.describe(halfstep_jax.adamw(1e-3, param_storage=storage), params)
    in_torch = halfstep_torch.describe(halfstep_torch.AdamW([("w", weight)], param_storage=storage))
    assert in_jax.of("w").rounding == in_torch.of("w").rounding == rounding


@pytest.mark.parametrize("package", ["jax", "torch"])
def test_flat_arrays_that_stay_float32_are_spoken_of_once_and_the_advice_helps(package, caplog):
    """Of a large matrix and a norm of 4,096 weights nothing is said."""
    jax_transform.say_once.cache_clear()
    say_once.cache_clear()

    def said(shapes, **options) -> list[str]:
        caplog.clear()
        for _ in range(2):
            if package == "jax":
                tx = halfstep_jax.adamw(1e-3, recipe="four_bit", **options)
                tx.init({str(i): jnp.ones(shape, jnp.bfloat16) for i, shape in enumerate(shapes)})
            else:
                params = [torch.nn.Parameter(torch.ones(shape, dtype=torch.bfloat16)) for shape in shapes]
                for p in params:
                    p.grad = torch.ones_like(p)
                named = [(str(i), p) for i, p in enumerate(params)]
                halfstep_torch.AdamW(named, recipe="four_bit", compile=False, **options).step()
        return [record.getMessage() for record in caplog.records if "min_ndim" in record.getMessage()]

    made = halfstep_jax if package == "jax" else halfstep_torch
    assert not said([(512, 256), (4096,)])
    lines = said([(8192,)])
    assert len(lines) == 2
    assert 'pass mu_dtype=relative("int4", 32, min_ndim=1)' in lines[0]
    assert 'pass nu_dtype=scaled("uroot8", 128, min_ndim=1)' in lines[1]
    jax_transform.say_once.cache_clear()
    say_once.cache_clear()
    advised = {
        "mu_dtype": made.relative("int4", 32, min_ndim=1),
        "nu_dtype": made.scaled("uroot8", 128, min_ndim=1),
    }
    assert not said([(8192,)], **advised)

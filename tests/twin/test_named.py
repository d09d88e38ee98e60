"""Named optimizers: every alias of JAX has a class of torch, and both are what `rules.named` declares."""

import ast
import functools
import inspect
import textwrap

import jax
import numpy as np
import optax
import pytest
import torch

import halfstep_jax
import halfstep_torch
from halfstep.rules import named
from on_torch.steps import step_by_ones
from twin.moving import jax_run, torch_run

CLASSES = {
    kind.named.alias: kind
    for kind in vars(halfstep_torch).values()
    if inspect.isclass(kind) and issubclass(kind, halfstep_torch.Optimizer) and kind.named is not None
}
TABLE = {entry.alias: entry for entry in vars(named).values() if isinstance(entry, named.Named)}
WITHOUT_ENTRY = {"adafactor"}
"""Its two dialects share neither arguments nor rates: each package has its own chain."""
OTHER_DEFAULTS = {
    *(("adafactor", argument) for argument in ("eps", "min_dim_size_to_factor")),
    *((alias, "weight_decay") for alias in ("adamw", "lion", "muon")),
    *(("muon", "adam_weight_decay"), ("sgd", "momentum"), ("schedule_free_adamw", "warmup_steps")),
}
"""They are those that users of Optax and of torch know."""


def test_every_alias_of_jax_has_a_class_of_torch():
    aliases = {
        name
        for name, function in vars(halfstep_jax).items()
        if inspect.isfunction(function) and "param_storage" in inspect.signature(function).parameters
    } - {"store_params"}
    assert CLASSES.keys() | WITHOUT_ENTRY == aliases
    assert TABLE.keys() == CLASSES.keys()


@pytest.mark.parametrize("alias", TABLE)
def test_the_arguments_for_moments_are_arguments_of_both(alias):
    for function in (getattr(halfstep_jax, alias), CLASSES[alias].__init__):
        arguments = inspect.signature(function).parameters
        formats = {name for name in arguments if name.endswith("_dtype") and name != "ns_dtype"}
        assert {moment.dtype for moment in CLASSES[alias].named.moments} == formats


@pytest.mark.parametrize("alias", [name for name in TABLE if name != "muon"])
def test_an_alias_passes_every_argument_to_its_links_by_name(alias):
    passed_on = ("named_transform", "optimizer_arguments")
    for function in (getattr(halfstep_jax, alias), CLASSES[alias].__init__):
        source = ast.parse(textwrap.dedent(inspect.getsource(inspect.unwrap(function))))
        calls = [x for x in ast.walk(source) if isinstance(x, ast.Call)]
        (call,) = (x for x in calls if isinstance(x.func, ast.Name) and x.func.id in passed_on)
        passed = {x.arg: ast.unparse(x.value) for x in call.keywords if x.arg is not None}
        assert passed == {name: name for name in passed}
        left_out = {"self"} | ({"momentum"} if function is halfstep_jax.sgd else set())  # of 0: no link
        assert inspect.signature(function).parameters.keys() - left_out == passed.keys()


def test_an_argument_of_both_packages_has_one_default_but_for_what_their_users_know():
    of_torch = {name.lower(): thing for name, thing in vars(halfstep_torch).items() if callable(thing)}
    others, compared = set(), 0
    for name in {*halfstep_jax.__all__, *CLASSES}:
        both = getattr(halfstep_jax, name), CLASSES.get(name, of_torch.get(name))
        if not all(map(callable, both)):
            continue
        here, there = (inspect.signature(thing).parameters for thing in both)
        for argument in here.keys() & there.keys():
            x, y = (getattr(x, "description", x) for x in (here[argument].default, there[argument].default))
            compared += 1
            others |= {(name, argument)} if x != y else set()
    assert others == OTHER_DEFAULTS
    assert compared > 200


FIRST = {"full_precision": "float32", "eight_bit": "float8_e4m3fn, blocks of 128"}
SECOND = {
    "full_precision": "float32",
    "sixteen_bit": "ufloat16_e7m9",
    "eight_bit": "uroot8, blocks of 128",
}
LEAD = {
    "full_precision": "float32",
    "near_float32": "float16, blocks of 128",
    "eight_bit": "int8, blocks of 32, fine scales",
}
# By moment what each recipe keeps it in, if not in bfloat16.
KEPT = {
    "adan": {"mu": FIRST, "diff": FIRST, "nu": SECOND, "grad": FIRST},
    "ademamix": {"slow": FIRST},
    "lion": {"mu": FIRST},
    "sgd": {"trace": FIRST},
    "schedule_free_adamw": {"lead": LEAD, "nu": SECOND},
}


@pytest.mark.parametrize("recipe", ["full_precision", "near_float32", "sixteen_bit", "eight_bit"])
@pytest.mark.parametrize("alias", KEPT)
def test_a_recipe_gives_the_same_formats_in_both(alias, recipe):
    options = {"recipe": recipe} | ({"momentum": 0.9} if alias == "sgd" else {})
    params = {"w": jax.ShapeDtypeStruct((64, 128), "bfloat16")}
    in_jax = halfstep_jax.describe(getattr(halfstep_jax, alias)(1e-3, **options), params)
    named = [("w", torch.nn.Parameter(torch.ones(64, 128).bfloat16()))]
    in_torch = halfstep_torch.describe(CLASSES[alias](named, **options))
    for moment in CLASSES[alias].named.moments:
        assert in_jax.of("w", moment.name).format == in_torch.of("w", moment.torch).format
    for moment, formats in KEPT[alias].items():
        assert in_jax.of("w", moment).format == formats.get(recipe, "bfloat16"), moment


@pytest.mark.parametrize("alias", ["adan", "ademamix"])
def test_alias_and_class_have_the_bits_of_their_chain(alias):
    draws = np.random.default_rng(2).normal(size=(6, 8, 16)).astype(np.float32)
    hs, options = halfstep_jax, {"weight_decay": 0.1, "seed": 5}
    links = (getattr(hs, f"scale_by_{alias}")(seed=5), hs.add_decayed_weights(0.1))
    chain = optax.chain(*links, hs.scale_by_learning_rate(1e-2), hs.round_stochastically(5))
    due, _ = jax_run(chain, draws[0], draws[1:])
    ours, _ = jax_run(getattr(hs, alias)(1e-2, **options), draws[0], draws[1:])
    make = functools.partial(CLASSES[alias], lr=1e-2, compile=False, **options)
    for end in (ours, torch_run(make, draws[0], draws[1:])[0]):
        np.testing.assert_array_equal(end, due)


def test_alpha_is_an_entry_of_the_group_and_may_be_warmed_up():
    weights = []
    for alphas in ((0.0, 0.0), (0.0, 5.0)):
        p = torch.nn.Parameter(torch.ones(64))
        optimizer = halfstep_torch.AdEMAMix([("w", p)], lr=1e-2, compile=False)
        for alpha in alphas:
            optimizer.param_groups[0]["alpha"] = alpha
            step_by_ones(optimizer)
        weights.append(p.detach())
    # The slow average is 1 - 0.9999^2 of a gradient of 1, in units of the root 1, and five times that.
    np.testing.assert_allclose((weights[0] - weights[1]).numpy(), 1e-2 * 5 * (1 - 0.9999**2), rtol=1e-2)


def test_three_rates_are_asked_for():
    p = [torch.nn.Parameter(torch.ones(3))]
    for kind in (halfstep_torch.Adan, halfstep_torch.AdEMAMix):
        with pytest.raises(TypeError, match=r"betas=\(0\.9, 0\.99\) is not a tuple of 3"):
            kind(p, betas=(0.9, 0.99))
        with pytest.raises(ValueError, match=rf"{kind.__name__}: betas\[2\]=1\.5"):
            kind(p, betas=(0.9, 0.99, 1.5))

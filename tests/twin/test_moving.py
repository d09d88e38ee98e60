"""A run that changes framework on the way ends with the bits of one that never did."""

import copy
from typing import NamedTuple

import jax
import numpy as np
import optax
import pytest

import halfstep_jax
import halfstep_torch
from halfstep.rules.adamw_in_codes import AdamWInCodes
from halfstep_jax.leaves import HELD_BY_FLOAT32
from halfstep_spec import CODEBOOK_CODES, PARAM_STORAGES, PLAIN_CODES, RULES, SCALED_CODES
from halfstep_spec.storage.relative_codes import FINE_CODES, FIXED_CODES
from twin.moving import SEED, JaxSide, TorchSide, formats, record


class Run(NamedTuple):
    """A rule, the dtype of its weights, how they are stored, and the formats of its moments."""

    rule: str
    dtype: str
    storage: str
    mu: str | None
    nu: str | None = None


# Together they have every rule, every format and every weight storage.
_RUNS = {
    "default": Run("adamw", "bfloat16", "stochastic", "bfloat16", "bfloat16"),
    "four-bit": Run("adamw", "bfloat16", "split16", "relative int4/8", "uroot8/8"),
    "fourth root": Run("adamw", "bfloat16", "stochastic", "relative mulaw8", "uroot4_e4m4"),
    "one-pass": Run("adam", "bfloat16", "stochastic", "relative float8_e3m4", "ufloat16_e7m9"),
    "relative": Run("adamw", "bfloat16", "nearest", "relative int8/8", "uroot8/8"),
    "fixed": Run("adam", "float16", "stochastic", "relative float8_e3m4", "float32"),
    "tables": Run("adamw", "bfloat16", "compensated", "dynamic8/8", "udynamic8/8"),
    "fp8": Run("adamw", "float16", "master", "float8_e4m3fn/8", "float8_e4m3fn/8"),
    "sixteen": Run("adan", "bfloat16", "split8", "float16", "float16/8"),
    "eight": Run("adan", "bfloat16", "master", "float16/8", "float8_e4m3fn/8"),
    "slow average": Run("ademamix", "bfloat16", "split8", "bfloat16", "ufloat16_e7m9"),
    "rows and columns": Run("adafactor", "bfloat16", "split8", "float32", "bfloat16"),
    "lamb": Run("lamb", "bfloat16", "stochastic", "bfloat16", "bfloat16"),
    "lamb16": Run("lamb16", "bfloat16", "master", "float8_e4m3fn/8", "ufloat8_e5m3/8"),
    "lion": Run("lion", "float16", "split8", "fine int8/8"),
    "momentum": Run("sgd", "bfloat16", "nearest", "float8_e4m3fn/8"),
    "float32": Run("sgd", "float32", "stochastic", "bfloat16"),
    "schedule-free": Run("schedule_free", "bfloat16", "split8", "int8/8", "uroot8/8"),
    "fed back": Run("adamw_fed_back", "bfloat16", "feedback", "relative float8_e3m4", "uroot8/8"),
    "fed back, momentum": Run("sgd_fed_back", "bfloat16", "feedback", "bfloat16"),
    "in codes": Run("adamw_in_codes", "float32", "int8", "relative int8/8", "uroot8/8"),
    "stored": Run("stored", "bfloat16", "stochastic", "int8/8"),
}
_CLASSES = {"adamw": "AdamW", "adam": "Adam", "adan": "Adan", "ademamix": "AdEMAMix"}
_CLASSES["adamw_fed_back"] = "AdamW"
# The formats of their moments besides mu and nu.
_FURTHER = {
    "adan": {"diff_dtype": "float32", "grad_dtype": "bfloat16"},
    "ademamix": {"slow_dtype": "bfloat16"},
}
# Norms alike in both; a power of their quotient is not.
_LAMB = {"lamb": {"exact": True}, "lamb16": {"exact": True, "trust_power": None}}
# What the aliases are called after is not always the rule.
_RULE_OF = {"adamw": "adam", "sgd": "trace", "stored": "store_state"}


def _factored(package, nu, **seed):
    """Return the link of Adafactor: of two kernels, one is factored."""
    return package.scale_by_factored_rms(min_dim_size_to_factor=4, nu_dtype=nu, **seed)


def _in_codes(package, mu, nu, **seed):
    rows = package.scaled("int8", "row", 0, 0, scale="fine")
    options = {"mu_dtype": mu, "nu_dtype": nu, "mu_rounding": "stochastic", "param_dtype": rows}
    return AdamWInCodes(1e-2, weight_decay=0.1, **options, **seed)


def jax_side(name):
    rule, dtype, storage, mu, nu = _RUNS[name]
    hs = halfstep_jax
    mu, nu = formats(hs, mu), formats(hs, nu)
    common = {"param_storage": storage, "seed": SEED}
    if rule in ("adamw", "adam", "adamw_fed_back"):
        tx = getattr(hs, rule.removesuffix("_fed_back"))(1e-2, mu_dtype=mu, nu_dtype=nu, **common)
    elif rule in _FURTHER:
        options = common | _FURTHER[rule]
        tx = getattr(hs, rule)(1e-2, weight_decay=0.1, mu_dtype=mu, nu_dtype=nu, **options)
    elif rule in _LAMB:
        options = common | _LAMB[rule]
        tx = getattr(hs, rule)(1e-2, weight_decay=0.1, mu_dtype=mu, nu_dtype=nu, **options)
    elif rule == "lion":
        tx = hs.lion(1e-3, mu_dtype=mu, weight_decay=0.1, **common)
    elif rule in ("sgd", "sgd_fed_back"):
        tx = hs.sgd(1e-2, 0.9, accumulator_dtype=mu, **common)
    elif rule == "schedule_free":
        tx = hs.schedule_free_adamw(1e-2, 5, weight_decay=0.1, lead_dtype=mu, nu_dtype=nu, **common)
    elif rule == "adamw_in_codes":
        tx = hs.as_transform(_in_codes(hs, mu, nu, seed=SEED))
    elif rule == "adafactor":
        chain = optax.chain(_factored(hs, nu, seed=SEED), hs.scale_by_learning_rate(1e-2))
        tx = hs.split_params(chain, 8, seed=SEED)
    else:
        inner = hs.store_state(optax.chain(hs.trace(0.9, seed=3), hs.scale_by_adam(seed=4)), mu, seed=SEED)
        rate = hs.scale_by_learning_rate(lambda count: 1e-2)
        tx = optax.chain(inner, rate, hs.round_stochastically(SEED))
    return JaxSide(tx, dtype)


def torch_side(name):
    rule, dtype, storage, mu, nu = _RUNS[name]
    hs = halfstep_torch
    mu, nu = formats(hs, mu), formats(hs, nu)
    # Seeds are those of the file.
    common = {"param_storage": storage, "seed": 1, "compile": False}

    def make(params):
        if rule in ("adamw", "adam", "adamw_fed_back"):
            decay = 0.0 if rule == "adam" else 1e-4
            optimizer = getattr(hs, _CLASSES[rule])
            return optimizer(params, 1e-2, weight_decay=decay, mu_dtype=mu, nu_dtype=nu, **common)
        if rule in _FURTHER:
            options = {"weight_decay": 0.1, "mu_dtype": mu, "nu_dtype": nu} | common | _FURTHER[rule]
            return getattr(hs, _CLASSES[rule])(params, 1e-2, **options)
        if rule in _LAMB:
            options = {"weight_decay": 0.1, "mu_dtype": mu, "nu_dtype": nu} | common | _LAMB[rule]
            return getattr(hs, rule.capitalize())(params, 1e-2, **options)
        if rule == "lion":
            return hs.Lion(params, 1e-3, weight_decay=0.1, mu_dtype=mu, **common)
        if rule in ("sgd", "sgd_fed_back"):
            return hs.SGD(params, 1e-2, 0.9, accumulator_dtype=mu, **common)
        if rule == "schedule_free":
            options = {"weight_decay": 0.1, "warmup_steps": 5, "lead_dtype": mu, "nu_dtype": nu} | common
            return hs.AdamWScheduleFree(params, 1e-2, **options)
        if rule == "adamw_in_codes":
            return hs.Optimizer(params, hs.chain(_in_codes(hs, mu, nu)), compile=False)
        if rule == "adafactor":
            chain = hs.chain(_factored(hs, nu), hs.scale_by_learning_rate(1e-2))
            return hs.Optimizer(params, hs.split_params(chain, 8), compile=False)
        inner = hs.store_state(hs.chain(hs.trace(0.9), hs.scale_by_adam()), mu)
        tx = hs.chain(inner, hs.scale_by_learning_rate(1e-2), hs.round_stochastically())
        return hs.Optimizer(params, tx, compile=False)

    return TorchSide(make, dtype)


def _second_moments(codes):
    return {name for name, one in codes.items() if one.for_second_moments}


def test_every_rule_format_and_storage_has_a_run_that_changes_framework():
    blocks = SCALED_CODES | CODEBOOK_CODES
    firsts = {name for name, one in PLAIN_CODES.items() if one.signed}
    firsts |= {f"{name}/8" for name, one in blocks.items() if one.signed} | {"fine int8/8"}
    firsts |= {f"relative {name}" for name in FIXED_CODES} | {f"relative {name}/8" for name in FINE_CODES}
    seconds = _second_moments(PLAIN_CODES) | {f"{name}/8" for name in _second_moments(blocks)}
    runs = _RUNS.values()
    assert {run.mu for run in runs} == firsts
    assert {run.nu for run in runs} - {None} == seconds
    # Sums of products have an order of each framework's own, and so has Muon's factor; schedule-free runs
    # begin with the second moment alone.
    apart = {"muon", "normuon", "rms"}
    assert {_RULE_OF.get(run.rule, run.rule) for run in runs} == {*RULES, *_LAMB, "store_state"} - apart
    assert {run.storage for run in runs if run.dtype != "float32"} == {*PARAM_STORAGES, "feedback"}
    assert {run.dtype for run in runs} == set(HELD_BY_FLOAT32)


@pytest.mark.parametrize(
    ("name", "steps", "every"),
    [
        ("float32", 40, 10),
        *(pytest.param(name, 60, 20, marks=pytest.mark.slow) for name in _RUNS),
        *(pytest.param(name, 500, 50, marks=pytest.mark.exhaustive) for name in _RUNS),
    ],
)
def test_a_run_that_changes_framework_keeps_its_bits(name, steps, every, tmp_path):
    path, numbers = tmp_path / "run.safetensors", record(steps, _RUNS[name].dtype)
    sides = (jax_side(name), torch_side(name))
    sides[0].start(numbers[0])
    stays = copy.copy(sides[0])  # with the same compiled step
    for t, g in enumerate(numbers[1:]):
        at = t // every % 2
        if t and t % every == 0:
            sides[1 - at].save(path)
            sides[at].load(path)
        stays.step(g)
        sides[at].step(g)
    sides[at].save(path)
    sides[0].load(path)
    assert jax.tree.structure(sides[0].state) == jax.tree.structure(stays.state)
    for mine, theirs in zip(sides[0].leaves(), stays.leaves(), strict=True):
        assert (mine.dtype, mine.shape, mine.tobytes()) == (theirs.dtype, theirs.shape, theirs.tobytes())
    moved = stays.leaves()[0] != np.asarray(jax.tree.leaves(stays.tree(numbers[0]))[0])
    assert moved.mean() > 0.5


@pytest.mark.slow
def test_what_passes_through_a_file_of_jax_goes_on_in_torch_with_the_same_bits(tmp_path):
    """Every run: what its arrays are is known to both, without a step in JAX, which would be compiled."""
    first, second = tmp_path / "first", tmp_path / "second"
    for name, run in _RUNS.items():
        numbers = record(4, run.dtype)
        stays, through, moves = torch_side(name), jax_side(name), torch_side(name)
        stays.start(numbers[0])
        for g in numbers[1:3]:
            stays.step(g)
        stays.save(first)
        through.load(first)
        through.save(second)
        moves.load(second)
        for g in numbers[3:]:
            stays.step(g)
            moves.step(g)
        moves.save(second)
        stays.save(first)
        assert second.read_bytes() == first.read_bytes(), name

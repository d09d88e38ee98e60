"""What the hunt has found, each as a case of its own."""

import dataclasses

import numpy as np
import pytest

from halfstep.checkpoint import header
from halfstep.storage.state_dtypes import as_format
from hunt.settings import Numbers, Setting
from hunt.sides import Jax, Torch
from hunt.test_steps import LEAST, follow

_ADAM = Setting(
    "adam",
    "float32",
    "stochastic",
    (("mu_dtype", "bfloat16"), ("nu_dtype", "bfloat16")),
    (("mu_rounding", "stochastic"), ("nu_rounding", "stochastic")),
    "decoupled",
    (("w", (3, 0)),),
)
_NUMBERS = Numbers({"b1": 0.9, "b2": 0.95, "eps": 1e-8}, 1e-3, 0.1, 7)


def test_a_weight_without_elements_is_stepped():
    """Its strides may all be 0, as NumPy makes them: it has no elements that could share memory."""
    follow(Torch, _ADAM, _NUMBERS, 0, ["near 1", "near 1"])


@pytest.mark.parametrize("shape", [(3, 0), (0, 8, 256)])
def test_codes_of_a_weight_without_elements_have_no_tiles(shape):
    """JAX cut no elements into a number of tiles that it divided by: ZeroDivisionError while tracing."""
    formats = (("mu_dtype", ("codebook", "dynamic8", "row", ())), ("nu_dtype", ("scaled", "uroot8", 128, ())))
    setting = dataclasses.replace(_ADAM, formats=formats, shapes=(("w", shape),))
    follow(Jax, setting, _NUMBERS, 0, ["near 1", "near 1"])


def test_a_weight_without_axes_has_moments_in_units_of_a_root():
    """The reference raised ValueError."""
    formats = (("mu_dtype", ("relative", "float8_e3m4", None, ())), ("nu_dtype", "bfloat16"))
    setting = dataclasses.replace(_ADAM, formats=formats, shapes=(("w", ()),))
    follow(Torch, setting, _NUMBERS, 0, ["near 1", "near 1", "any"])


@pytest.mark.parametrize("scale", ["power_of_two", "fine"])
def test_a_moment_of_integers_has_one_zero_which_a_weight_of_minus_zero_shows(scale):
    """torch went on with the -0.0 that it had rounded, so that the weight lost its sign."""
    kind = ("scaled", "int8", 2, (("scale", scale),))
    options = (("rounding", "stochastic"), ("nesterov", False))
    shapes = (("b", ()), ("w", (13,)))
    setting = Setting("trace", "float32", "stochastic", (("accumulator_dtype", kind),), options, "", shapes)
    for draw_seed in range(20):
        follow(Torch, setting, Numbers({"decay": 0.9}, 1e-3, 0.1, 0), draw_seed, ["special", "near 1"])


def test_auto_rounds_as_the_reference_does_where_jax_knows_the_rate():
    """The hunt traced the rates, and auto is stochastic then (F3); nearest falls short at none of these."""
    kind = ("scaled", "float16", None, ())
    formats = (*_ADAM.formats, ("diff_dtype", kind), ("grad_dtype", "float32"))
    options = (("mu_rounding", "auto"), ("nu_rounding", "stochastic"))
    setting = Setting("adan", "bfloat16", "stochastic", formats, options, "l2", (("w", (129,)),))
    numbers = Numbers({"b1": 0.9, "b2": 0.5, "b3": 0.9, "eps": 1e-8}, 1e-3, 0.1, 0)
    follow(Jax, setting, numbers, 0, ["near 1"] * 3)


def test_a_first_infinite_gradient_of_adan_makes_its_difference_nan():
    """XLA took the product with 0 or 1, made of a bool, for a choice; 0 times an infinity is NaN (A11)."""
    kinds = {"mu_dtype": "float32", "diff_dtype": "float32", "nu_dtype": "float32", "grad_dtype": "float32"}
    options = (("mu_rounding", "stochastic"), ("nu_rounding", "stochastic"))
    setting = Setting("adan", "float32", "stochastic", tuple(kinds.items()), options, "", (("w", ()),))
    numbers = Numbers({"b1": 0.9, "b2": 0.9, "b3": 0.9, "eps": 1e-8}, 1e-3, 0.1, 0)
    for draw_seed in range(20):
        follow(Jax, setting, numbers, draw_seed, ["near 1", "special"], least=LEAST)


@pytest.mark.parametrize("run", [Torch, Jax])
@pytest.mark.parametrize("shape", [(0,), (3, 0)])
def test_adafactor_steps_a_weight_without_elements(run, shape):
    """The mean of no numbers could not be reshaped, in either package or in the reference (M3)."""
    options = (("factored", True), ("step_offset", 0), ("min_dim_size_to_factor", 2))
    setting = Setting("adafactor", "bfloat16", "split16", (), options, "decoupled", (("w", shape),))
    rates = {"decay_rate": 0.8, "epsilon": 1e-30, "floor": 0.0, "clipping_threshold": 1.0, "min_scale": 1e-3}
    follow(run, setting, Numbers(rates, 1e-3, 0.1, 0), 0, ["near 1"] * 3)


@pytest.mark.filterwarnings("ignore:.*too coarse for the factor of a matrix")
@pytest.mark.parametrize("run", [Torch, Jax])
def test_auto_rounds_the_momentum_of_muon_to_nearest_unless_that_freezes(run):
    """The reference asked whether the average falls short; that of Muon is amplified (F20)."""
    options = (("mu_rounding", "auto"), ("nesterov", True), ("bias_correction", False), ("given", True))
    options += (("output_axis", 1), ("scale", None))
    kinds = (("mu_dtype", ("scaled", "float8_e4m3fn", 2, ())),)
    setting = Setting("muon", "float32", "nearest", kinds, options, "", (("w", (5, 7)),))
    follow(run, setting, Numbers({"beta": 0.9}, 1e-3, 0.1, 7), 0, ["near 1"] * 3)


@pytest.mark.parametrize("dtype", [b"0\0", b",,"])
def test_bytes_that_numpy_reads_as_fields_are_refused_by_name(dtype):
    """NumPy raised ValueError and SyntaxError."""
    with pytest.raises(TypeError, match=r"^AdamW: mu_dtype=b.* is not a state dtype\. Use"):
        as_format("AdamW", "mu_dtype", dtype)


def test_a_rounding_of_no_name_in_a_header_is_told():
    """Joining it with names raised TypeError."""
    array = {"format": {"dtype": "bfloat16"}, "rounding": None}
    assert header._said(array) == "bfloat16 (None)"


_SUBNORMAL = Setting(
    "adamw_in_codes",
    "float32",
    "nearest",
    (
        ("mu_dtype", ("scaled", "float8_e4m3fn", 7, ())),
        ("nu_dtype", ("codebook", "udynamic8", 128, ())),
        ("param_dtype", ("scaled", "int8", "row", (("scale", "fine"),))),
    ),
    (("mu_rounding", "nearest"), ("nu_rounding", "nearest")),
    "decoupled",
    (("a/bias", (2, 1, 3, 2)),),
)


def test_jax_may_differ_where_a_number_is_subnormal_and_nowhere_else(monkeypatch):
    """Rounding left a number out; times an `eps` of 1e-30 it is subnormal. XLA stores 0.0 for -0.0 (A8)."""
    rates = {"b1": 0.9, "b2": 0.95, "eps": 1e-30, "eps_root": 0.0}
    example = (Jax, _SUBNORMAL, Numbers(rates, 1e-3, 0.1, 0), 1, ["near 1", "zero"], (), LEAST)
    follow(*example)

    def with_a_wrong_bit(self):
        arrays = unbroken(self)
        return {**arrays, "a/bias p": arrays["a/bias p"] ^ np.uint32(1)}

    unbroken = Jax.arrays
    monkeypatch.setattr(Jax, "arrays", with_a_wrong_bit)
    with pytest.raises(AssertionError, match="a/bias p: 12 of 12 elements differ"):
        follow(*example)

"""Codes as `halfstep` knows them, and tables as both packages look them up: those of the reference."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import torch

from backends.on_jax import from_jax
from backends.on_torch import from_torch
from compare import assert_same
from halfstep.storage import codes, tables
from halfstep_jax.numbers import tables as jax_tables
from halfstep_spec.numbers.random_words import random_words
from halfstep_spec.storage import codes as spec
from halfstep_spec.storage import relative_codes as spec_codes
from halfstep_spec.storage import tables as spec_tables
from halfstep_spec.vectors import Array
from halfstep_torch.numbers import tables as torch_tables

REFERENCE = {
    "plain": spec.PLAIN_CODES,
    "scaled": {**spec.SCALED_CODES, **spec.CODEBOOK_CODES},
    "fixed": spec_codes.FIXED_CODES,
    "fine": spec_codes.FINE_CODES,
}
ENTRIES = [(family, name) for family, entries in codes.CODES.items() for name in entries]
FACTS = ("signed", "packed", "for_second_moments", "dithered")


def test_both_know_the_same_formats():
    assert {family: set(entries) for family, entries in codes.CODES.items()} == {
        family: set(entries) for family, entries in REFERENCE.items()
    }


@pytest.mark.parametrize(("family", "name"), ENTRIES)
def test_what_is_known_of_codes_is_what_the_reference_has(family, name):
    ours, theirs = codes.CODES[family][name], REFERENCE[family][name]
    assert [getattr(ours, fact) for fact in FACTS] == [getattr(theirs, fact) for fact in FACTS]
    # The packages take float32 as never freezing (contract F3).
    assert ours.half_gap == (0 if name == "float32" else theirs.half_gap)
    if family in ("scaled", "fine"):
        assert ours.nan_in_scale == theirs.nan_in_scale
        assert ours.scale_range == theirs.scale_range


@pytest.mark.parametrize("name", spec_tables.TABLES)
def test_tables_are_those_of_the_reference(name):
    ours, theirs = tables.TABLES[name], spec_tables.TABLES[name]
    np.testing.assert_array_equal(ours.values.view(np.uint32), theirs.values.view(np.uint32))
    assert (ours.zero, ours.signed) == (theirs.zero, theirs.signed)


def near_every_number(name: str) -> np.ndarray:
    """Return a table, its midpoints, what is next to both, and values of every size between them."""
    numbers = spec_tables.TABLES[name].values
    middles = ((numbers[:-1].astype(np.float64) + numbers[1:]) / 2).astype(np.float32)
    rows = [numbers, middles]
    for end in (-4, 4):
        step = np.concatenate(rows[:2])
        for _ in range(4):
            step = np.nextafter(step, np.float32(end))
            rows.append(step)
    rng = np.random.default_rng(0)
    spread = np.exp(rng.uniform(-18, 1, 50_000)) * rng.choice([-1, 1], 50_000)
    powers = 10.0 ** np.arange(-9, 1)
    ends = [0.0, -0.0, 1e-38, -1e-38, 1e-45, -1e-45, 3.9, -3.9]
    y = np.concatenate([*rows, spread, powers, -powers, ends]).astype(np.float32)
    y = y[np.abs(y) <= 4]  # what a scale leaves of finite values
    return y if spec_tables.TABLES[name].signed else np.abs(y)


def code_in_jax(y, words, table):
    code = jax.jit(functools.partial(jax_tables.encode_table, table=table))
    codes = code(jnp.asarray(y), None if words is None else jnp.asarray(words.view(np.int32)))
    decode = jax.jit(functools.partial(jax_tables.decode_table, table=table))
    return from_jax(codes.astype(jnp.uint8)), from_jax(decode(codes.astype(jnp.int32)))


def code_in_torch(y, words, table):
    words = None if words is None else torch.from_numpy(words.view(np.int32))
    codes = torch_tables.encode_table(torch.from_numpy(y), words, table)
    return from_torch(codes.to(torch.uint8)), from_torch(torch_tables.decode_table(codes, table))


@pytest.mark.parametrize("code", [code_in_jax, code_in_torch])
@pytest.mark.parametrize("name", spec_tables.TABLES)
def test_values_next_to_every_number_and_middle_get_the_codes_of_the_reference(name, code):
    y, table = near_every_number(name), spec_tables.TABLES[name]
    random = random_words(0, 1, "w", 1, y.shape)
    for words in (None, np.zeros_like(random), np.full_like(random, 2**32 - 1), random):
        codes, numbers = code(y, words, tables.TABLES[name])
        due = spec_tables.encode_table(y, words, table)
        assert_same(codes, Array.of(due), name)
        assert_same(numbers, Array.of(spec_tables.decode_table(due, table)))


@pytest.mark.slow
@pytest.mark.parametrize("name", ["dynamic8", "udynamic8"])
def test_what_accelerators_compute_is_what_a_cpu_looks_up(name):
    table = tables.TABLES[name]
    index, codes = jnp.arange(257), jnp.arange(256)
    numbers = np.append(spec_tables.TABLES[name].values, np.float32(np.inf))
    for compiled in (lambda f: f, jax.jit):  # with products that are fused with the sum, and without
        computed = compiled(functools.partial(jax_tables._computed, table=table))(index)
        assert_same(from_jax(computed), Array.of(numbers))
        by_code = compiled(functools.partial(jax_tables._computed_by_code, table=table))(codes)
        assert_same(from_jax(by_code), from_jax(jax_tables._looked_up_by_code(codes, table)))

"""Codebooks: tables and codes are those of the spec; where packed codes stand."""

import itertools

import numpy as np
import pytest
import torch

import halfstep_spec as spec
from backends.on_torch import from_torch, to_torch
from compare import assert_same
from halfstep.storage.tables import TABLES as SHARED_TABLES
from halfstep_spec.storage.tables import TABLES, decode_table, encode_table
from halfstep_spec.vectors import Array
from halfstep_torch.numbers import tables
from on_torch.steps import values
from on_torch.test_formats import FOUR, run, weights

SHAPES = ((64, 256), (10, 64, 3, 3), (70, 100), (300,), (8, 8), (40, 131), (2, 5000))
"""Whole and short blocks, runs of an odd number of elements, leaves too small for codes."""


@pytest.mark.parametrize("name", TABLES)
def test_values_next_to_every_number_and_middle_get_the_codes_of_the_spec(name):
    numbers = TABLES[name].values
    middles = ((numbers[:-1].astype(np.float64) + numbers[1:]) / 2).astype(np.float32)
    rows = [numbers, middles, np.float32([0.0, -0.0, 1e-38, -1e-38, 1e-45, -1e-45, 3.9, -3.9])]
    for end in (-4, 4):
        step = np.concatenate(rows[:2])
        for _ in range(4):
            step = np.nextafter(step, np.float32(end))
            rows.append(step)
    powers = np.float32(10.0) ** np.arange(-9, 1, dtype=np.float32)
    y = np.concatenate([*rows, powers, -powers, values("tables", 0, 50_000, 24)])
    y = y[np.abs(y) <= 4]  # what a scale leaves of finite values
    y = y if TABLES[name].signed else np.abs(y)
    random = spec.random_words(0, 1, "w", 1, y.shape)
    for words in (None, np.zeros_like(random), np.full_like(random, 2**32 - 1), random):
        expected = encode_table(y, words, TABLES[name])
        given = None if words is None else to_torch(Array.of(words)).view(torch.int32)
        codes = tables.encode_table(torch.from_numpy(y), given, SHARED_TABLES[name])
        assert_same(from_torch(codes.to(torch.uint8)), Array.of(expected), name)
    assert_same(
        from_torch(tables.decode_table(codes, SHARED_TABLES[name])),
        Array.of(decode_table(expected, TABLES[name])),
    )


def test_packed_codes_have_the_leading_axes_and_the_bytes_of_a_run():
    params = weights(SHAPES)
    optimizer = run(params, steps=1, **FOUR)
    found = {
        name: (optimizer.state[p]["exp_avg"].dtype, tuple(optimizer.state[p]["exp_avg"].shape))
        for name, p in params.items()
    }
    assert found["w0"] == (torch.uint8, (64, 128))
    assert found["w1"] == (torch.uint8, (10, 288))
    assert found["w4"] == (torch.float32, (8, 8))
    assert found["w5"] == (torch.uint8, (40, 66))
    last = torch.stack([optimizer.state[params["w5"]][key][:, -1] for key in ("exp_avg", "exp_avg_sq")])
    assert (last < 16).all()


def test_four_bit_formats_are_equal_where_shapes_are_cut_alike():
    cuts = [FOUR["mu_dtype"].for_shape(shape) for shape in ((64, 256), (32, 512), (8, 8, 128))]
    assert all(a == b for a, b in itertools.pairwise(cuts))

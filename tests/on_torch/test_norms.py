"""Norms of one array, and the ratio of two: they neither under- nor overflow. Contract: N1, L1."""

import math

import numpy as np
import pytest
import torch

import halfstep_torch as hs
from halfstep_torch.links.link import as_link
from halfstep_torch.numbers import exact
from halfstep_torch.numbers.norms import norm
from halfstep_torch.numbers.op import STEP_OPS
from on_torch.steps import UNIT, norm_bound, reals


def exact_norm(x: torch.Tensor) -> float:
    return torch.linalg.vector_norm(x.double()).item()


@pytest.mark.parametrize("scale", [1e-30, 1e-20, 1.0, 1e20, 1e30])
def test_a_norm_neither_underflows_nor_overflows(scale):
    x = reals(1000, scale)
    assert norm(x).dtype == torch.float32
    assert abs(norm(x).item() / exact_norm(x) - 1) < norm_bound(1000)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_the_norm_of_16_bit_weights_is_float32(dtype):
    x = reals(1000).to(dtype)
    assert norm(x).dtype == torch.float32
    assert abs(norm(x).item() / exact_norm(x) - 1) < norm_bound(1000)
    assert norm(x) != norm(x).to(dtype)


def test_norms_of_nothing_zeros_and_what_is_no_number():
    assert norm(torch.zeros(0)) == 0
    assert norm(torch.zeros(3, 4)) == 0
    assert norm(torch.tensor(-3.0)) == 3
    assert norm(torch.tensor([1, -math.inf])) == math.inf
    assert norm(torch.tensor([1, math.nan, math.inf])).isnan()
    assert norm(torch.tensor([-math.nan, 1])).isnan()


@pytest.mark.parametrize("n", [1, 3, 1000, 1024, 1025, 5000, 300_000, (1 << 20) + 1500])
def test_the_norm_of_pieces_is_that_of_the_whole(n):
    # One piece dwarfs the others, so that exponents differ.
    x = reals(n)
    x[: n // 10] *= 1e-15
    assert abs(norm(x).item() / exact_norm(x) - 1) < norm_bound(20)


def test_a_norm_is_added_in_its_documented_order():
    """In NumPy: pieces by halves in float32, rows of their sums one after the other, a row by halves."""
    x = reals((1 << 21) + 2500, 1e-3).numpy()
    pieces = np.pad(x, (0, -len(x) % 1024)).reshape(-1, 1024)
    units = np.float32(2) ** np.floor(np.log2(np.abs(pieces).max(1)))

    def by_halves(rows):
        while rows.shape[-1] > 1:
            rows = np.add(*np.split(rows, 2, -1))
        return rows[..., 0]

    sums = by_halves((pieces / units[:, None]) ** 2).astype(np.float64) * units.astype(np.float64) ** 2
    rows = np.pad(sums, (0, -len(sums) % 1024)).reshape(-1, 1024)
    assert norm(torch.from_numpy(x)).item() == np.float32(np.sqrt(by_halves(np.cumsum(rows, 0)[-1])))


@pytest.mark.slow
def test_the_norm_of_a_large_layer_is_as_good_as_that_of_a_small_one():
    # torch.linalg.vector_norm, which adds one square after the other, is 1 % off here.
    x = torch.randn(10**8, generator=torch.Generator().manual_seed(0))
    exact = math.sqrt(sum(part.double().square().sum().item() for part in x.split(10**6)))
    assert abs(norm(x).item() / exact - 1) < 30 * UNIT


def scaled_by_ratio(p, u, **options):
    """Return ratio u, by a step of the public optimizer from weights that the update does not touch."""
    link = as_link(hs.scale_by_trust_ratio(**options))
    values = link.read("test", link.entries)
    p, u = (torch.tensor(x, dtype=torch.float32) for x in (p, u))
    n = link.step_numbers(values, 1)
    return link.rule.update(u, p, n, None, STEP_OPS["parameter"]).tolist()


def test_tiny_and_huge_weights_have_the_ratio_of_others():
    for size in (1e-20, 1.0, 1e20):
        size = float(np.float32(size))
        assert scaled_by_ratio([size] * 4, [1.0] * 4) == [size] * 4
        assert scaled_by_ratio([1.0] * 4, [size] * 4) == [1.0] * 4
    # Elements are float32 numbers, and their norm of 2^128 is above the largest.
    assert scaled_by_ratio([1.0] * 4, [2.0**127] * 4) == [1.0] * 4


@pytest.mark.parametrize("y", [0.382, 0.5, -0.7, 3.0, 1.0, 0.0])
def test_a_power_is_the_nearest_number_alone_and_among_others(y):
    drawn = torch.exp(20 * torch.randn(2000, generator=torch.Generator().manual_seed(0)))
    x = torch.cat([drawn, torch.tensor([0.0, torch.inf, torch.nan, -2.0, 1e-45, 1.0, 3e38])])
    with np.errstate(all="ignore"):
        nearest = torch.from_numpy(np.power(x.numpy().astype(np.float64), y).astype(np.float32))
    together, number = exact.power(x, y), torch.tensor(y)
    assert torch.equal(together.nan_to_num(), nearest.nan_to_num())
    assert torch.equal(together.isnan(), nearest.isnan())
    alone = torch.stack([exact.power(one, y) for one in x])
    assert torch.equal(alone.nan_to_num(), together.nan_to_num())
    if float(number) == y:
        assert torch.equal(exact.power(x, number).nan_to_num(), together.nan_to_num())

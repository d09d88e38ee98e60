"""Codebooks: tables and codes are those of the spec; packed codes in pieces, kernels and state dicts."""

import itertools

import numpy as np
import pytest
import torch

import halfstep_spec as spec
import halfstep_torch as hs
from backends.on_torch import from_torch, to_torch
from compare import assert_same
from halfstep.storage.tables import TABLES as SHARED_TABLES
from halfstep_spec.storage.tables import TABLES, decode_table, encode_table
from halfstep_spec.vectors import Array
from halfstep_torch.numbers import tables
from halfstep_torch.sharded.slots import new_state
from on_torch.steps import assert_same_snapshots, snapshot, values
from on_torch.test_formats import CNN, TRANSFORMER, reload, run, weights

EIGHT = {"mu_dtype": hs.codebook("dynamic8"), "nu_dtype": hs.codebook("udynamic8")}
FOUR = {"mu_dtype": hs.codebook("dynamic4"), "nu_dtype": hs.codebook("ulinear4")}
NESTED = {"mu_dtype": hs.codebook("dynamic4", 128), "nu_dtype": hs.codebook("udynamic4", 16)}
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


@pytest.mark.parametrize(
    "shape", [(3, 40), (2, 5, 4), (4, 3, 3, 3), (9, 7), (51,), (1, 1), (5, 1), (0, 8), ()]
)
@pytest.mark.parametrize("block_size", [2, 8, 1000, "row", None])
def test_any_layout_has_the_bits_of_the_spec(shape, block_size):
    size = int(np.prod(shape))
    x = np.abs(values("layout", 0, size, 20))[:size].reshape(shape)
    words = spec.random_words(1, 1, "w", 1, shape)
    for table in TABLES:
        theirs = spec.codebook(table, block_size, 0, 0).encode(x, words)
        fmt = hs.codebook(table, block_size, 0, 0)
        bound, given = fmt.for_shape(shape), to_torch(Array.of(words)).view(torch.int32)
        ours = bound.encode(torch.from_numpy(x.copy()).view(-1), given.view(-1))
        assert_same(from_torch(ours.codes.view(fmt.code_shape(shape))), Array.of(theirs.codes), table)
        assert_same(from_torch(ours.scale.view(fmt.scale_shape(shape))), Array.of(theirs.scale), table)
        decoded = spec.codebook(table, block_size, 0, 0).decode(theirs)
        assert_same(from_torch(bound.decode(ours).view(shape)), Array.of(decoded), table)


@pytest.mark.parametrize("block_size", [128, pytest.param(48, marks=pytest.mark.slow), "row"])
@pytest.mark.parametrize(("mu", "nu"), [("dynamic8", "ulinear4"), ("dynamic4", "udynamic4")])
def test_pieces_hold_whole_blocks_and_bytes(mu, nu, block_size):
    formats = {"mu_dtype": hs.codebook(mu, block_size), "nu_dtype": hs.codebook(nu, 32)}
    at_once, in_pieces = run(weights(SHAPES), **formats), run(weights(SHAPES), piece=1 << 10, **formats)
    assert_same_snapshots(snapshot(at_once), snapshot(in_pieces))


def test_blocks_follow_the_logical_order_whatever_the_layout():
    plain = run(weights(SHAPES), **FOUR)
    channels_last = run(weights(SHAPES, layout=torch.channels_last), **FOUR)
    assert_same_snapshots(snapshot(plain), snapshot(channels_last))


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


@pytest.mark.slow
@pytest.mark.parametrize("formats", [EIGHT, FOUR, NESTED], ids=["8", "4", "nested"])
def test_compiled_steps_have_the_bits_of_eager_ones(formats):
    eager = snapshot(run(weights(SHAPES), steps=6, **formats))
    assert_same_snapshots(eager, snapshot(run(weights(SHAPES), steps=6, compile=True, **formats)))


@pytest.mark.parametrize("shapes", [TRANSFORMER, CNN], ids=["transformer", "cnn"])
@pytest.mark.parametrize(("formats", "most"), [(EIGHT, 2.04), (FOUR, 1.04)], ids=["8", "4"])
def test_state_takes_the_bytes_that_it_should(shapes, formats, most):
    params = [torch.nn.Parameter(torch.empty(s, dtype=torch.bfloat16, device="meta")) for s in shapes]
    optimizer = hs.AdamW(params, compile=False, **formats)
    kept = 0
    for _, p, plan in optimizer.plans():
        state = new_state(p, plan)
        kept += sum(x.numel() * x.element_size() for key, x in state.items() if key != "step")
    assert kept / sum(p.numel() for p in params) <= most


def test_a_run_goes_on_from_a_state_dict(tmp_path):
    saved = reload(run(weights(SHAPES), steps=2, **FOUR).state_dict(), tmp_path)
    assert saved["param_groups"][0]["nu_dtype"] == {
        "table": "ulinear4",
        "block_size": 128,
        "min_size": 4096,
        "min_ndim": 2,
    }
    other = hs.AdamW(weights(SHAPES).items(), compile=False, **FOUR)
    other.load_state_dict(saved)
    whole = run(weights(SHAPES), steps=2, **FOUR)
    for key, value in whole.state_dict()["state"][5].items():
        assert torch.equal(value, other.state_dict()["state"][5][key])


def test_a_state_dict_of_another_table_or_block_is_refused(tmp_path):
    saved = reload(run(weights(SHAPES), **FOUR).state_dict(), tmp_path)
    for other in (hs.codebook("dynamic4", 64), hs.codebook("udynamic4")):
        key = "mu_dtype" if other.signed else "nu_dtype"
        optimizer = run(weights(SHAPES), steps=1, **{**FOUR, key: other})
        with pytest.raises(
            ValueError, match=f"4 in blocks of 128 in the state dict, of {other.dtype} in blocks"
        ):
            optimizer.load_state_dict(saved)


def test_four_bit_formats_are_equal_where_shapes_are_cut_alike():
    cuts = [FOUR["mu_dtype"].for_shape(shape) for shape in ((64, 256), (32, 512), (8, 8, 128))]
    assert all(a == b for a, b in itertools.pairwise(cuts))

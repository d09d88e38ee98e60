"""How moments are stored: blocks in every layout, in pieces and kernels, and what state dicts keep."""

import itertools
import math

import numpy as np
import pytest
import torch

import halfstep_spec as spec
import halfstep_torch as hs
from backends.on_torch import from_torch, to_torch
from compare import assert_same
from halfstep_spec import CODEBOOK_CODES, SCALED_CODES
from halfstep_spec.vectors import Array
from halfstep_torch.storage.formats import Encoded, Format
from halfstep_torch.storage.relative import within_scales
from on_torch.steps import assert_same_but_for_nan, assert_same_snapshots, snapshot, step_in_pieces, values

SIGNED = [name for name, codes in SCALED_CODES.items() if codes.signed]
CODES = {**SCALED_CODES, **CODEBOOK_CODES}
UNSIGNED = [name for name, codes in SCALED_CODES.items() if not codes.signed]


def test_every_code_decodes_as_in_the_spec():
    codes = np.arange(256, dtype=np.uint8).reshape(2, 128)
    for dtype in (*SIGNED[1:], *UNSIGNED):
        lowest, highest = Format(dtype, True).codes.scale_range
        for byte in (lowest, lowest + 1, 127, highest, 255):
            scale = np.full((2, 1), byte, np.uint8)
            theirs = spec.scaled(dtype, 128, 0, 0).decode(spec.Encoded(codes, scale))
            ours = hs.scaled(dtype, 128, 0, 0).for_shape((2, 128))
            stored = torch.from_numpy(codes.copy()).view(ours.torch_dtype), torch.from_numpy(scale).view(-1)
            context = f"{dtype} under {byte}"
            assert_same(from_torch(ours.decode(Encoded(*stored))), Array.of(theirs), context)


@pytest.mark.parametrize(
    "shape", [(3, 40), (2, 5, 4), (4, 3, 3, 3), (9, 7), (50,), (51,), (1, 1), (5, 1), (0, 8), ()]
)
@pytest.mark.parametrize("block_size", [1, 2, 4, 7, 8, 16, 1000, "row", None])
def test_any_layout_has_the_bits_of_the_spec(shape, block_size):
    size, is_odd = int(np.prod(shape)), isinstance(block_size, int) and block_size % 2
    x = values("layout", 0, size, 40)[:size].reshape(shape)
    words = spec.random_words(1, 1, "w", 1, shape)
    for (name, codes), positive in itertools.product(CODES.items(), (False, True)):
        if (codes.packed and is_odd) or not (positive or codes.signed):
            continue
        function = "scaled" if name in SCALED_CODES else "codebook"
        fmt, reference = (getattr(package, function)(name, block_size, 0, 0) for package in (hs, spec))
        keep = {"keep_nonzero": "always" if positive else "never"}
        given = np.asarray(np.abs(x)) if positive else x
        with np.errstate(all="ignore"):
            theirs = reference.encode(given, words, **keep)
        bound, drawn = fmt.for_shape(shape), to_torch(Array.of(words)).view(torch.int32).view(-1)
        ours = bound.encode(torch.from_numpy(given.copy()).view(-1), drawn, **keep)
        found = from_torch(ours.codes.view(fmt.code_shape(shape)), codes.dtype)
        assert_same(found, Array.of(theirs.codes, codes.dtype), f"{name} {block_size} {shape}")
        assert_same(from_torch(ours.scale.view(fmt.scale_shape(shape))), Array.of(theirs.scale), "scales")
        decoded = Array.of(reference.decode(theirs))
        assert_same(from_torch(bound.decode(ours).view(shape)), decoded, f"{name} {block_size} {shape}")


@pytest.mark.parametrize(("dtype", "top"), [("ufloat16_e7m9", 13), ("ufloat16_e7m9", 47)])
def test_the_numbers_of_a_round_trip_of_unsigned_floats_are_those_of_its_codes(dtype, top):
    rng = np.random.default_rng(0)
    x = torch.from_numpy(np.exp2(rng.uniform(-60, 20, 4096)).astype(np.float32))
    x[:6] = torch.tensor([0.0, 1e-45, 2.0**-50, 2.0**top, math.inf, math.nan])
    words = torch.from_numpy(rng.integers(-(2**31), 2**31, 4096).astype(np.int32))
    fmt = Format(dtype)
    for drawn in (words, None):
        stored, numbers = fmt.round_trip(x, drawn)
        assert_same(from_torch(numbers), from_torch(fmt.decode(stored)))
        assert numbers[:6].isnan().tolist() == [False] * 4 + [True] * 2


def test_the_numbers_of_a_round_trip_are_those_of_its_codes():
    rng = np.random.default_rng(0)
    x = np.exp2(rng.uniform(-40, 5, 4096)).astype(np.float32) * rng.choice([-1, 1], 4096).astype(np.float32)
    x[:8] = 0.0, -0.0, 7.75, -7.9, 3.4e38, np.inf, -np.inf, np.nan
    words = torch.from_numpy(rng.integers(-(2**31), 2**31, 4096).astype(np.int32))
    fmt = hs.relative("float8_e3m4")
    for drawn in (words, None):
        stored, numbers = fmt.round_trip(torch.from_numpy(x), drawn)
        assert_same(from_torch(numbers), from_torch(fmt.decode(stored)))
        assert numbers[:8].isnan().tolist() == [False] * 5 + [True] * 3


# --- leaves of every shape, stepped in every way ---

FP8 = {"mu_dtype": hs.scaled("float8_e4m3fn"), "nu_dtype": hs.scaled("ufloat8_e5m3")}
EIGHT = {"mu_dtype": hs.codebook("dynamic8"), "nu_dtype": hs.codebook("udynamic8")}
FOUR = {"mu_dtype": hs.relative("int4", 128), "nu_dtype": hs.scaled("uroot8")}
SHAPES = [(64, 256), (10, 64, 3, 3), (70, 100), (300,), (8, 8), (40, 131), (2, 5000), (64, 64)]
"""Whole and short blocks, runs of an odd number of elements, leaves too small for codes."""


def run(params, steps=3, compile=False, piece=None, **options):
    """Return the optimizer after steps; gradients depend on names alone."""
    optimizer = hs.AdamW(params.items(), lr=1e-2, weight_decay=0.1, compile=compile, **options)
    for t in range(steps):
        for i, p in enumerate(params.values()):
            grad = torch.from_numpy(values(f"gradient {i}", t, p.numel(), 20).copy()).view(p.shape)
            p.grad = grad.to(p.dtype)
        step_in_pieces(optimizer, piece) if piece else optimizer.step()
    return optimizer


def weights(shapes=tuple(SHAPES), layout=torch.contiguous_format):
    made = {}
    for i, shape in enumerate(shapes):
        w = torch.from_numpy(values("weights", i, int(np.prod(shape)), 8).copy()).view(shape)
        four = len(shape) == 4
        w = w.to(torch.bfloat16, memory_format=layout if four else torch.contiguous_format)
        made[f"w{i}"] = torch.nn.Parameter(w)
    return made


@pytest.mark.parametrize("block_size", [128, 48, "row", None])
@pytest.mark.parametrize(
    ("make", "mu", "nu"),
    [
        (hs.scaled, "float8_e4m3fn", hs.scaled("ufloat8_e5m3", 32)),
        (hs.codebook, "dynamic8", hs.codebook("udynamic8", 32)),
        (lambda mu, size: hs.relative(mu, size or 1 << 20), "int4", hs.scaled("uroot8", 32)),
    ],
)
def test_pieces_hold_whole_blocks_and_bytes(make, mu, nu, block_size):
    formats = {"mu_dtype": make(mu, block_size), "nu_dtype": nu}
    at_once = snapshot(run(weights(), **formats))
    for piece in (1 << 10, 1 << 13):
        assert_same_snapshots(at_once, snapshot(run(weights(), piece=piece, **formats)))


@pytest.mark.parametrize("formats", [FP8, FOUR], ids=["fp8", "4"])
def test_blocks_follow_the_logical_order_whatever_the_layout(formats):
    plain, channels_last = run(weights(), **formats), run(weights(layout=torch.channels_last), **formats)
    assert_same_snapshots(snapshot(plain), snapshot(channels_last))
    p = channels_last.param_groups[0]["params"][1]
    assert not p.is_contiguous()
    assert channels_last.state[p]["exp_avg"].is_contiguous()


@pytest.mark.parametrize(
    ("shape", "mu", "nu", "compiles"),
    [
        ((64, 256), 32, 128, True),
        ((64, 256), "row", 128, True),
        ((64, 200), 32, 128, True),
        ((64, 200), "row", 128, False),
        ((64, 256), 48, 128, False),
        ((64, 100), 32, 128, False),  # blocks of 128 go across rows, and those of 32 do not
    ],
)
def test_two_cuts_are_one_kernel_where_blocks_are_whole_ones_of_the_other(shape, mu, nu, compiles):
    formats = {"mu_dtype": hs.relative("int8", mu), "nu_dtype": hs.scaled("ufloat8_e5m3", nu)}
    optimizer = hs.AdamW([("w", torch.nn.Parameter(torch.zeros(shape)))], **formats)
    ((_, _, plan),) = optimizer.plans()
    assert [stage.compiles for stage in plan.padded_stages] == [compiles]


@pytest.mark.parametrize("dtype", ["int4", "int8"])
def test_a_block_along_two_axes_is_stored_as_along_one(dtype):
    fmt = hs.relative(dtype, 128, 0, 0).for_shape((6, 128))
    x = torch.from_numpy(values("two axes", 0, 6 * 128, 8).copy()).view(6, 128)
    words = to_torch(Array.of(spec.random_words(1, 1, "w", 1, (6, 128)))).view(torch.int32)
    one, two = (fmt.encode(x.view(shape), words.view(shape)) for shape in ((6, 128), (6, 4, 32)))
    assert torch.equal(one.scale, two.scale)
    assert torch.equal(one.codes.view(-1), two.codes.view(-1))


NESTED = {
    "four_bit": hs.recipes.four_bit,
    "one dither for four blocks": hs.recipes.four_bit
    | {"mu_dtype": hs.relative("int4", 128), "nu_dtype": hs.scaled("uroot8", 32)},
    "tables": {"mu_dtype": hs.codebook("dynamic8", 64), "nu_dtype": hs.codebook("udynamic8", 128)},
    "words cross blocks": {"mu_dtype": hs.relative("int4", 36), "nu_dtype": hs.codebook("udynamic8", 12)},
}


@pytest.mark.slow
@pytest.mark.parametrize("formats", NESTED.values(), ids=NESTED)
def test_blocks_within_blocks_are_stepped_by_a_kernel_with_the_bits_of_eager_steps(formats):
    shapes = ((64, 256), (40, 200), (40, 133), (10, 64, 3, 3), (300, 1024), (70, 100), (6, 32, 32))
    runs = []
    for compile in (False, True):
        params = weights(shapes)
        optimizer = run(params, steps=2, compile=compile, **formats)
        for p in params.values():
            p.grad.view(-1)[[0, 130, 700]] = torch.tensor([math.nan, math.inf, 1e38]).to(p.dtype)
        optimizer.step()
        runs.append(snapshot(optimizer))
    assert_same_but_for_nan(*runs)


@pytest.mark.slow
def test_codes_that_begin_within_a_word_are_stepped_as_others_are():
    runs = []
    for compile, skipped in ((False, 0), (True, 0), (True, 1), (True, 2)):
        params = weights([(256, 256)])
        optimizer = run(params, steps=1, compile=compile, **hs.recipes.four_bit)
        state = optimizer.state[params["w0"]]
        codes = state["exp_avg"]
        assert codes.dtype == torch.uint8
        moved = torch.zeros(codes.numel() + skipped, dtype=torch.uint8)[skipped:].view(codes.shape)
        state["exp_avg"] = moved.copy_(codes)
        optimizer.step()
        assert state["exp_avg"] is moved
        assert not torch.equal(moved, codes)
        runs.append(snapshot(optimizer))
    for other in runs[1:]:
        assert_same_but_for_nan(runs[0], other)


# --- state dicts ---


def reload(state_dict, tmp_path):
    torch.save(state_dict, tmp_path / "state.pt")
    return torch.load(tmp_path / "state.pt", weights_only=True)


@pytest.mark.parametrize(
    ("formats", "label"),
    [(FP8, {"dtype": "float8_e4m3fn"}), (EIGHT, {"table": "dynamic8"})],
    ids=["scaled", "table"],
)
def test_formats_stand_in_state_dicts_as_plain_types(formats, label, tmp_path):
    params = weights()
    optimizer = run(params, **formats)
    saved = reload(optimizer.state_dict(), tmp_path)
    due = {**label, "block_size": 128, "min_size": 4096, "min_ndim": 2}
    assert saved["param_groups"][0]["mu_dtype"] == due
    other = hs.AdamW(params.items(), compile=False, **formats)
    other.load_state_dict(saved)
    assert_same_snapshots(snapshot(optimizer), snapshot(other))
    assert other.param_groups[0]["mu_dtype"] == due


OTHERS = [(FP8, "mu_dtype", hs.scaled("float8_e4m3fn", block_size)) for block_size in (64, 127, 100, "row")]
OTHERS += [(EIGHT, "mu_dtype", hs.codebook("dynamic8", 64)), (FOUR, "mu_dtype", hs.relative("int4", 64))]
BYTES = {"mu_dtype": hs.relative("mulaw8"), "nu_dtype": "uroot4_e4m4"}
OTHERS += [(BYTES, "mu_dtype", hs.relative("float8_e3m4"))]


@pytest.mark.parametrize(("formats", "key", "other"), OTHERS, ids=[other.text for _, _, other in OTHERS])
def test_a_state_dict_of_another_format_of_as_many_bytes_is_refused(formats, key, other, tmp_path):
    # 100 and 127 cut (10, 64, 3, 3) and (70, 100) into as many blocks as 128 does, somewhere.
    saved = reload(run(weights(), **formats).state_dict(), tmp_path)
    optimizer = run(weights(), steps=1, **{**formats, key: other})
    before = snapshot(optimizer)
    kept = formats[key].text if key in formats else ""
    with pytest.raises(ValueError, match=f"is of {kept}.* in the state dict, of {other.text} here"):
        optimizer.load_state_dict(saved)
    assert_same_snapshots(before, snapshot(optimizer))


@pytest.mark.parametrize("byte", [0, 17, 255])
def test_a_scale_byte_out_of_range_is_refused(byte, tmp_path):
    saved = reload(run(weights(), **FP8).state_dict(), tmp_path)
    saved["state"][0]["exp_avg_scale"][3] = byte
    optimizer = run(weights(), steps=1, **FP8)
    before = snapshot(optimizer)
    with pytest.raises(
        ValueError, match=f"exp_avg_scale of 'w0' holds the byte {byte}; scales of float8_e4m3fn"
    ):
        optimizer.load_state_dict(saved)
    assert_same_snapshots(before, snapshot(optimizer))


def test_state_of_other_blocks_is_refused_at_the_step():
    params = weights([(64, 64)])
    optimizer = run(params, **FP8)
    state = optimizer.state[params["w0"]]
    state["exp_avg_scale"] = state["exp_avg_scale"].repeat(1, 2)
    before = snapshot(optimizer)
    with pytest.raises(ValueError, match="exp_avg_scale of 'w0' has shape"):
        optimizer.step()
    assert_same_snapshots(before, snapshot(optimizer))


@pytest.mark.parametrize("name", ["int8", "int4"])
def test_what_fine_scales_hold_is_known_before_a_step_is_traced(name):
    fmt = hs.relative(name, 32)
    z = torch.tensor([0.0, 1e9, -1e9, math.nan])
    traced = torch.compile(lambda z: within_scales(z, fmt), backend="eager", fullgraph=True)
    torch.testing.assert_close(traced(z), within_scales(z, fmt), rtol=0, atol=0, equal_nan=True)


@pytest.mark.parametrize(
    "fmt", [Format("bfloat16"), hs.scaled("int8"), hs.codebook("dynamic8")], ids=lambda fmt: fmt.dtype
)
def test_dynamo_finds_what_follows_from_a_new_format(fmt):
    fmt, x = fmt.for_shape((64, 128)), torch.ones(64, 128)

    def round_trip(x: torch.Tensor) -> torch.Tensor:
        return fmt.decode(fmt.encode(x, None))

    assert torch.equal(torch.compile(round_trip, fullgraph=True, backend="eager")(x), round_trip(x))


def test_packed_codes_have_the_leading_axes_and_the_bytes_of_a_run():
    params = weights()
    optimizer = run(params, steps=1, **FOUR)
    found = {
        name: (optimizer.state[p]["exp_avg"].dtype, tuple(optimizer.state[p]["exp_avg"].shape))
        for name, p in params.items()
    }
    assert found["w0"] == (torch.uint8, (64, 128))
    assert found["w1"] == (torch.uint8, (10, 288))
    assert found["w4"] == (torch.float32, (8, 8))
    assert found["w5"] == (torch.uint8, (40, 66))
    assert (optimizer.state[params["w5"]]["exp_avg"][:, -1] < 16).all()


def test_four_bit_formats_are_equal_where_shapes_are_cut_alike():
    cuts = [FOUR["mu_dtype"].for_shape(shape) for shape in ((64, 256), (32, 512), (8, 8, 128))]
    assert all(a == b for a, b in itertools.pairwise(cuts))

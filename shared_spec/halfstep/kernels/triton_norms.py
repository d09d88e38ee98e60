"""The part of a Triton module that adds up squares, in the order of `c_norms.py` and of plain steps.

A sum of two numbers has no order, so each half of 1024 numbers is added to the other by a step of its own.
"""

PIECE = 1024
"""Elements whose squares are added in float32, and pieces in a row of their sums."""

_HALVES = "\n".join(
    f"    y = tl.sum(tl.reshape(y, [P, 2, {PIECE >> i}]), axis=1)" for i in range(1, PIECE.bit_length())
)
SQUARES = f"""
@triton.jit
def by_halves(y, P: tl.constexpr):
{_HALVES}
    return tl.reshape(y, [P])


@triton.jit
def store_squares(sums, x, mask, P: tl.constexpr):
    mask = tl.reshape(mask, [P, {PIECE}])
    x = tl.where(mask, tl.reshape(x, [P, {PIECE}]), 0.0)
    most = tl.max(x.to(tl.int32, bitcast=True) & 0x7FFFFFFF, axis=1, keep_dims=True)
    field = tl.minimum(tl.maximum(most >> 23, 1), 253)
    y = x * ((254 - field) << 23).to(tl.float32, bitcast=True)
    up = tl.reshape((field << 23).to(tl.float32, bitcast=True).to(tl.float64), [P])
    total = by_halves(y * y, P).to(tl.float64) * (up * up)
    tl.store(sums + tl.arange(0, P), total, mask=tl.max(mask.to(tl.int32), axis=1) > 0)
"""
TOTALS = f"""
@triton.jit
def totals(rows, made, COLUMNS, FIRST, ELEMENTS):
    param, k = tl.program_id(0).to(tl.int64), tl.program_id(1)
    entry = rows + param * COLUMNS
    sums = tl.load(entry + FIRST + k).to(tl.pointer_type(tl.float64))
    count = (tl.load(entry + ELEMENTS) + {PIECE - 1}) // {PIECE}
    lanes = tl.arange(0, {PIECE})
    added = tl.full([{PIECE}], 0.0, tl.float64)
    for i in tl.range(0, count, {PIECE}):
        added += tl.load(sums + i + lanes, mask=i + lanes < count, other=0.0)
    total = by_halves(tl.reshape(added, [1, {PIECE}]), 1)
    tl.store(made + k * tl.num_programs(0) + param + tl.arange(0, 1), total)
"""

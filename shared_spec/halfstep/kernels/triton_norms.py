"""The part of a Triton module that adds squares, in the order of `c_norms.py` and plain steps.

A sum of two numbers has no order. So 1024 numbers are added by halves, with a separate step for each halving.
"""

PIECE = 1024
"""Number of squares that are added in float32, and number of pieces in a row of sums."""

_HALVES = "\n".join(
    f"    y = tl.sum(tl.reshape(y, [P, 2, {PIECE >> i}]), axis=1)" for i in range(1, PIECE.bit_length())
)
_STORE_SUMS = f"""
@triton.jit
def store_sums(sums, x, mask, unit, P: tl.constexpr):
    mask = tl.reshape(mask, [P, {PIECE}])
    x = tl.where(mask, tl.reshape(x, [P, {PIECE}]), 0.0)
    b = x.to(tl.int32, bitcast=True) & 0x7FFFFFFF
@OF_PIECES@
    tl.store(sums + tl.arange(0, P), total, mask=tl.max(mask.to(tl.int32), axis=1) > 0)
"""
_TOTALS = f"""
@triton.jit
def totals(rows, made, COLUMNS, FIRST, ELEMENTS):
    param, k = tl.program_id(0).to(tl.int64), tl.program_id(1)
    params = tl.num_programs(0)
    entry = rows + param * COLUMNS
    sums = tl.load(entry + FIRST + k).to(tl.pointer_type(@SUM@))
    count = (tl.load(entry + ELEMENTS) + {PIECE - 1}) // {PIECE}
    lanes = tl.arange(0, {PIECE})
@TOTAL@
"""
BY_HALVES = f"""
@triton.jit
def by_halves(y, P: tl.constexpr):
{_HALVES}
    return tl.reshape(y, [P])
"""
OF_PIECES = {
    "squares": """
    most = tl.max(b, axis=1, keep_dims=True)
    field = tl.minimum(tl.maximum(most >> 23, 1), 253)
    y = x * ((254 - field) << 23).to(tl.float32, bitcast=True)
    up = tl.reshape((field << 23).to(tl.float32, bitcast=True).to(tl.float64), [P])
    total = by_halves(y * y, P).to(tl.float64) * (up * up)
""",
    "largest": """
    total = tl.max(b, axis=1).to(tl.int64)
""",
    "integers": """
    shift = tl.minimum(unit.to(tl.int32) - (b >> 23), 25)
    mantissa = tl.where(b >> 23 > 0, (b & 0x7FFFFF) | 0x800000, 0)
    r = ((mantissa + ((1 << shift) >> 1)) >> shift).to(tl.int64)
    total = tl.sum(r * r, axis=1)
""",
}
_TOTAL = {
    "squares": f"""
    added = tl.full([{PIECE}], 0.0, tl.float64)
    for i in tl.range(0, count, {PIECE}):
        added += tl.load(sums + i + lanes, mask=i + lanes < count, other=0.0)
    total = by_halves(tl.reshape(added, [1, {PIECE}]), 1)
    tl.store(made + k * params + param + tl.arange(0, 1), total)
""",
    "largest": f"""
    most = tl.full([{PIECE}], 0, tl.int64)
    for i in tl.range(0, count, {PIECE}):
        most = tl.maximum(most, tl.load(sums + i + lanes, mask=i + lanes < count, other=0))
    tl.store(made + k * params + param, tl.max(most, axis=0))
""",
    "integers": f"""
    low, high = tl.full([{PIECE}], 0, tl.int64), tl.full([{PIECE}], 0, tl.int64)
    for i in tl.range(0, count, {PIECE}):
        of_pieces = tl.load(sums + i + lanes, mask=i + lanes < count, other=0)
        low += of_pieces & 0xFFFFFFFF
        high += of_pieces >> 32
    tl.store(made + 2 * k * params + param, tl.sum(low, axis=0))
    tl.store(made + (2 * k + 1) * params + param, tl.sum(high, axis=0))
""",
}


def functions_of_norms(sums: str, of: str) -> list[str]:
    """Return functions that add pieces, given the kind of sums (`graph.SUMS`) and their type."""
    inserted = {"OF_PIECES": OF_PIECES[sums].strip("\n"), "TOTAL": _TOTAL[sums].strip("\n"), "SUM": of}
    made = [BY_HALVES, _STORE_SUMS, _TOTALS]
    for name, value in inserted.items():
        made = [text.replace(f"@{name}@", value) for text in made]
    return made

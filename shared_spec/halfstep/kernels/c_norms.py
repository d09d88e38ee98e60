"""The part of a C kernel that adds squares, in the same order as plain steps.

A piece with 1024 elements is squared in units of a power of two, and added by halves in float32. Sums over
pieces are float64. Rows of 1024 pieces are added one after another, and each row by halves. So no bit depends
on the number of threads. Exact sums add integers (contract N2) in any order, first for the largest pattern,
and then for squares in units of its last place. The caller allocates memory for the sums, with addresses in
the table.
"""

_PIECES = """
enum { PIECE = 1024, STRETCH = 4 * PIECE, ROOM = STRETCH + 2 * @WIDTH@ + PIECE };
typedef @SUM@ Sum;
"""
_OF_PIECE = {
    "squares": """
static Sum of_piece(const float *x, i32 field) {
  float square[PIECE] __attribute__((aligned(64)));
  i32 most = 0;
#pragma GCC ivdep
  for (i32 i = 0; i < PIECE; i++) most = larger(most, bits(x[i]) & 0x7FFFFFFF);
  field = larger(smaller(most >> 23, 253), 1);
  const float down = real((254 - field) << 23);
  const double up = (double)real(field << 23);
#pragma GCC ivdep
  for (i32 i = 0; i < PIECE; i++) square[i] = (x[i] * down) * (x[i] * down);
  for (i32 half = PIECE / 2; half; half /= 2)
    for (i32 i = 0; i < half; i++) square[i] += square[i + half];
  return (double)square[0] * (up * up);
}
""",
    "largest": """
static Sum of_piece(const float *x, i32 field) {
  i32 most = 0;
  (void)field;
#pragma GCC ivdep
  for (i32 i = 0; i < PIECE; i++) most = larger(most, bits(x[i]) & 0x7FFFFFFF);
  return most;
}
""",
    "integers": """
static Sum of_piece(const float *x, i32 field) {
  i64 sum = 0;
#pragma GCC ivdep
  for (i32 i = 0; i < PIECE; i++) {
    const i32 b = bits(x[i]) & 0x7FFFFFFF, shift = smaller(field - (b >> 23), 25);
    const i32 mantissa = b >> 23 ? (b & 0x7FFFFF) | 1 << 23 : 0;
    const i64 r = (mantissa + (1 << shift >> 1)) >> shift;
    sum += r * r;
  }
  return sum;
}
""",
}
_MEASURE = """
/* Adds up the pieces of a stretch. The blocks at its borders are computed whole. */
static void measure_stretch(const i64 *entry, i64 low, i64 high, i64 param, const Job *job) {
  float made[@NORMS@ * ROOM] __attribute__((aligned(64)));
  const float *fields = job->numbers + (job->which ? (i64)job->which[param] * job->width : 0) + @UNITS@;
  i64 here[@COLUMNS@], start = low, stop = high;
  if (@CUT@) {
    const i64 run = entry[1] ? entry[1] : entry[0], last = (high - 1) % run;
    const i64 end = (last / @WIDTH@ + 1) * @WIDTH@;
    start = low - low % run % @WIDTH@;
    stop = high - 1 - last + (end < run ? end : run);
  }
  memcpy(here, entry, sizeof here);
  for (i32 k = 0; k < @NORMS@; k++) here[@FIRST@ + k] = (i64)(made + k * ROOM) - 4 * start;
  update(here, start, stop, param, job);
  for (i32 k = 0; k < @NORMS@; k++) {
    Sum *sums = (Sum *)entry[@FIRST@ + k];
    float *x = made + k * ROOM + (low - start);
    for (i64 at = low; at < high; at += PIECE, x += PIECE) {
      if (high - at < PIECE) memset(x + (high - at), 0, 4 * (size_t)(PIECE - (high - at)));
      sums[at / PIECE] = of_piece(x, @HAS_UNITS@ ? (i32)fields[k] : 0);
    }
  }
}

static void measure(const i64 *entry, i64 start, i64 stop, i64 param, const Job *job) {
  for (i64 at = start; at < stop; at += STRETCH)
    measure_stretch(entry, at, at + STRETCH < stop ? at + STRETCH : stop, param, job);
}
"""
_TOTAL = {
    "squares": """
static void total(Sum *sums, i64 count, Sum *made, i64 params) {
  (void)params;
  for (i64 i = PIECE; i < count; i++) sums[i % PIECE] += sums[i];
  for (i64 half = PIECE / 2; half; half /= 2)
    for (i64 i = 0; i < half && i + half < count; i++) sums[i] += sums[i + half];
  *made = count ? sums[0] : 0;
}
""",
    "largest": """
static void total(Sum *sums, i64 count, Sum *made, i64 params) {
  (void)params;
  *made = 0;
  for (i64 i = 0; i < count; i++) *made = *made > sums[i] ? *made : sums[i];
}
""",
    "integers": """
static void total(Sum *sums, i64 count, Sum *made, i64 params) {
  made[0] = made[params] = 0;
  for (i64 i = 0; i < count; i++) made[0] += sums[i] & 0xFFFFFFFF, made[params] += sums[i] >> 32;
}
""",
}
_NORMS = """
void norms(i64 params, const i64 *table, const u32 *keys, const float *numbers, const i32 *which, i32 width,
           i64 elements, i32 threads, Team team, Sum *totals) {
  Job job = {params, table, keys, numbers, which, width, 1, 0, elements};
  share_out(&job, threads, team);
  for (i64 param = 0; param < params; param++) {
    const i64 *entry = table + param * @COLUMNS@, count = (entry[0] + PIECE - 1) / PIECE;
    for (i32 k = 0; k < @NORMS@; k++)
      total((Sum *)entry[@FIRST@ + k], count, totals + k * @WORDS@ * params + param, params);
  }
}
"""


def c_norms(sums: str, shares: str) -> str:
    """Return the source of `norms` around the source for shares, given the kind of sums (`graph.SUMS`)."""
    return "".join([_PIECES, _OF_PIECE[sums], _MEASURE, shares, _TOTAL[sums], _NORMS])

"""The part of a kernel in C that adds up squares, in an order that plain steps have too.

A piece of 1024 elements is squared in units of a power of two, and added by halves in float32. Sums of pieces
are float64: rows of 1024 are added one after the other, and a row by halves. So no bit depends on the number
of threads. The caller has memory for the sums of pieces, and gives its addresses in the table.
"""

C_SQUARES = """
enum { PIECE = 1024, STRETCH = 4 * PIECE, ROOM = STRETCH + 2 * @WIDTH@ + PIECE };

static double squares(const float *x) {
  float square[PIECE] __attribute__((aligned(64)));
  i32 most = 0;
#pragma GCC ivdep
  for (i32 i = 0; i < PIECE; i++) most = larger(most, bits(x[i]) & 0x7FFFFFFF);
  const i32 field = larger(smaller(most >> 23, 253), 1);
  const float down = real((254 - field) << 23);
  const double up = (double)real(field << 23);
#pragma GCC ivdep
  for (i32 i = 0; i < PIECE; i++) square[i] = (x[i] * down) * (x[i] * down);
  for (i32 half = PIECE / 2; half; half /= 2)
    for (i32 i = 0; i < half; i++) square[i] += square[i + half];
  return (double)square[0] * (up * up);
}

/* Adds up the pieces of a stretch. The blocks at its borders are computed whole. */
static void measure_stretch(const i64 *entry, i64 low, i64 high, i64 param, const Job *job) {
  float made[@NORMS@ * ROOM] __attribute__((aligned(64)));
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
    double *sums = (double *)entry[@FIRST@ + k];
    float *x = made + k * ROOM + (low - start);
    for (i64 at = low; at < high; at += PIECE, x += PIECE) {
      if (high - at < PIECE) memset(x + (high - at), 0, 4 * (size_t)(PIECE - (high - at)));
      sums[at / PIECE] = squares(x);
    }
  }
}

static void measure(const i64 *entry, i64 start, i64 stop, i64 param, const Job *job) {
  for (i64 at = start; at < stop; at += STRETCH)
    measure_stretch(entry, at, at + STRETCH < stop ? at + STRETCH : stop, param, job);
}
"""
"""The text in front of the shares of threads: the squares of one share."""

C_NORMS = """
static double total(double *sums, i64 count) {
  for (i64 i = PIECE; i < count; i++) sums[i % PIECE] += sums[i];
  for (i64 half = PIECE / 2; half; half /= 2)
    for (i64 i = 0; i < half && i + half < count; i++) sums[i] += sums[i + half];
  return count ? sums[0] : 0;
}

void norms(i64 params, const i64 *table, const u32 *keys, const float *numbers, const i32 *which, i32 width,
           i64 elements, i32 threads, Team team, double *totals) {
  Job job = {params, table, keys, numbers, which, width, 1, 0, elements};
  share_out(&job, threads, team);
  for (i64 param = 0; param < params; param++) {
    const i64 *entry = table + param * @COLUMNS@;
    for (i32 k = 0; k < @NORMS@; k++)
      totals[k * params + param] = total((double *)entry[@FIRST@ + k], (entry[0] + PIECE - 1) / PIECE);
  }
}
"""
"""The text behind them: `norms`, which adds up the sums of pieces."""

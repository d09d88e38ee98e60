"""The part of a kernel in C that adds up squares, in an order that plain steps have too.

A piece of 1024 elements is squared in units of a power of two, and added by halves in float32. Sums of pieces
are float64: rows of 1024 are added one after the other, and a row by halves. So no bit depends on the number
of threads. The caller has memory for the sums of pieces, and gives its addresses in the table.
"""

C_NORMS = """
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
static void measure(const i64 *entry, i64 low, i64 high, i64 param, const Job *job) {
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

static void work(void *data) {
  Job *job = data;
  const i64 id = __atomic_fetch_add(&job->next, 1, __ATOMIC_RELAXED);
  const i64 low = job->elements * id / job->threads, high = job->elements * (id + 1) / job->threads;
  i64 before = 0;
  for (i64 param = 0; param < job->params && before < high; param++) {
    const i64 *entry = job->table + param * @COLUMNS@, n = entry[0];
    i64 at = low > before ? low - before : 0, stop = high - before < n ? high - before : n;
    before += n;
    at = (at + PIECE - 1) / PIECE * PIECE;
    stop = (stop + PIECE - 1) / PIECE * PIECE;
    if (stop > n) stop = n;
    for (; at < stop; at += STRETCH)
      measure(entry, at, at + STRETCH < stop ? at + STRETCH : stop, param, job);
  }
}

static double total(double *sums, i64 count) {
  for (i64 i = PIECE; i < count; i++) sums[i % PIECE] += sums[i];
  for (i64 half = PIECE / 2; half; half /= 2)
    for (i64 i = 0; i < half && i + half < count; i++) sums[i] += sums[i + half];
  return count ? sums[0] : 0;
}

void norms(i64 params, const i64 *table, const u32 *keys, const float *numbers, const i32 *which, i32 width,
           i64 elements, i32 threads, void (*team)(void (*)(void *), void *, unsigned, unsigned),
           double *totals) {
  Job job = {params, table, keys, numbers, which, width, 1, 0, elements};
  if (threads > 1 && team && elements >= 32768) {
    job.threads = threads;
    team(work, &job, (unsigned)threads, 0);
  } else {
    work(&job);
  }
  for (i64 param = 0; param < params; param++) {
    const i64 *entry = table + param * @COLUMNS@;
    for (i32 k = 0; k < @NORMS@; k++)
      totals[k * params + param] = total((double *)entry[@FIRST@ + k], (entry[0] + PIECE - 1) / PIECE);
  }
}
"""

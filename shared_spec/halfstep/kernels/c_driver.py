"""The driver for a C kernel, which divides the parameters in a table into rows and threads.

The caller passes a function that runs a team of threads. Each thread updates an equal share of the elements,
and no bit depends on the number of threads.

The elements after a parameter's whole rows are copied to arrays on the stack, padded with zeros, so that
every loop has a constant or a vectorized length. A row never crosses the end of a window run, nor an index
that is a multiple of 2^32 (contract W8).
"""

from collections.abc import Sequence

from halfstep.kernels.c_norms import c_norms
from halfstep.kernels.graph import SUMS, Graph, Node
from halfstep.random_words import GOLDEN_RATIO

FIELDS = ("elements", "run", "first", "window_run", "window_skip")
"""The int64 fields before the addresses in a table row. Each parameter has a row.

elements: number of local elements. run: length of a run if its last block is short, or 0. first: row-major
index of the first element. window_run, window_skip: number of elements that are contiguous in the whole
array, and of elements from there to the next run.
"""
LANES = 16
"""Number of elements that a loop without blocks updates at once."""

Array = tuple[str, str, int]
"""Name of an array, type of its entries, and number of elements that share an entry."""

_DRIVER = """
typedef struct {
  i64 params; const i64 *table; const u32 *keys; const float *numbers; const i32 *which;
  i32 width, threads, next;
  i64 elements;
} Job;
typedef void (*Team)(void (*)(void *), void *, unsigned, unsigned);

static void update(const i64 *entry, i64 start, i64 stop, i64 param, const Job *job) {
  const i64 params = job->params, run = entry[1] ? entry[1] : entry[0];
  const u32 *keys = job->keys;
  const float *numbers = job->numbers + (job->which ? (i64)job->which[param] * job->width : 0);
  (void)params; (void)run; (void)keys; (void)numbers;
  for (i64 at = start; at < stop;) {
    const i64 in_window = at % entry[3], index = entry[2] + at + at / entry[3] * entry[4];
    i64 count = stop - at;
    if (count > entry[3] - in_window) count = entry[3] - in_window;
@PIECE@
    at += count;
  }
}
"""
_SHARES = """
/* Takes one share of all elements. Borders of shares are borders of units. */
static void work(void *data) {
  Job *job = data;
  const i64 id = __atomic_fetch_add(&job->next, 1, __ATOMIC_RELAXED);
  const i64 low = job->elements * id / job->threads, high = job->elements * (id + 1) / job->threads;
  i64 before = 0;
  for (i64 param = 0; param < job->params && before < high; param++) {
    const i64 *entry = job->table + param * @COLUMNS@, n = entry[0], unit = @UNIT@;
    i64 start = low > before ? low - before : 0, stop = high - before < n ? high - before : n;
    before += n;
    if (start >= n) continue;
    start = (start + unit - 1) / unit * unit;
    stop = stop < n ? (stop + unit - 1) / unit * unit : n;
    @PART@(entry, start, stop < n ? stop : n, param, job);
  }
}

static void share_out(Job *job, i32 threads, Team team) {
  if (threads > 1 && team && job->elements >= 32768) {
    job->threads = threads;
    team(work, job, (unsigned)threads, 0);
  } else {
    work(job);
  }
}
"""
_STEP = """
void step(i64 params, const i64 *table, const u32 *keys, const float *numbers, const i32 *which, i32 width,
          i64 elements, i32 threads, Team team) {
  Job job = {params, table, keys, numbers, which, width, 1, 0, elements};
  share_out(&job, threads, team);
}
"""


def c_driver(graph: Graph, arrays: Sequence[Array], scalars: Sequence[Node]) -> str:
    """Return the source of `step` or `norms`, given the arrays and scalars that `row` reads."""
    cut, width = bool(graph.cuts), graph.width if graph.cuts else LANES
    values = "".join(f", {_value(x, graph.second_keys)}" for x in scalars)
    piece = (_block if cut else _span)(arrays, width, values, graph)
    inserted = {
        "PIECE": "\n".join(f"    {line}" for line in piece),
        "COLUMNS": len(FIELDS) + len(arrays),
        "UNIT": "PIECE" if graph.norms else f"entry[1] ? entry[1] : {width}" if cut else "64",
        "PART": "measure" if graph.norms else "update",
        "WIDTH": width,
        "CUT": int(cut),
        "NORMS": len(graph.norms),
        "FIRST": len(FIELDS) + 2,
        "SUM": {"float64": "double", "int64": "i64"}[SUMS[graph.sums].dtype],
        "WORDS": SUMS[graph.sums].words,
        "HAS_UNITS": int(SUMS[graph.sums].has_units),
        "UNITS": max(graph.numbers - len(graph.norms), 0),
    }
    text = _DRIVER + (c_norms(graph.sums, _SHARES) if graph.norms else _SHARES + _STEP)
    for name, value in inserted.items():
        text = text.replace(f"@{name}@", str(value))
    return text


def variable(name: str) -> str:
    """Return the variable for an array. A state array's name may have any characters."""
    return "".join(c if c.isalnum() else "_" for c in name) + "_at"


def _value(node: Node, second_keys: frozenset[int]) -> str:
    """Return a parameter's number or key. The high half of the index is added to each k1."""
    kind, i = node.args[0].split(".")
    if kind == "number":
        return f"numbers[{i}]"
    high = f" + {int(GOLDEN_RATIO):#x}u * (u32)(index >> 32)" if int(i) in second_keys else ""
    return f"(i32)(keys[{i} * params + param]{high})"


def _span(arrays: Sequence[Array], width: int, values: str, graph: Graph) -> list[str]:
    """Return code that updates contiguous elements without blocks, whole vectors in place, then the rest."""
    here = [
        f"{of} *{variable(name)} = ({of} *)entry[{len(FIELDS) + i}] + at;"
        for i, (name, of, _) in enumerate(arrays)
    ]
    given = ", ".join(variable(name) for name, *_ in arrays)
    beyond = ", ".join(f"{variable(name)} + whole" for name, *_ in arrays)
    return [
        "const i64 wrap = ((index >> 32) + 1) << 32;",
        "if (count > wrap - index) count = wrap - index;",
        *here,
        f"const i64 whole = count & -{width};",
        f"row({given}, whole, (u32)index{values});",
        "if (count > whole) {",
        *_on_stack(arrays, width, "count - whole", beyond, f"(u32)(index + whole){values}", graph),
        "}",
    ]


def _block(arrays: Sequence[Array], width: int, values: str, graph: Graph) -> list[str]:
    """Return code that updates one block of the coarsest cut, in place if it is whole."""
    here = ["const i64 of_run = at / run, in_run = at % run;", f"if (count > {width}) count = {width};"]
    here += ["if (count > run - in_run) count = run - in_run;"]
    for i, (name, of, shared) in enumerate(arrays):
        start = "at" if shared == 1 else f"of_run * ((run + {shared - 1}) / {shared}) + in_run / {shared}"
        here.append(f"{of} *{variable(name)} = ({of} *)entry[{len(FIELDS) + i}] + {start};")
    given = ", ".join(variable(name) for name, *_ in arrays)
    return [
        *here,
        f"if (count == {width}) row({given}, count, (u32)index{values});",
        "else {",
        *_on_stack(arrays, width, "count", given, f"(u32)index{values}", graph),
        "}",
    ]


def _on_stack(
    arrays: Sequence[Array], width: int, count: str, given: str, rest: str, graph: Graph
) -> list[str]:
    """Return code that updates fewer than `width` elements."""
    lines, sources, inputs = [f"  const i64 some = {count};"], given.split(", "), graph.inputs
    size = {name: f"(some + {shared - 1}) / {shared} * (i64)sizeof({of})" for name, of, shared in arrays}
    for name, of, shared in arrays:
        lines.append(
            f"  {of} short_{variable(name)}[{-(-width // shared)}] __attribute__((aligned(64))) = {{0}};"
        )
    for (name, *_), source in zip(arrays, sources, strict=True):
        if name in inputs:
            lines.append(f"  memcpy(short_{variable(name)}, {source}, {size[name]});")
    lines.append(f"  row({', '.join(f'short_{variable(name)}' for name, *_ in arrays)}, {width}, {rest});")
    for (name, *_), source in zip(arrays, sources, strict=True):
        if name in graph.outputs:
            lines.append(f"  memcpy({source}, short_{variable(name)}, {size[name]});")
    return lines

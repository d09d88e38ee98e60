"""What `silent_failures.py`, `fine_tuning.py` and `peers_*.py` measured: the README's table, and two pages.

python benchmarks/comparison.py           # prints the README's table
python benchmarks/comparison.py --write   # writes it into README.md, and the pages
"""

import argparse
import json
import math
import pathlib
import textwrap
from collections.abc import Iterable

ROOT = pathlib.Path(__file__).parents[1]
BEGIN, END = "<!-- comparison: make peers -->", "<!-- /comparison -->"
FARTHEST = "the farthest from 1"
# Row, figure, and what the README calls it: what a user sees first.
LINES = [
    ("small", "1e-06", "share of small updates applied, learning rate 1e-6"),
    ("decay", "share", "share of weight decay applied, 1e-4 per step"),
    ("drop", FARTHEST, "second moment after gradients drop tenfold (worst of median, 5 % and 95 %)"),
    ("spike", "x10000", "largest step after one batch 10,000 times larger, *without clipping*"),
    ("resume", "differ", "weights that differ after a resume"),
]
# A phone shows the first columns: ours, and those that most readers have.
COLUMNS = {
    "halfstep_torch, default": "halfstep",
    "torch AdamW(fused)": "torch fused",
    "optax.adamw": "optax",
    "torchao _AdamW, stochastic": "torchao 16-bit",
    "torchao AdamW8bit, stochastic": "torchao 8-bit",
    "bitsandbytes AdamW8bit": "bitsandbytes 8-bit",
}
# What docs/comparison.md calls each experiment.
SHORT = {
    "small": "small updates",
    "decay": "weight decay",
    "drop": "`nu` after a drop",
    "zeros": "`nu` without gradients",
    "sizes": "tiny and huge gradients",
    "spike": "spike",
    "once": "rare rows",
    "idle": "idle weights",
    "nan": "NaN",
    "compiled": "compiled",
    "resume": "resume",
    "processes": "processes",
    "network": "network",
}
_UNITS = {
    **dict.fromkeys(("small", "decay", "sizes", "once"), "share of movement"),
    **dict.fromkeys(("drop", "zeros", "idle"), "times float32's"),
    **{"spike": "times float32's step", "nan": "share kept", "network": "distance"},
    **dict.fromkeys(("compiled", "resume", "processes"), "weights that differ"),
}
DATA = "benchmarks/comparison-data.md"
_INTRODUCTION = """\
Which failures of low precision are silent? Each column is one experiment, the same for all optimizers. A
tick means that every figure is within its bounds. Otherwise the figure farthest outside is shown in
**bold**; a dash means not measured. [The figures](benchmarks/comparison-data.md) has all experiments,
bounds and settings of halfstep."""
_HOW = """\
`make peers` runs the experiments and writes these pages. They ran on {date} on a CPU ({processor}, {system},
Python {python}). Weights and gradients are bfloat16, of shape 128 x 128; betas are 0.9 and 0.999. Where an
optimizer keeps a part of each weight beside the model, that part is counted."""
_READING = """\
- *Resume*: without the state of torch's generator. A library that draws its random words from it passes if
  the checkpoint keeps that state ([figures](benchmarks/comparison-data.md#resumed-from-a-file)).
- *Processes*: one process beside two, where each seeds torch's generator with its rank.
- *rollfast* passes every experiment but one, where compiled and eager steps differ in some bits. Its steps
  take longer, as the last table shows.
- *optax.inject_hyperparams* gives its numbers the dtype of the weights. In bfloat16 `b2` is 1, and the first
  step divides 0 by 0. With `hyperparam_dtype=jnp.float32` it does not;
  `halfstep_jax` requires that."""
_FOUND = """\
Every bold cell of other libraries, by version, with a thread about the failure where we found one in November
2026."""
THREADS = {
    "optax.inject_hyperparams(adamw)": {
        "small": "[optax#1414](https://github.com/google-deepmind/optax/issues/1414), open; "
        "[#1445](https://github.com/google-deepmind/optax/pull/1445), closed without a merge",
    },
    "torch AdamW(fused)": {
        "small": "[pytorch#120376](https://github.com/pytorch/pytorch/issues/120376), open",
    },
}
"""Of optimizers the threads that are about an experiment."""
_DATA = """\
[Beside other libraries](../comparison.md) has the summary. Each section is one experiment. A figure is
**bold** where it is outside the bounds of its section."""
_SPEED = """\
`make peers-speed` times a step on a CPU ({processor}, {threads} threads), with bfloat16 weights and
gradients, {rounds} rounds in one process, on {date}. There is one array of 16 million parameters, or 300
arrays of 8 to 64 thousand. The copy took {busy:.1f} times its processor time; on a quiet machine it takes
1.1. [Benchmarks](benchmarks/cost.md#time-on-a-cpu) has a quiet run of halfstep, Optax and torch. Figures
are medians: nanoseconds per parameter, then the time relative to a copy of 14 bytes per parameter and to
torch's fused AdamW. The steps of halfstep and torchao are compiled in torch, and all steps in JAX are
jitted."""
_MEMORY = """\
`make peers-memory` trains GPT-2 small, of {millions:.0f} million parameters, on a CPU ({processor},
{threads} threads), with {tokens} tokens a step, on {date}. Each optimizer has a process. *Peak* is the
most memory of the process after the first step, less what it held before there was a model. Times are of
processor time, the least of {later} steps, at a load of {load:.0f}; the section above has quiet times. *GB
for* a number of parameters counts weights, gradients and state."""
_LOW_RATES = """\
`make fine-tuning` trains a small transformer on from weights in bfloat16 ({seeds} seeds, {date}).
*Movement* is the part of float32's that arrives. *KL* leads from the model of the float32 run to this one,
in thousandths of a nat per character. [Lost updates](how-to/lost-updates.md#fine-tuning-at-low-rates) has
all rows."""
_FINE_TUNED = {
    "bfloat16, torch AdamW": "torch AdamW",
    "bfloat16, torchao, stochastic": "torchao _AdamW, stochastic",
    "bfloat16, stochastic (the default)": "halfstep_torch, default",
    "bfloat16, fed back": "halfstep_torch, feedback",
    "split8": "halfstep_torch, split8",
}
_OF_RATE = (("proj", 1, ".2f"), ("KL", 1000, ".3f"))
_MODELS = {"1B": 1e9, "8B": 8e9, "70B": 70e9}
_RIGHT = dict.fromkeys(("small", "decay", "drop", "sizes", "spike", "nan"), "1.00")


def newest(command: str = "silent_failures") -> dict:
    """Return the newest record of a command."""
    return json.loads(max((ROOT / "benchmarks" / "results").glob(f"*-{command}-cpu.json")).read_text())


def outside(row: dict, figures: dict) -> list[str]:
    """Return the names of the figures that are not within the bounds of a row; not a number is not."""
    if "failed" in figures:
        return ["failed"]
    bounds = {name: limits for name, limits in row["bounds"].items() if figures[name] is not None}
    return [name for name, (low, high) in bounds.items() if not low <= figures[name] <= high]


def cell(row: dict, figures: dict | None, name: str, form: str | None = None) -> str:
    """Return a figure as it is printed."""
    if figures is None or figures.get(name, 0) is None:
        return "-"
    if "failed" in figures:
        return "failed"
    text = format(figures[name], form or row["columns"][name])
    text = "<0.1%" if text == "0.0%" and figures[name] else text
    return f"**{text}**" if name in outside(row, figures) else text


def farthest(row: dict, figures: dict, bounds: dict | None = None) -> str:
    """Return the name of the figure that is farthest from its bounds, those of the row if none are given."""

    def ratio(name: str) -> float:
        low, high = (bounds or row["bounds"])[name]
        value = figures[name]
        if value is None:
            return -1
        if math.isnan(value) or value <= 0 < low or value > high == 0:
            return math.inf
        return max(low / value if low else 0, value / high if high else 0)

    return max(row["bounds"], key=ratio)


def _prose(text: str) -> str:
    return textwrap.fill(text, 118, break_on_hyphens=False)


def _note(text: str) -> str:
    return textwrap.fill(text, 118, subsequent_indent="  ", break_on_hyphens=False)


def _table(head: list[str], lines: list[list[str]], texts: int = 1) -> str:
    rule = ["---"] * texts + ["--:"] * (len(head) - texts)
    return "\n".join(f"| {' | '.join(line)} |" for line in [head, rule, *lines])


def readme_table(record: dict) -> str:
    """Return the README's table: the failures in `LINES` for the optimizers in `COLUMNS`."""
    rows = {row["key"]: row for row in record["rows"]}
    forms = dict.fromkeys(("small", "decay", "sizes", "state"), ".2f")
    lines = []
    for key, name, text in LINES:
        row = rows[key]
        right = _RIGHT.get(key, "0.0%" if key != "state" else "")
        of = [row["figures"].get(entry) for entry in COLUMNS]
        ones = dict.fromkeys(row["bounds"], (1, 1))
        shown = [farthest(row, each, ones) if name == FARTHEST and each else name for each in of]
        figures = [cell(row, each, name, forms.get(key)) for each, name in zip(of, shown, strict=True)]
        lines.append([text, right, *figures])
    return _table(["", "right", *COLUMNS.values()], lines)


def _bounds(row: dict) -> str:
    def limits(low: float, high: float) -> str:
        if low == high:
            return f"{low:g}"
        return f"at most {high:g}" if low == 0 else f"{low:g} to {high:g}"

    said = [f"{name}: {limits(low, high)}" for name, (low, high) in row["bounds"].items()]
    return f" Right: {'; '.join(said)}." if said else ""


def _section(record: dict, row: dict) -> str:
    lines = [
        [entry["name"], *(cell(row, row["figures"].get(entry["name"]), name) for name in row["columns"])]
        for entry in record["entries"]
        if entry["name"] in row["figures"]
    ]
    notes = [
        f"- {name}: {figures['failed']}." for name, figures in row["figures"].items() if "failed" in figures
    ]
    notes += [
        f"- {short['name']}: {short['why']}." for short in record["shortfalls"] if short["row"] == row["key"]
    ]
    notes = [_note(note) for note in notes]
    table = _table(["", *row["columns"]], lines)
    return "\n\n".join(
        [f"## {row['title']}", _prose(row["text"] + _bounds(row)), table, *["\n".join(notes)][: len(notes)]]
    )


def _speed(record: dict) -> str:
    """Return the section on speed: a line for each optimizer, three columns for each layout."""
    rows = {(row["name"], row["layout"]): row for row in record["rows"]}
    names, layouts = (list(dict.fromkeys(row[key] for row in record["rows"])) for key in ("name", "layout"))
    keys = ("ns", "x copy", "x fused")

    def cells(name: str) -> list[str]:
        return [
            f"{rows[name, layout][key]:.2f}" if key in rows[name, layout] else "-"
            for layout in layouts
            for key in keys
        ]

    head = ["", *(f"{layout}: {key}" if key == "ns" else key for layout in layouts for key in keys)]
    table = _table(head, [[name, *cells(name)] for name in names if set(cells(name)) != {"-"}])
    failed = [
        f"- {row['name']}, {row['layout']}: {row['does not run']}."
        for row in record["rows"]
        if "does not run" in row
    ]
    notes = ["Not timed:", "\n".join(_note(line) for line in failed)] if failed else []
    copy = record["rows"][0]
    text = _prose(_SPEED.format(**record, **record["machine"], busy=copy["ns"] / copy["cpu"]))
    return "\n\n".join(["## Time of a step", text, table, *notes])


def _memory(record: dict) -> str:
    """Return the section on memory: a line for each optimizer that trained the model."""

    def cells(row: dict) -> list[str]:
        weight = 4 if row["name"].endswith("float32") else 2
        all_of = 2 * weight + row["state"]
        figures = [f"{row[key]:.2f}" for key in ("state", "peak", "step", "update")]
        return [row["name"], *figures, *(f"{all_of * size / 1e9:.1f}" for size in _MODELS.values())]

    head = ["", "bytes of state per parameter", "peak, GB", "step, s", "of it the optimizer, s"]
    head += [f"GB for {size}" for size in _MODELS]
    numbers = {**record, **record["machine"], "millions": record["parameters"] / 1e6}
    missing = f" Not in this run: {'; '.join(record['not run'])}." if record["not run"] else ""
    text = _prose(_MEMORY.format(**numbers, later=record["steps"] - 1) + missing)
    return "\n\n".join(["## Memory of a model", text, _table(head, list(map(cells, record["rows"])))])


def _low_rates(record: dict) -> str:
    """Return the section on fine-tuning: a line for each optimizer, two columns for each rate."""
    rates = list(dict.fromkeys(row["rate"] for row in record["rows"]))
    of = {(row["name"], row["rate"]): row for row in record["rows"]}
    lines = [
        [name, *(f"{of[key, r][x] * by:{form}}" for r in rates for x, by, form in _OF_RATE)]
        for key, name in _FINE_TUNED.items()
    ]
    head = ["", *(f"{rate}: {name}" for rate in rates for name in ("movement", "KL"))]
    text = _prose(_LOW_RATES.format(seeds=max(row["seeds"] for row in record["rows"]), date=record["date"]))
    return "\n\n".join(["## Fine-tuning at low rates", text, _table(head, lines)])


def _mark(row: dict, entry: str) -> str:
    """Return a tick, or the figure of an optimizer that is farthest outside of its bounds."""
    figures = row["figures"].get(entry)
    if figures is None or "failed" in figures:
        return cell(row, figures, "")
    return cell(row, figures, farthest(row, figures)) if outside(row, figures) else "✔"


def _summary(record: dict, names: Iterable[str]) -> str:
    """Return a row for each optimizer of some names, and a column for each experiment."""
    rows = {row["key"]: row for row in record["rows"]}
    lines = [[name, *(_mark(rows[key], name) for key in SHORT)] for name in names]
    return _table(["", *(f"{name} ({_UNITS[key]})" for key, name in SHORT.items())], lines)


def _names(record: dict, settings: Iterable[str] = ()) -> list[str]:
    """Return the names of a record's optimizers: all, or of halfstep's own these settings alone."""
    names = [entry["name"] for entry in record["entries"]]
    ours = [f"halfstep_torch, {setting}" for setting in settings]
    return [name for name in names if not ours or name in ours or not name.startswith("halfstep")]


def found(record: dict) -> list[list[str]]:
    """Return, of each optimizer of others with a bold cell: name, version, these cells, and threads."""
    rows = {row["key"]: row for row in record["rows"]}
    lines = []
    for entry in record["entries"]:
        marks = {key: _mark(rows[key], entry["name"]) for key in SHORT}
        bold = [f"{SHORT[key]} {mark.strip('*')}" for key, mark in marks.items() if "*" in mark]
        if bold and not entry["ours"]:
            threads = "; ".join(THREADS.get(entry["name"], {}).values())
            lines.append([entry["name"], entry["package"], ", ".join(bold), threads or "-"])
    return lines


def page(record: dict, low_rates: dict, speed: dict, memory: dict) -> str:
    """Return docs/comparison.md: what breaks in silence, the time of a step, and the memory of a model."""
    versions = list(dict.fromkeys(entry["package"] for entry in record["entries"]))
    refused = [f" {name} was not run: {why}." for name, why in record["not run"].items()]
    said = (
        _HOW.format(**record, **record["machine"]) + f" Versions: {', '.join(versions)}." + "".join(refused)
    )
    shortfalls = [
        _note(f"- {short['name']}, *{SHORT[short['row']]}*: {short['why']}.")
        for short in record["shortfalls"]
    ]
    parts = [
        "# Beside other libraries",
        _prose(_INTRODUCTION),
        _summary(record, _names(record, ("default", "feedback", "eight_bit, feedback"))),
        _READING,
        "Where halfstep falls short:",
        "\n".join(shortfalls),
        _prose(said),
        "## Found with halfstep",
        _prose(_FOUND),
        _table(["", "version", "outside of its bounds", "thread"], found(record), texts=4),
        _low_rates(low_rates),
        _speed(speed),
        _memory(memory),
    ]
    return "\n\n".join(parts) + "\n"


def data_page(record: dict) -> str:
    """Return docs/benchmarks/comparison-data.md: a section for each experiment."""
    parts = [
        "# Beside other libraries: the figures",
        _prose(_DATA),
        _summary(record, _names(record)),
        *(_section(record, row) for row in record["rows"]),
    ]
    return "\n\n".join(parts) + "\n"


def placed(readme: str, table: str) -> str:
    """Return the README with the table between its markers."""
    before, rest = readme.split(BEGIN)
    _, after = rest.split(END)
    return f"{before}{BEGIN}\n{table}\n{END}{after}"


def pages() -> dict[str, str]:
    """Return README.md and the two pages, as the newest records have them."""
    record = newest()
    others = map(newest, ("fine_tuning", "peers_speed", "peers_memory"))
    return {
        "README.md": placed((ROOT / "README.md").read_text(), readme_table(record)),
        "docs/comparison.md": page(record, *others),
        f"docs/{DATA}": data_page(record),
    }


def main() -> None:
    """Print the README's table, or write it and the pages."""
    parser = argparse.ArgumentParser(description="Make pages of the newest records.")
    parser.add_argument("--write", action="store_true", help="write README.md and the pages of docs/")
    if parser.parse_args().write:
        for name, text in pages().items():
            (ROOT / name).write_text(text)
    else:
        print(readme_table(newest()))


if __name__ == "__main__":
    main()

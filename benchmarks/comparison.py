"""What `silent_failures.py` and `peers_speed.py` measured: the table of README.md, and docs/comparison.md.

python benchmarks/comparison.py           # prints the README's table
python benchmarks/comparison.py --write   # writes it into README.md, and docs/comparison.md
"""

import argparse
import json
import pathlib
import textwrap

ROOT = pathlib.Path(__file__).parents[1]
BEGIN, END = "<!-- comparison: make peers -->", "<!-- /comparison -->"
# Row, figure, and what the README calls it: what a user sees first.
LINES = [
    ("small", "1e-06", "small updates that arrive, learning rate 1e-6"),
    ("decay", "share", "weight decay that arrives, 1e-4 per step"),
    ("drop", "median", "second moment after gradients drop tenfold"),
    ("spike", "x10000", "largest step after one batch 10,000 times larger"),
    ("nan", "0x7fffffff stays NaN", "NaN of an NVIDIA GPU that stay NaN"),
    ("resume", "differ", "weights that differ after a resume from a file"),
    ("processes", "differ", "weights that differ between two processes"),
    ("state", "bytes per parameter", "bytes of state per parameter"),
]
COLUMNS = {
    "halfstep_torch, default": "halfstep",
    "halfstep_torch, eight_bit": "halfstep `eight_bit`",
    "torch AdamW(fused)": "torch fused",
    "optax.adamw": "optax",
    "torchao _AdamW, stochastic": "torchao 16-bit",
    "torchao AdamW8bit, stochastic": "torchao 8-bit",
    "bitsandbytes AdamW8bit": "bitsandbytes 8-bit",
    "optimi AdamW (Kahan)": "optimi",
    "HeavyBall AdamW, bfloat16 state": "HeavyBall",
}
_INTRODUCTION = """\
This page shows what breaks in silence in low precision, in halfstep and in other libraries. Each failure is
one experiment, the same for all optimizers. `make peers` runs the experiments and writes this page. They
ran on {date} on a CPU ({processor}, {system}, Python {python}). Weights and gradients are bfloat16, of
shape 128 x 128; betas are 0.9 and 0.999. A figure is **bold** where it is outside the bounds of its
section. Where an optimizer keeps a part of each weight beside the model, that part is counted."""
_SPEED = """\
`make peers-speed` times a step on a CPU ({processor}, {threads} threads), with bfloat16 weights and
gradients. There is one array of 16 million parameters, or 300 arrays of 8 to 64 thousand. This run is of
{date}, with the versions above. It takes a step of each optimizer in turn, {rounds} rounds in one
process, so that other work on the machine slows all of them. The copy took {busy:.1f} times its processor
time; on a quiet machine it takes 1.1. [Performance](cost.md#time-on-a-cpu) has a quiet run of halfstep,
Optax and torch. Figures are medians: nanoseconds per parameter, then the time relative to a copy of 14
bytes per parameter and to torch's fused AdamW. The steps of halfstep and torchao are compiled in torch,
and all steps in JAX are jitted. Each other optimizer steps as it comes."""
_RIGHT = {"small": "1.00", "decay": "1.00", "drop": "1.00", "spike": "1.00", "nan": "1.00"}


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
    return f"**{text}**" if name in outside(row, figures) else text


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
    forms = {"small": ".2f", "decay": ".2f", "state": ".2f"}
    lines = []
    for key, name, text in LINES:
        row = rows[key]
        right = _RIGHT.get(key, "0.0%" if key != "state" else "")
        figures = [cell(row, row["figures"].get(entry), name, forms.get(key)) for entry in COLUMNS]
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


def page(record: dict, speed: dict) -> str:
    """Return docs/comparison.md: what breaks in silence, and the time of a step."""
    versions = [[entry["name"], entry["package"]] for entry in record["entries"]]
    refused = [_note(f"- {name}: {why}.") for name, why in record["not run"].items()]
    parts = [
        "# Beside other libraries",
        _prose(_INTRODUCTION.format(**record, **record["machine"])),
        _table(["optimizer", "version"], versions, texts=2),
        *(["Not run:\n\n" + "\n".join(refused)] if refused else []),
        *(_section(record, row) for row in record["rows"]),
        _speed(speed),
    ]
    return "\n\n".join(parts) + "\n"


def placed(readme: str, table: str) -> str:
    """Return the README with the table between its markers."""
    before, rest = readme.split(BEGIN)
    _, after = rest.split(END)
    return f"{before}{BEGIN}\n{table}\n{END}{after}"


def main() -> None:
    """Print the README's table, or write both pages."""
    parser = argparse.ArgumentParser(description="Make pages of the newest records.")
    parser.add_argument("--write", action="store_true", help="write README.md and docs/comparison.md")
    record = newest()
    if parser.parse_args().write:
        (ROOT / "docs" / "comparison.md").write_text(page(record, newest("peers_speed")))
        path = ROOT / "README.md"
        path.write_text(placed(path.read_text(), readme_table(record)))
    else:
        print(readme_table(record))


if __name__ == "__main__":
    main()

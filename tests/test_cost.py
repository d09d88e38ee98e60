"""The page of costs has the figures of its records, of `benchmarks/compiled.py` and `benchmarks/step.py`."""

import json
import pathlib
import re

import pytest

ROOT = pathlib.Path(__file__).parents[1]
PAGE = (ROOT / "docs" / "benchmarks" / "cost.md").read_text()
IN_TORCH = {
    "AdamW, bfloat16 (default)": "AdamW",
    "bfloat16, nearest": "AdamW, nearest",
    "one_pass (mulaw8, uroot4_e4m4)": "AdamW, one_pass",
    "eight_bit (relative e3m4, uroot8)": "AdamW, eight_bit",
    "Lion, bfloat16": "Lion",
    "momentum, bfloat16": "SGD, momentum",
}
"""The names of the settings in the record of torch's programs."""


def record(name: str) -> list[dict]:
    """Return the rows of the newest record of a name, which the page must link."""
    path = max((ROOT / "benchmarks" / "results").glob(f"*-{name}.json"))
    assert f"results/{path.name})" in PAGE, f"The page does not name {path.name}, the newest."
    return json.loads(path.read_text())["rows"]


def table(first: str) -> dict[str, list[str]]:
    """Return the cells of the table whose first heading begins with a text, by the name of the row."""
    (found,) = re.findall(rf"^\| {re.escape(first)}.*\n\|-.*\n((?:\|.*\n)+)", PAGE, re.MULTILINE)
    rows = [[cell.strip() for cell in line.split("|")[1:-1]] for line in found.splitlines()]
    return {name.replace("`", ""): cells for name, *cells in rows}


def test_bytes_moved_are_those_of_the_compiled_programs():
    due: dict[str, dict[str, dict]] = {}
    for row in record("compiled-tpu") + record("compiled-h100"):
        shape = " x ".join(str(n) for n in row["shape"])
        due.setdefault(row["setting"], {})[row["target"]] = {**row, "shape": shape}
    shown = table("bytes per parameter")
    for name, by_target in due.items():
        cells = [f"{by_target['v5e']['floor']:.2f}"]
        for target in ("v5e", "v6e", "h100"):
            cells.append("{moved:.2f} ({x:.2f}x)".format_map(by_target[target]))
        cells.append(f"{by_target['h100']['temporaries']:.2f}")
        row = name if name in shown else f"{name}, {by_target['h100']['shape']}"
        assert shown.pop(row) == cells, name
    assert not shown


def test_instructions_are_those_of_the_machine_code():
    in_torch = {row["step"]: row["instructions"]["sm_90"] for row in record("compiled_torch-h100")}
    due = {}
    for row in record("compiled-h100"):
        one_kernel, name = "machine" in row, row["setting"]
        cells = [f"{row['machine']:.0f} ({row['integer']:.0f})" if one_kernel else "-", ""]
        if name in IN_TORCH:
            _, machine, integer = in_torch[IN_TORCH[name]]
            cells[1] = f"{machine:.0f} ({integer:.0f})"
        if one_kernel or cells[1]:
            due[name] = cells
    assert table("machine instructions per parameter") == due


@pytest.mark.parametrize(
    ("first", "layouts", "figures"),
    [
        ("AdamW, one array of 16 million", ("1 x 16M",), ("ns", "x")),
        ("AdamW by storage", ("JAX storages", "torch storages"), ("x",)),
    ],
)
def test_times_are_those_of_the_record(first, layouts, figures):
    rows = record("step-cpu")
    by_name: dict[str, list[str]] = {}
    for layout in layouts:
        for row in rows:
            if row["layout"] == layout:
                by_name.setdefault(row["name"], []).extend(f"{row[figure]:.2f}" for figure in figures)
    assert table(first) == by_name


def test_times_of_many_arrays_are_those_of_the_record():
    rows = [row for row in record("step-cpu") if row["layout"].startswith("300 x ")]
    by_name: dict[str, list[str]] = {}
    for row in rows:
        peer = next(r for r in rows if r["layout"] == row["layout"] and "foreach" in r["name"])
        by_name.setdefault(row["name"], []).append(f"{row['cpu'] / peer['cpu']:.2f}")
    del by_name["copy of 14 bytes"]
    assert table("AdamW in torch, bfloat16, 300 arrays") == by_name


def test_the_pages_give_one_figure_for_each_recipe():
    """What a reader chooses by is what was measured: docs/recipes.md and README.md, rounded."""

    def rows(page: str) -> dict[str, list[str]]:
        lines = re.findall(r"^\| .*`(?:\*\*recipes\.)?(\w+)`.*\|$", page, re.MULTILINE)
        cells = re.findall(r"^\| (.*) \|$", page, re.MULTILINE)
        return {
            name: next(line.split(" | ") for line in cells if f"{name}`" in line)
            for name in dict.fromkeys(lines)
        }

    measured = rows((ROOT / "docs" / "benchmarks" / "fidelity.md").read_text())
    said = rows((ROOT / "docs" / "recipes.md").read_text())
    names = ("full_precision", "near_float32", "sixteen_bit", "eight_bit", "one_pass", "four_bit")
    for name in names:
        _, formats, size, distance = said[name]
        _, measured_formats, measured_size, measured_distance, *_ = measured[name]
        assert (formats, size) == (measured_formats, measured_size)
        assert distance == f"{float(measured_distance.split(' ')[0]):.3f}", name

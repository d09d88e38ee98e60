"""Pages have the figures of their records: costs, recipes, and weights fed back."""

import json
import pathlib
import re

import pytest

ROOT = pathlib.Path(__file__).parents[1]
PAGE = (ROOT / "docs" / "benchmarks" / "cost.md").read_text()
FED_BACK = (ROOT / "docs" / "how-to" / "fed-back-weights.md").read_text()
LOST = (ROOT / "docs" / "how-to" / "lost-updates.md").read_text()
IN_TORCH = {
    "AdamW, bfloat16 (default)": "AdamW",
    "bfloat16, nearest": "AdamW, nearest",
    "one_pass (mulaw8, uroot4_e4m4)": "AdamW, one_pass",
    "eight_bit (relative e3m4, uroot8)": "AdamW, eight_bit",
    "Lion, bfloat16": "Lion",
    "momentum, bfloat16": "SGD, momentum",
}
"""The names of the settings in the record of torch's programs."""


def record(name: str, key: str = "rows", page: str = PAGE) -> list[dict]:
    """Return the rows of the newest record of a name, which the page must link."""
    path = max((ROOT / "benchmarks" / "results").glob(f"*-{name}.json"))
    assert f"results/{path.name})" in page, f"The page does not name {path.name}, the newest."
    return json.loads(path.read_text())[key]


def table(first: str, page: str = PAGE) -> dict[str, list[str]]:
    """Return the cells of the table whose first heading begins with a text, by the name of the row."""
    (found,) = re.findall(rf"^\| {re.escape(first)}.*\n\|-.*\n((?:\|.*\n)+)", page, re.MULTILINE)
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


def test_what_a_step_costs_the_host_is_as_recorded():
    due: dict[str, dict[str, dict]] = {}
    for row in record("host_time-cpu"):
        due.setdefault(row["case"], {})[row["row"]] = row
    shown = table("weights | calls, compiled")
    assert list(shown) == list(due)
    for case, by_row in due.items():
        calls = [f"{by_row[name]['calls']:,}" for name in ("compiled", "torch foreach")]
        timed = [by_row.get(name) for name in ("eager", "compiled", "one_pass", "torch fused")]
        assert shown[case] == [*calls, *(f"{row['of foreach']:.2f}" if row else "-" for row in timed)], case


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


@pytest.mark.parametrize(("rule", "first"), [("adamw", "learning rate |"), ("sgd", "learning rate of SGD")])
def test_distances_of_weights_fed_back_are_those_of_the_record(rule, first):
    rows = [row for row in record("fed_back-cpu", "digits", FED_BACK) if row["rule"] == rule]
    due: dict[str, list[str]] = {}
    for without, with_it in zip(rows[::2], rows[1::2], strict=True):
        assert (without["storage"], with_it["storage"]) == ("stochastic", "feedback")
        cell = f"{without['dist']:.4f} to **{with_it['dist']:.4f}**"
        due.setdefault(with_it["rate"].removesuffix("s").replace("restart", "restarted"), []).append(cell)
        (heading,) = re.findall(rf"^\| {re.escape(first)}.*$", FED_BACK, re.MULTILINE)
        assert f"{with_it['recipe'].replace('_bit', '_bit`')}, {with_it['bytes']:.2f} bytes" in heading
    assert table(first, FED_BACK) == due
    worst = max(record("fed_back-cpu", "digits", FED_BACK), key=lambda row: abs(row["loss"]))
    assert f"At {worst['rate']} its loss is {worst['loss']:.4f}".replace("0.0", ".0") in " ".join(
        FED_BACK.split()
    )


def test_a_language_model_fed_back_is_that_of_the_record():
    rows, said = record("fed_back-transformer-cpu", "transformer", FED_BACK), " ".join(FED_BACK.split())
    for without, with_it in zip(rows[::2], rows[1::2], strict=True):
        assert f"a distance of {without['dist']:.3f} to **{with_it['dist']:.3f}**" in said
        assert f"from {without['loss']:.4f} above float32's to {with_it['loss']:.4f}" in said


def test_figures_of_fine_tuning_are_those_of_the_record():
    shown = re.findall(r"^\| (1e-[56]) \| (.+?) \| (.*) \|$", LOST, re.MULTILINE)
    due = [
        (
            row["rate"],
            row["name"],
            f"{row['loss']:+.4f} | {1000 * row['KL']:.3f} | {row['moved']:.0%} | {row['dist']:.2f} | "
            f"{row['proj']:.2f}",
        )
        for row in record("fine_tuning-cpu", page=LOST)
        if row["name"] != "float32"
    ]
    assert shown == due


RECIPES = ("full_precision", "near_float32", "sixteen_bit", "eight_bit", "one_pass", "four_bit")


def recipe_rows(page: str) -> dict[str, list[str]]:
    """Return the cells of the first row that names a recipe in its first two cells, by recipe."""
    lines = [line.strip("| ") for line in (ROOT / page).read_text().splitlines() if line.startswith("|")]
    rows = [line.split(" | ") for line in lines]
    return {
        name: row for name in RECIPES for row in reversed(rows) if re.search(rf"\b{name}\b", "".join(row[:2]))
    }


def test_the_pages_give_one_figure_for_each_recipe():
    """What a reader chooses by is what was measured: docs/recipes.md and README.md, rounded."""
    measured = recipe_rows("docs/benchmarks/fidelity.md")
    said = recipe_rows("docs/recipes.md")
    assert tuple(said) == RECIPES
    for name, (_, formats, size, distance) in said.items():
        _, *of_name = measured[name]
        assert (formats, size) == tuple(of_name[:2])
        assert distance == f"{float(of_name[2].split(' ')[0]):.3f}", name
    in_readme = recipe_rows("README.md")
    for name in ("near_float32", "full_precision", "one_pass", "four_bit"):
        *_, size, distance = in_readme[name]
        assert (float(size), distance) == (float(said[name][2]), said[name][3])


def test_both_pages_give_the_measured_distance_of_fed_back_weights():
    rows = record("fed_back-cpu", "digits", FED_BACK)
    (row,) = (
        row
        for row in rows
        if (row["rule"], row["rate"], row["recipe"], row["storage"])
        == ("adamw", "1e-3", "default", "feedback")
    )
    assert f'`param_storage="feedback"` | {row["bytes"]:.0f} | {row["dist"]:.3f} |' in (
        (ROOT / "README.md").read_text()
    )
    assert f"ends at {row['dist']:.3f}" in (ROOT / "docs" / "recipes.md").read_text()


def test_memory_of_a_large_model_is_the_counted_bytes_of_each_recipe():
    said = recipe_rows("docs/recipes.md")
    due = {name: round(8 * float(said[name][2])) for name in ("sixteen_bit", "one_pass", "four_bit")}
    readme = " ".join((ROOT / "README.md").read_text().split())
    assert f"take {8 * 12} GB in float32, {due['sixteen_bit']} GB by default" in readme
    assert f"{due['one_pass']} GB under `one_pass` and {due['four_bit']} GB under `four_bit`" in readme

"""Pages have the figures of their records: costs, recipes, and weights fed back."""

import pathlib
import re
import sys

import pytest

ROOT = pathlib.Path(__file__).parents[1]
FED_BACK = (ROOT / "docs" / "how-to" / "fed-back-weights.md").read_text()
RECORDS = {
    "docs/benchmarks/cost.md": (
        "compiled-tpu",
        "compiled-h100",
        "compiled_torch-h100",
        "step-cpu",
        "host_time-cpu",
    ),
    "docs/benchmarks/fidelity.md": ("scenarios-cpu",),
    "docs/how-to/fed-back-weights.md": ("fed_back-cpu",),
    "docs/how-to/lost-updates.md": ("fine_tuning-cpu",),
}


@pytest.fixture
def tables(monkeypatch):
    """The module that writes the tables of pages; it is gone again afterwards."""
    monkeypatch.syspath_prepend(str(ROOT / "benchmarks"))
    import record_tables

    yield record_tables
    sys.modules.pop("record_tables")


@pytest.mark.parametrize("page", RECORDS)
def test_a_page_has_the_tables_of_the_newest_records_and_links_these(tables, page):
    text = (ROOT / page).read_text()
    assert tables.placed(page, text) == text, "Run `make tables`."
    for name in RECORDS[page]:
        assert f"results/{tables.newest(name).name})" in text


def test_the_tables_are_of_pages_whose_records_are_named(tables):
    assert tables.TABLES.keys() == RECORDS.keys()


def test_the_largest_difference_of_losses_of_weights_fed_back_is_that_of_the_record(tables):
    worst = max(tables.rows("fed_back-cpu", "digits"), key=lambda row: abs(row["loss"]))
    said = f"At {worst['rate']} its loss is {worst['loss']:.4f}".replace("0.0", ".0")
    assert said in " ".join(FED_BACK.split())


def test_a_language_model_fed_back_is_that_of_the_record(tables):
    said = " ".join(FED_BACK.split())
    assert f"results/{tables.newest('fed_back-transformer-cpu').name})" in said
    rows = tables.rows("fed_back-transformer-cpu", "transformer")
    for without, with_it in zip(rows[::2], rows[1::2], strict=True):
        assert f"a distance of {without['dist']:.3f} to **{with_it['dist']:.3f}**" in said
        assert f"from {without['loss']:.4f} above float32's to {with_it['loss']:.4f}" in said


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


def test_both_pages_give_the_measured_distance_of_fed_back_weights(tables):
    rows = tables.rows("fed_back-cpu", "digits")
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

"""Pages have the figures of their records: costs, recipes, and weights fed back."""

import json
import pathlib
import re
import sys

import pytest

ROOT = pathlib.Path(__file__).parents[1]
FED_BACK = (ROOT / "docs" / "how-to" / "feedback.md").read_text()
RECORDS = {
    "docs/benchmarks/cost.md": (
        "compiled-tpu",
        "compiled-h100",
        "compiled_torch-h100",
        "step-cpu",
        "host_time-cpu",
    ),
    "docs/benchmarks/fidelity.md": (
        "scenarios-cpu",
        "quality-recipes-cpu",
        "rules-cpu",
        "rules-transformer-cpu",
        "low_weights-cpu",
        "transformer-recipes-cpu",
    ),
    "docs/how-to/feedback.md": ("fed_back-cpu",),
    "docs/how-to/lost-updates.md": ("fine_tuning-cpu",),
    "README.md": ("language_model-cpu",),
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
    worst = max(tables.rows("fed_back-cpu", "digits"), key=lambda row: abs(row["over"]))
    said = f"At {worst['rate']} its loss is {worst['over']:.4f}".replace("0.0", ".0")
    assert said in " ".join(FED_BACK.split())


def test_a_language_model_fed_back_is_that_of_the_record(tables):
    said = " ".join(FED_BACK.split())
    assert f"results/{tables.newest('fed_back-transformer-cpu').name})" in said
    rows = tables.rows("fed_back-transformer-cpu", "transformer")
    for without, with_it in zip(rows[::2], rows[1::2], strict=True):
        assert f"a distance of {without['dist']:.3f} to **{with_it['dist']:.3f}**" in said
        assert f"from {without['over']:.4f} above float32's to {with_it['over']:.4f}" in said


def test_what_weights_fed_back_gain_is_said_as_recorded(tables):
    """On their page, and where maintainers are told why they are not the default."""
    tuned = {(row["rate"], row["name"]): row for row in tables.rows("fine_tuning-cpu")}
    page, house = (" ".join(x.split()) for x in (FED_BACK, (ROOT / "docs" / "maintaining.md").read_text()))
    lost = []
    for rate in ("1e-5", "1e-6"):
        without, with_it = (
            tuned[rate, "bfloat16, stochastic (the default)"],
            tuned[rate, "bfloat16, fed back"],
        )
        assert f"{with_it['dist']:.2f} for {without['dist']:.2f} at {rate}" in page
        lost.append([f"{1000 * row['KL']:.3f}" for row in (without, with_it)])
    assert f"| {' | '.join(', '.join(cells) for cells in zip(*lost, strict=True))} |" in house
    digits = [x for x in tables.rows("fed_back-cpu", "digits") if x["rate"] in ("1e-3", "1e-4")]
    cells = [
        ", ".join(f"{x['dist']:.3f}" for x in digits if (x["storage"], x["recipe"]) == (storage, "default"))
        for storage in ("stochastic", "feedback")
    ]
    assert f"| {' | '.join(cells)} |" in house


def test_the_model_that_is_fine_tuned_is_of_the_size_that_its_page_says(tables):
    before = json.loads(tables.newest("fine_tuning-cpu").read_text())["before"]
    characters = before["steps"] * before["batch"] * before["context"]
    said = " ".join((ROOT / "docs" / "how-to" / "lost-updates.md").read_text().split())
    assert f"a transformer of {before['parameters'] / 1e6:.2f} million parameters in float32" in said
    assert f"on {characters / 1e6:.1f} million characters of Python code" in said


def test_no_made_up_gradients_and_no_long_run_are_worse_by_weights_fed_back(tables):
    page, house = (" ".join(x.split()) for x in (FED_BACK, (ROOT / "docs" / "maintaining.md").read_text()))
    of = tables.rows("scenarios-cpu", "results")
    without, with_it = (of[f"bfloat16 weights, sixteen_bit, {x}"] for x in ("stochastic", "feedback"))
    kinds = [kind for kind in without if kind != "idle"]
    times = [without[kind][0] / with_it[kind][0] for kind in kinds]
    assert f"All {len(kinds)} kinds" in page
    assert f"{min(times):.1f} to {max(times):.0f} times" in page
    assert f"differ by at most {max(with_it[kind][2] for kind in kinds):.4f}" in page
    ranges = [
        f"{min(x[kind][0] for kind in kinds):.3f} to {max(x[kind][0] for kind in kinds):.3f}"
        for x in (without, with_it)
    ]
    assert f"| {' | '.join(ranges)} |" in house
    assert f"results/{tables.newest('scenarios-cpu').name})" in page
    assert f"results/{tables.newest('long_run-cpu').name})" in page
    last = {
        row["name"]: f"{row.get('last', 0):.1f}"
        for row in json.loads(tables.newest("long_run-cpu").read_text())
    }
    walked, stayed = last["weights, stochastic"], last["weights, feedback"]
    assert f"are {stayed} gaps from float32's, in place of {walked}" in page
    assert f"| {walked} | {stayed} |" in house


RECIPES = ("full_precision", "near_float32", "sixteen_bit", "eight_bit", "one_pass", "four_bit")


def recipe_rows(page: str) -> dict[str, list[str]]:
    """Return the cells of the first row that names a recipe in its first two cells, by recipe."""
    lines = [line.strip("| ") for line in (ROOT / page).read_text().splitlines() if line.startswith("|")]
    rows = [line.split(" | ") for line in lines]
    return {
        name: row for name in RECIPES for row in reversed(rows) if re.search(rf"\b{name}\b", "".join(row[:2]))
    }


MEASURED_AS = {
    "full_precision": ("bf16 split16; float32", "float32, float32", ""),
    "near_float32": ("bf16 split8; bf16", "float32; bf16", "bfloat16"),
    "sixteen_bit": (
        "bf16 stochastic; mu bf16, nu ufloat16_e7m9",
        "float32; mu bf16, nu ufloat16_e7m9",
        "ufloat16_e7m9",
    ),
    "eight_bit": ("bf16 stochastic; eight_bit", "float32; eight_bit", "scaled uroot8"),
    "one_pass": ("bf16 stochastic; one_pass", "float32; one_pass", "uroot4_e4m4"),
    "four_bit": ("bf16 stochastic; four_bit", "float32; four_bit", "scaled uroot8"),
}
"""By recipe: its row of quality.py, the beginning of that with float32 weights, and its second moment."""


@pytest.mark.parametrize("name", RECIPES)
def test_the_distances_of_a_recipe_are_those_of_the_records(tables, name):
    stored, by_moments, nu = MEASURED_AS[name]
    digits = tables.of_digits()
    alone = next(row for row in digits.values() if row["name"].split(":")[0] == by_moments)
    model = [
        row
        for record in ("transformer-cpu", "transformer-recipes-cpu")
        for row in json.loads(tables.newest(record).read_text())["transformer"]
    ]
    kept = {row["name"].split(":")[0]: row for row in model}.get(nu if nu == "bfloat16" else name)
    (drop,) = (
        [
            row
            for row in json.loads(tables.newest("second_moment-cpu").read_text())
            if (row["sigma"], row["format"]) == (1.5, nu)
        ]
        if nu
        else [None]
    )
    due = [f"{digits[stored]['dist']:.4f} ± {digits[stored]['spread']:.4f}"]
    due.append(f"{alone['dist']:.4f} ± {alone['spread']:.4f}")
    due.append(f"{kept['dist']:.4f} ± {kept['spread']:.4f}" if kept else "0")
    due.append(f"{drop['median']:.3f} ({drop['low']:.2f} to {drop['high']:.2f})" if drop else "exact")
    if name == "full_precision":
        due[:2] = due[0].split(" ±")[0], "0"
    assert recipe_rows("docs/benchmarks/fidelity.md")[name][3:7] == due


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
        _, size, distance, *_ = in_readme[name]
        assert (float(size), distance) == (float(said[name][2]), said[name][3])


def test_both_pages_give_the_measured_distances_of_fed_back_weights(tables):
    measured = {
        row["recipe"]: row
        for row in tables.rows("fed_back-cpu", "digits")
        if (row["rule"], row["rate"], row["storage"]) == ("adamw", "1e-3", "feedback")
    }
    default, eight = (f"{measured[name]['dist']:.3f}" for name in ("default", "eight_bit"))
    readme, page = ((ROOT / name).read_text() for name in ("README.md", "docs/recipes.md"))
    assert f'`param_storage="feedback"` | {measured["default"]["bytes"]:.0f} | {default} |' in readme
    assert f'`recipe="eight_bit", param_storage="feedback"` | 4.01 | {eight} |' in readme
    assert f"ends at {default}" in page
    assert f'`"feedback"` takes it to {eight}' in page


@pytest.fixture(scope="module")
def readme_rows():
    """The cells of each row of the README's table of settings, by the setting."""
    table = (ROOT / "README.md").read_text().split("| GB for 8B |")[1].split("\n\n")[0]
    rows = [[cell.strip() for cell in line.strip("|").split("|")] for line in table.splitlines()[2:]]
    return {row[0]: row[1:] for row in rows}


def test_the_memory_of_a_large_model_in_the_readme_is_counted(readme_rows):
    for setting, (size, _, gigabytes, *_) in readme_rows.items():
        gradient = 4 if setting.startswith("float32") else 2
        assert int(gigabytes) == round(8 * (float(size) + gradient)), setting


def test_times_of_a_gpu_in_the_readme_are_of_the_record(readme_rows):
    record = json.loads((ROOT / "benchmarks" / "results" / "2026-11-27-peers-h100.json").read_text())
    names = {
        "torchao, stochastic rounding": "torchao, stochastic",
        "bitsandbytes, 8-bit": "bitsandbytes, 8-bit",
        "halfstep by default": "default",
        '`param_storage="feedback"`': "feedback",
        '`recipe="one_pass"`, not for language models': "one_pass",
        **{f'`recipe="{name}"`': name for name in ("near_float32", "full_precision", "four_bit")},
    }
    for setting, (*_, array, model) in readme_rows.items():
        name = names.get(setting, setting)
        for place, text in (("one array", array), ("GPT-2 small", model)):
            if text:
                assert float(text) == round(record[place]["ms"][name], 2)
    assert len(readme_rows) == 11

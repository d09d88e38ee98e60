"""What is said beside other libraries is what `make peers` measured last, and ours is still so."""

import pathlib
import re
import sys

import pytest

ROOT = pathlib.Path(__file__).parents[1]
MODULES = (
    *("comparison", "digits", "experiments", "failures", "peers", "runs", "same_bits"),
    *("overview", "peers_memory", "report", "silent_failures", "small_network", "timing"),
)
STALE_TIMES = "Run `make peers-speed`, which measures anew and writes docs/comparison.md."
STALE = "Run `make peers`, which measures anew and writes README.md and docs/comparison.md."


@pytest.fixture
def benchmarks(monkeypatch):
    """The folder of the benchmarks is on the path; their modules are gone again afterwards."""
    monkeypatch.syspath_prepend(str(ROOT / "benchmarks"))
    yield
    for name in MODULES:
        sys.modules.pop(name, None)


@pytest.fixture
def record(benchmarks):
    import comparison

    return comparison.newest()


@pytest.fixture
def speed(benchmarks):
    import comparison

    return comparison.newest("peers_speed")


@pytest.fixture
def memory(benchmarks):
    import comparison

    return comparison.newest("peers_memory")


@pytest.fixture
def low_rates(benchmarks):
    import comparison

    return comparison.newest("fine_tuning")


def test_the_readme_and_the_pages_are_those_of_the_newest_records(benchmarks):
    import comparison

    for name, due in comparison.pages().items():
        assert (ROOT / name).read_text() == due, STALE
    assert len(comparison.LINES) <= 9


def test_the_model_keeps_the_bytes_that_are_counted(memory):
    """Of matrices; biases and norms, a thousandth of it, may be too short for codes: at most 8 bytes."""
    import peers_memory

    from halfstep.memory import bytes_per_weight

    short = sum(shape[0] for shape in peers_memory.shapes().values() if len(shape) == 1)
    share = short / memory["parameters"]
    assert share < 1e-3

    ours = [row for row in memory["rows"] if row["name"].startswith("halfstep")]
    assert ours
    for row in ours:
        recipe = row["name"].split(", ")[1].replace("default", "sixteen_bit")
        counted = bytes_per_weight(recipe)[2]
        # A count of steps beside each array is 8 bytes.
        assert counted <= row["state"] <= counted + share * (8 - counted) + 1e-5
    float32 = {row["name"]: row["state"] for row in memory["rows"] if row["name"].endswith("float32")}
    assert all(state == pytest.approx(8, rel=1e-3) for state in float32.values())


def test_the_summary_names_every_experiment_with_bounds(record):
    import comparison

    assert list(comparison.SHORT) == [row["key"] for row in record["rows"] if row["bounds"]]


def test_threads_are_of_failures_that_were_measured(record):
    import comparison

    listed = {line[0]: line[2] for line in comparison.found(record)}
    assert listed.keys() >= comparison.THREADS.keys()
    for name, threads in comparison.THREADS.items():
        assert {key for key in threads if comparison.SHORT[key] not in listed[name]} == set()
    bold = sum(
        line.count("**") // 2
        for line in comparison._summary(record, comparison._names(record)).splitlines()
        if "halfstep" not in line
    )
    assert sum(cells.count(", ") + 1 for cells in listed.values()) == bold


@pytest.mark.parametrize(
    ("figures", "name"),
    [
        ({"low": 0.9, "high": 9.0}, "high"),
        ({"low": 0.0, "high": 9.0}, "low"),
        ({"low": 1.0, "high": float("nan")}, "high"),
    ],
)
def test_the_farthest_figure_is_shown(benchmarks, figures, name):
    import comparison

    row = {"columns": {}, "bounds": {"low": [0.5, 1.1], "high": [0.9, 2.0]}}
    assert comparison.farthest(row, figures) == name


def test_what_the_pages_say_of_rollfast_is_so(record, speed):
    rows = [row for row in record["rows"] if row["bounds"]]
    import comparison

    name, ours = "rollfast adamw, bfloat16 state", "halfstep_torch, default"
    assert [row["key"] for row in rows if comparison.outside(row, row["figures"][name])] == ["compiled"]
    assert not [row["key"] for row in rows if comparison.outside(row, row["figures"][ours])]
    times = {(row["name"], row["layout"]): row["ns"] for row in speed["rows"] if "ns" in row}
    assert all(times[name, layout] > 5 * ns for (each, layout), ns in times.items() if each == ours)


def test_the_readme_hides_no_figure_outside_its_bounds(record):
    import comparison

    (row,) = (row for row in record["rows"] if row["key"] == "drop")
    for name in comparison.COLUMNS:
        figures = row["figures"][name]
        shown = comparison.farthest(row, figures, dict.fromkeys(row["bounds"], (1, 1)))
        assert bool(comparison.outside(row, figures)) == (shown in comparison.outside(row, figures))


def test_versions_of_the_record_are_those_that_are_installed_now(record):
    pins = dict(re.findall(r"^([\w-]+)==(\S+)$", (ROOT / "constraints.txt").read_text(), re.MULTILINE))
    for entry in record["entries"]:
        package, version = entry["package"].split()
        assert entry["ours"] or version.removesuffix("+cpu") == pins[package], STALE


def test_the_record_has_every_optimizer_and_every_row_of_today(record):
    import peers
    import silent_failures  # noqa: F401 (rows are registered)
    from experiments import ROWS

    names = [entry["name"] for entry in record["entries"]]
    today = [entry.name for entry in peers.entries() if entry.name not in record["not run"]]
    assert names == today, STALE
    assert [{**row.description, "figures": 0} for row in ROWS] == [
        {**row, "figures": 0, "bounds": {name: tuple(limits) for name, limits in row["bounds"].items()}}
        for row in record["rows"]
    ], STALE


def test_the_times_are_those_of_the_versions_and_optimizers_above(record, speed):
    import peers

    versions = {entry.name: entry.distribution for entry in peers.entries() if not entry.ours}
    for entry in record["entries"]:
        if entry["name"] in versions:
            package, version = entry["package"].split()
            assert speed["machine"]["versions"][package] == version, STALE_TIMES
    timed = {row["name"] for row in speed["rows"]} - {"copy of 14 bytes"}
    assert timed == {entry.name for entry in peers.entries() if entry.timed}, STALE_TIMES


def test_ours_are_right_or_the_row_says_what_falls_short(record):
    import silent_failures

    assert all(silent_failures.claims(record).values()), STALE


def test_a_figure_of_ours_outside_its_bounds_is_told(record):
    import silent_failures

    row = next(row for row in record["rows"] if row["key"] == "small")
    row["figures"]["halfstep_torch, default"]["1e-06"] = 0.9
    assert [
        row["title"] in sentence for sentence, holds in silent_failures.claims(record).items() if not holds
    ] == [True]


@pytest.mark.parametrize(("value", "text"), [(1.0, "1.00"), (1.5, "**1.50**"), (float("nan"), "**nan**")])
def test_a_figure_outside_its_bounds_is_bold(benchmarks, value, text):
    import comparison

    row = {"columns": {"share": ".2f"}, "bounds": {"share": [0.9, 1.1]}}
    assert comparison.cell(row, {"share": value}, "share") == text
    assert comparison.cell(row, {"failed": "TypeError"}, "share") == "failed"
    assert comparison.cell(row, None, "share") == "-"


# In torch the recipes of 4 and 8 bits compile for a minute each.
@pytest.mark.parametrize(
    "framework",
    [
        pytest.param("JAX", marks=pytest.mark.slow),
        pytest.param("torch", marks=[pytest.mark.slow, pytest.mark.exhaustive]),
    ],
)
def test_our_figures_are_still_those_of_the_record(framework, record):
    """Bits are a function of the seed, and so are the figures: a change of bits makes the record stale."""
    import peers
    import silent_failures  # noqa: F401 (rows are registered)
    from experiments import ROWS

    rows = {row.key: row for row in ROWS}
    kept = {row["key"]: row["figures"] for row in record["rows"]}
    for entry in peers.entries():
        if entry.ours and entry.framework == framework:
            # Of the default in JAX, whose steps are fast, all that follows a run.
            keys = (
                "idle",
                "state",
                *(("small", "drop", "sizes", "spike") if entry.framework == "JAX" else ()),
            )
            for key in keys:
                assert rows[key].measure(entry) == pytest.approx(kept[key][entry.name], rel=1e-6), STALE


@pytest.mark.slow
def test_torch_and_optax_are_measured_as_in_the_record(record):
    """Neither draws anything: the figures of a library follow from its version."""
    import peers
    import silent_failures  # noqa: F401 (rows are registered)
    from experiments import ROWS

    rows = {row.key: row for row in ROWS}
    measured = {
        **dict.fromkeys(("torch AdamW(fused)", "optax.adamw"), ("decay", "drop", "nan", "resume")),
        "optax.inject_hyperparams(adamw)": ("decay",),
    }
    for entry in peers.entries():
        for key in measured.get(entry.name, ()):
            kept = next(row for row in record["rows"] if row["key"] == key)["figures"][entry.name]
            assert rows[key].measure(entry) == pytest.approx(kept, rel=1e-3, nan_ok=True), STALE


def test_the_overview_draws_every_point_and_says_which_tie(record):
    import overview

    points = overview.points(record)
    assert list(overview.LABELS) == [name for name in overview.LABELS if name in points]
    assert set(points) == set(overview.LABELS)
    size, distance = points["halfstep_torch, default"]
    near = [name for name, (x, y) in points.items() if abs(x - size) < 0.1 and abs(y - distance) < 0.01]
    assert sorted(near) == sorted(["halfstep_torch, default", *overview.TIES])


def test_the_pictures_are_drawn_from_the_newest_records(benchmarks):
    matplotlib = pytest.importorskip("matplotlib")
    import comparison
    import overview

    pin = f"matplotlib=={matplotlib.__version__}\n"
    if pin not in (ROOT / "constraints.txt").read_text():
        pytest.skip("Another matplotlib writes another file.")
    for name, (record, look, draw) in overview.PICTURES.items():
        drawn = (ROOT / "docs" / "images" / name).read_text()
        due = overview.picture(comparison.newest(record), look, draw)
        assert drawn == due, "Run `python benchmarks/overview.py`."

"""The benchmarks run, cut to a row or two: what they import and call still exists."""

import dataclasses
import json
import sys
from pathlib import Path

import pytest

BENCHMARKS = str(Path(__file__).parents[1] / "benchmarks")
MODULES = (
    *("report", "quality", "gradients", "second_moment", "store_state", "lamb", "epochs"),
    *("transformer", "compile_time", "gpu", "bridge", "distributed", "long_run"),
    *("rules", "muon", "muon_peers", "low_weights", "host_time", "fine_tuning", "monitor_cost"),
    "unknown_rates",
)
EXAMPLES = ("recipe", "text", "train_flax", "train_torch")
pytestmark = pytest.mark.slow


@pytest.fixture
def run(monkeypatch, tmp_path):
    """Return a function that runs a benchmark's `main` and returns the figures that it writes."""
    monkeypatch.syspath_prepend(BENCHMARKS)
    # examples/ has a `report` too.
    for name in MODULES + EXAMPLES:
        monkeypatch.delitem(sys.modules, name, raising=False)

    def run(module, *arguments):
        record = tmp_path / "record.json"
        monkeypatch.setattr(sys, "argv", [module.__name__, "--json", str(record), *arguments])
        status = module.main()
        return status, json.loads(record.read_text())

    yield run
    for name in MODULES + EXAMPLES:
        sys.modules.pop(name, None)


@pytest.mark.exhaustive
def test_quality_prints_paths_and_movements(run, monkeypatch, capsys):
    import gradients
    import quality

    monkeypatch.setattr(quality, "ROWS", [quality.ROWS[0], quality.ROWS[4]])
    monkeypatch.setattr(gradients, "ROWS", [gradients.ROWS[1], gradients.ROWS[-1]])
    monkeypatch.setattr(gradients, "STEPS", 4)
    monkeypatch.setattr(gradients, "STOP", 2)
    monkeypatch.setattr(
        quality, "claims", lambda results: {"the first row is the reference": results[0]["dist"] == 0}
    )
    monkeypatch.setattr(gradients, "claims", lambda results: {"this fails": False})
    status, figures = run(quality, "--steps", "3")
    assert status == 1
    assert [row["name"] for row in figures["digits"]] == [row.name for row in quality.ROWS]
    assert [row["name"] for row in figures["gradients"]] == [row.name for row in gradients.ROWS]
    assert abs(figures["gradients"][0]["steady"] - 1) < 0.1
    assert "holds: the first row is the reference\nFAILS: this fails" in capsys.readouterr().out


def test_second_moments_are_kept(run, monkeypatch):
    import second_moment

    formats = {name: second_moment.FORMATS[name] for name in ("bfloat16", "scaled ufloat8_e5m3")}
    monkeypatch.setattr(second_moment, "FORMATS", formats)
    monkeypatch.setattr(second_moment, "STEPS", 4)
    monkeypatch.setattr(second_moment, "SIGMAS", (0.5,))
    monkeypatch.setattr(second_moment, "claims", lambda rows: {"a row for each": len(rows) == len(formats)})
    status, rows = run(second_moment)
    assert status == 0
    assert all(0.9 < row["mean"] < 1.1 for row in rows)


def test_where_a_second_moment_misses_the_aim_is_said(monkeypatch):
    monkeypatch.syspath_prepend(BENCHMARKS)
    import second_moment

    row = {"sigma": 2.0, "format": "scaled ufloat8_e5m3", "median": 1.0, "low": 0.55, "high": 2.005}
    assert second_moment.misses([row]) == ["scaled ufloat8_e5m3, sigma 2.0: 95 % at 2.005"]
    assert second_moment.misses([row | {"high": 1.96}, row | {"format": "scaled int8"}]) == []


@pytest.mark.exhaustive
def test_a_transformer_is_trained(run, monkeypatch):
    import transformer

    monkeypatch.setattr(transformer, "ROWS", [transformer.ROWS[0], transformer.ROWS[1], transformer.ROWS[5]])
    monkeypatch.setattr(transformer, "SEEDS", 1)
    monkeypatch.setattr(transformer, "claims", lambda results: {"rows differ": results[1]["dist"] > 0.1})
    status, (truth, _, one_pass) = run(transformer, "--steps", "3")
    assert status == 0
    assert truth["dist"] == 0
    assert 0 < one_pass["dist"] < 0.1
    assert one_pass["state"] < 2.1


@pytest.mark.exhaustive
def test_rules_other_than_adam_are_trained(run, monkeypatch):
    import rules

    of_lion = [row for row in rules.ROWS if row.rule == "scale_by_lion"]
    averaged = next(row for row in rules.ROWS if row.rule == rules.FREE)
    monkeypatch.setattr(rules, "ROWS", [of_lion[0], of_lion[1], of_lion[-1], averaged])
    _, (truth, other, coarse, own) = run(rules, "--steps", "3")
    assert truth["dist"] == own["dist"] == 0 < coarse["dist"] < other["dist"]
    assert coarse["bytes"] < 4.6 < truth["bytes"]
    monkeypatch.setattr(rules, "ROWS", [of_lion[0], of_lion[1], of_lion[-1]])
    monkeypatch.setattr(rules.transformer, "SEEDS", 1)
    _, (truth, other, coarse) = run(rules, "--transformer", "3")
    assert truth["dist"] == 0 < coarse["dist"] < other["dist"]
    assert coarse["state"] < 0.6 < truth["state"]


@pytest.mark.exhaustive
def test_a_pretrained_model_is_fine_tuned_and_goes_on_where_it_ended(run, monkeypatch, tmp_path):
    import fine_tuning

    monkeypatch.setattr(fine_tuning, "CACHE", tmp_path / "cache")
    monkeypatch.setattr(fine_tuning, "BEFORE", dataclasses.replace(fine_tuning.BEFORE, steps=2))
    for name, value in {"SEEDS": 1, "STEPS": 3, "WARM_UP": 1, "RATES": ("1e-5",)}.items():
        monkeypatch.setattr(fine_tuning, name, value)
    _, first = run(fine_tuning, "--only", "nearest", "torch AdamW")
    _, figures = run(fine_tuning, "--only", "the default", "under a scaler")
    assert figures["runs"][: len(first["runs"])] == first["runs"]
    assert len({row["name"] for row in figures["runs"]}) == len(figures["runs"])
    of = {row["name"]: row for row in figures["rows"]}
    assert of[fine_tuning.FLOAT32]["dist"] == 0
    assert of[fine_tuning.NEAREST]["proj"] < 0.2
    assert abs(of[fine_tuning.STOCHASTIC]["proj"] - 1) < 0.2
    assert of["float16 under a scaler, stochastic"]["dist"] < of[fine_tuning.STOCHASTIC]["dist"]


@pytest.mark.exhaustive
def test_muon_is_trained_and_held_against_other_libraries(run, monkeypatch):
    import muon
    import muon_peers

    monkeypatch.setattr(muon, "ROWS", muon.ROWS[:4])
    monkeypatch.setattr(muon, "claims", lambda digits, *_: {"int8 differs": digits[2]["dist"] > 0})
    for name, value in {"RUNS": 1, "SIZE": 32, "SMALL_STEPS": 4}.items():
        monkeypatch.setattr(muon_peers, name, value)
    status, figures = run(muon, "--steps", "2")
    assert status == 0
    assert figures["small updates"][muon_peers.TORCH] == 0
    assert abs(figures["small updates"][muon_peers.OURS] - 1) < 0.1
    assert [row["name"] for row in figures["libraries"]][:2] == [muon_peers.OURS, muon_peers.TORCH]


@pytest.mark.exhaustive
def test_weights_of_8_bits_are_trained_without_a_copy(run, monkeypatch):
    import low_weights

    names = (low_weights.REFERENCE, "int8, stochastic", "int8, fed back into relative int8")
    monkeypatch.setattr(low_weights, "ROWS", [row for row in low_weights.ROWS if row.name in names])
    monkeypatch.setattr(low_weights.transformer, "SEEDS", 1)
    monkeypatch.setattr(low_weights, "TRANSFORMER_STEPS", 3)
    monkeypatch.setattr(
        low_weights,
        "claims",
        lambda digits, transformed: {"seven and two": (len(digits), len(transformed)) == (7, 2)},
    )
    status, figures = run(low_weights, "--steps", "3")
    assert status == 0
    # Steps are a third of the gap of a row: rounded at random they go astray.
    assert figures["digits"][0]["dist"] == 0
    assert all(row["dist"] > 0.5 for row in figures["digits"] if row["name"] != low_weights.REFERENCE)


@pytest.mark.exhaustive
def test_transforms_of_optax_are_trained(run, monkeypatch):
    import store_state

    monkeypatch.setattr(store_state.run_all, "__defaults__", (store_state.ROWS[:1],))
    status, (row,) = run(store_state, "--steps", "3")
    assert status == 0
    assert row["fp8"]["bytes"] < 2.2 < row["bfloat16"]["bytes"]


def test_lamb_is_trained_its_momentum_measured_and_its_lasting(run, monkeypatch):
    import epochs
    import lamb

    monkeypatch.setattr(lamb, "ROWS", lamb.ROWS[:1])
    monkeypatch.setattr(lamb, "LAYERS", (4000,))
    monkeypatch.setattr(
        lamb, "claims", lambda training, layers: {"all": len(layers) == len(lamb.FORMATS) + 1}
    )
    monkeypatch.setattr(epochs, "ROWS", epochs.ROWS[:1])
    monkeypatch.setattr(epochs, "RATES", (0.01,))
    monkeypatch.setattr(epochs, "EPOCHS", (2,))
    monkeypatch.setattr(epochs, "claims", lambda results: {"it learns": results[0]["after 2"] > 0.2})
    status, figures = run(lamb, "--steps", "3")
    assert status == 0
    assert figures["layers"][0]["length"] == pytest.approx(1, abs=0.01)
    assert figures["epochs"][0]["growth"] > 1


def test_time_to_compile_is_measured(run):
    import compile_time

    _, record = run(compile_time, "--leaves", "2", "--shapes", "1", "--steps", "optax.adamw", "adamw")
    assert record["shapes"] == 1
    ours, theirs = (row for name in ("adamw", "optax.adamw") for row in record["rows"] if row["step"] == name)
    assert ours["leaves"] == theirs["leaves"] == 2
    assert ours["equations per leaf"] > theirs["equations per leaf"] > 0
    assert ours["total"] >= ours["compile"] > 0


def test_steps_through_the_bridge_are_timed(run, monkeypatch):
    import bridge

    monkeypatch.setattr(bridge, "in_quiet_process", lambda: 1)
    # The other is compiled, for seconds.
    monkeypatch.delitem(bridge.NATIVE, "halfstep_torch.AdamW")
    monkeypatch.setattr(bridge, "LAYOUTS", {"2 x 16": (2, (4, 4), ("optax.adamw",))})
    status, record = run(bridge, "--rounds", "2")
    assert status == 0
    names = [row["name"] for row in record["rows"]]
    assert names[1:] == ["optax.adamw, in JAX", "optax.adamw, OptaxOptimizer"]
    assert all(row["ms"] >= row["min"] > 0 for row in record["rows"])


def test_steps_of_shards_are_timed_and_what_they_send_is_counted(run, monkeypatch):
    import distributed

    monkeypatch.setattr(distributed, "PROCESSES", (2,))
    monkeypatch.setattr(distributed, "SHAPE", (32, 400))
    status, record = run(distributed, "--steps", "2")
    assert status == 0
    sent = {(row["cut"], row["optimizer"]): row["collectives"] for row in record["rows"]}
    assert sent["columns", "halfstep, 8 bits"] > 0  # whole arrays are gathered
    assert sent["rows", "halfstep, 8 bits"] == sent["columns", "halfstep"] == 0


def test_what_monitor_costs_is_measured_in_both_frameworks(run, monkeypatch):
    import monitor_cost

    monkeypatch.setattr(monitor_cost, "WIDTH", 32)
    _, record = run(monitor_cost, "--steps", "2", "--layers", "1")
    assert [row["name"] for row in record["rows"]] == ["PyTorch", "JAX"]
    assert all(row["step_ms"] > 0 and row["read_ms"] > 0 for row in record["rows"])


def test_what_a_gpu_will_be_asked_holds_on_a_cpu_and_is_not_asked_again(monkeypatch, tmp_path, capsys):
    monkeypatch.syspath_prepend(BENCHMARKS)
    import gpu

    record = tmp_path / "record.json"
    arguments = ["--device", "cpu", "--small", "--json", str(record)]
    assert gpu.main([*arguments, "--minutes", "0"]) == 0
    assert not record.exists()
    assert "the next run begins with: copy" in capsys.readouterr().out
    assert gpu.main(arguments) == 0
    found = json.loads(record.read_text())
    assert found["machines"][0]["apex"] == "absent"
    ours = [row for key, row in found["rows"].items() if "JAX: " in key or "torch: " in key]
    assert len(ours) == 3
    assert all(row["ns"] > 0 and round(row["bytes"], 1) == 14 and row["recompiled"] == 0 for row in ours)
    bits = [row for key, row in found["rows"].items() if key.startswith("bits")]
    assert [row["wrong"] for row in bits] == [[]] * 5
    assert " passed" in bits[-1]["said"]
    assert found["rows"]["gradients released"]["differ"] == 0
    monkeypatch.setattr(gpu, "taken", None)
    assert gpu.main(arguments) == 0


def test_a_bit_that_differs_on_a_device_and_a_peer_that_is_absent_are_told(monkeypatch, capsys):
    monkeypatch.syspath_prepend(BENCHMARKS)
    import gpu

    def absent():
        raise ImportError("No module named 'apex'")

    rows = {"bits, a": lambda: {"cases": 2, "wrong": ["x: 3 differ"]}, "time: apex": absent}
    monkeypatch.setattr(gpu, "time_rows", lambda *arguments: iter(()))
    monkeypatch.setattr(gpu, "bit_rows", lambda *arguments: iter(rows.items()))
    assert gpu.main(["--device", "cpu", "--small"]) == 1
    said = capsys.readouterr().out
    assert "time: apex: absent (No module named 'apex')" in said
    assert "bits, a: 2, 1 wrong x: 3 differ" in said
    assert "a bit differs: bits, a" in said


def test_the_long_run_takes_every_format_and_does_not_run_a_row_again(run, monkeypatch):
    import long_run

    import halfstep_jax

    for options in long_run.settings().values():
        halfstep_jax.scale_by_adam(long_run.B1, long_run.B2, **options)
    name = "weights, feedback"
    _, rows = run(long_run, "--steps", "40", "--only", "mu bfloat16", name)
    assert [row["name"] for row in rows] == ["mu bfloat16", name]
    assert 0 < rows[0]["spread"] < 0.01 < rows[1]["spread"] < 1
    monkeypatch.setattr(long_run, "train", None)
    monkeypatch.setattr(long_run, "weights", None)
    assert run(long_run, "--steps", "40", "--only", "mu bfloat16", name)[1] == rows


def test_host_time_counts_calls_of_ours_and_of_peers(run):
    import host_time

    status, figures = run(host_time, "--only", "1 of 64", "--rounds", "2")
    assert status == 0
    rows = {row["row"]: row for row in figures["rows"]}
    assert rows.keys() == host_time.ROWS.keys()
    assert 0 < rows["compiled"]["of the house"] < rows["compiled"]["calls"]
    assert rows["torch fused"]["of the house"] == 0 < rows["torch fused"]["calls"]


def test_errors_fed_back_at_unknown_rates_end_no_farther_than_stochastic_ones(run):
    """20 kinds of gradients under 6 schedules that rise: with 256 weights of each a ratio is known to 6 %."""
    import unknown_rates

    rows = unknown_rates.cells("adamw", 1e-3, size=256, known=False)
    largest = {row["schedule"]: float(unknown_rates.ratios(row).max()) for row in rows}
    assert len(largest) == 6
    assert max(largest.values()) < 1

"""The benchmarks run, cut to a row or two: what they import and call still exists."""

import dataclasses
import json
import sys
from pathlib import Path

import numpy as np
import pytest

BENCHMARKS = str(Path(__file__).parents[1] / "benchmarks")
MODULES = (
    *(
        "report",
        "training",
        "settings",
        "rule_settings",
        "eco",
        "quality",
        "muon_peers",
        "second_moment",
        "lamb",
    ),
    *("cost", "gpu", "speed", "timing", "distributed", "long_run"),
    *("fine_tuning", "language_model", "unknown_rates"),
)
EXAMPLES = ("recipe", "text", "train_flax", "train_torch")
pytestmark = pytest.mark.slow


@pytest.fixture(autouse=True)
def modules_of_benchmarks(monkeypatch):
    """Import modules from benchmarks/: examples/ has a `report` too."""
    monkeypatch.syspath_prepend(BENCHMARKS)
    for name in MODULES + EXAMPLES:
        monkeypatch.delitem(sys.modules, name, raising=False)


@pytest.fixture
def run(monkeypatch, tmp_path):
    """Return a function that runs a benchmark's `main` and returns the figures that it writes."""

    def run(module, *arguments, subject=None):
        record = tmp_path / "record.json"
        first = [module.__name__] if subject is None else [module.__name__, subject]
        monkeypatch.setattr(sys, "argv", [*first, "--json", str(record), *arguments])
        status = module.main()
        return status, json.loads(record.read_text())

    yield run
    for name in MODULES + EXAMPLES:
        sys.modules.pop(name, None)


def test_claims_are_held_against_the_rows_that_are_there(monkeypatch):
    import training

    rows = [{"name": "a", "dist": 0.2, "proj": 0.9}, {"name": "b", "dist": 0.3, "proj": 1.05}]
    claims = [("dist", "a", (0.5, "b")), ("dist", "a", "b"), ("bias", 0.06, "b"), ("dist", "a", "c")]
    assert training.check(claims, rows, ["name"]) == {
        "dist: a < 0.5 of b": False,
        "dist: a < b": True,
        "bias: 0.06 < b": False,
    }


def test_claims_of_each_subject_are_about_settings_that_it_has(monkeypatch):
    import quality
    from training import Task, Transformer

    for make, claims in quality.SUBJECTS.values():
        names = {x.name for task in (Task(), Transformer()) for x in make(task)}
        for claim in claims:
            sides = (side[1] if isinstance(side, tuple) else side for side in claim[1:])
            assert {side for side in sides if isinstance(side, str)} <= names


@pytest.mark.exhaustive
@pytest.mark.parametrize(
    ("subject", "only"),
    [
        ("adam", "float32; bf16"),
        ("fed_back", "sgd 0.1"),
        ("rules", "bf16 stochastic"),
        ("muon", "products in bfloat16"),
        ("low_weights", "into relative int8"),
    ],
)
def test_the_settings_of_each_subject_are_trained_on_digits(run, subject, only):
    import quality

    _, figures = run(quality, "--steps", "3", "--only", only, subject=subject)
    rows = figures["digits"]
    assert any(only in " ".join(str(x) for x in row.values()) for row in rows)
    assert all(np.isfinite(row["dist"]) for row in rows)
    assert any(row["dist"] > 0 for row in rows)


@pytest.mark.exhaustive
@pytest.mark.parametrize("subject", ["adam", "fed_back", "rules", "muon", "low_weights"])
def test_the_settings_of_each_subject_are_trained_on_the_transformer(run, subject):
    import quality

    only = {"adam": "one_pass", "rules": "scale_by_lion e4m3fn", "low_weights": "int8, fed back"}
    only |= {"muon": "int8, 32", "fed_back": "adamw 1e-3 default"}
    steps = "21" if subject == "fed_back" else "3"  # longer than its warm-up
    arguments = ("--task", "transformer", "--steps", steps, "--seeds", "1")
    _, figures = run(quality, *arguments, "--only", only[subject], subject=subject)
    rows = figures["transformer"]
    assert all(np.isfinite(row["dist"]) for row in rows)
    assert any(row["dist"] > 0 for row in rows)


def test_a_record_keeps_the_rows_of_the_other_task(run, tmp_path):
    import quality

    (tmp_path / "record.json").write_text('{"transformer": [1]}')
    _, figures = run(quality, "--steps", "2", "--seeds", "1", "--only", "nothing", subject="adam")
    assert figures["transformer"] == [1]
    assert [row["dist"] for row in figures["digits"]] == [0]


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
    import second_moment

    row = {"sigma": 2.0, "format": "scaled ufloat8_e5m3", "median": 1.0, "low": 0.55, "high": 2.005}
    assert second_moment.misses([row]) == ["scaled ufloat8_e5m3, sigma 2.0: 95 % at 2.005"]
    assert second_moment.misses([row | {"high": 1.96}, row | {"format": "scaled int8"}]) == []


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


def test_movements_of_a_language_model_are_projected_by_kind_of_parameter(monkeypatch):
    import language_model
    import torch

    kinds = ("embed_tokens", "layers.0.q_proj", "layers.0.input_layernorm")
    start = {f"model.{kind}.weight": torch.zeros(4) for kind in kinds}
    right = {name: torch.full((4,), float(i + 1)) for i, name in enumerate(start)}
    half = {name: w / 2 if "embed" in name else w for name, w in right.items()}
    figures = language_model.compare(start, half, right)
    assert figures["projection, embedding"] == 0.5
    assert figures["projection, matrices"] == figures["projection, norms"] == 1
    assert figures["projection"] == (0.5 + 4 + 9) / 14
    assert figures["distance"] == pytest.approx((0.25 / 14) ** 0.5)
    assert language_model.compare(start, start, right)["unchanged"] == 1
    rows = [
        {"name": language_model.FLOAT32, "losses": [2.0], "projection": 1},
        {"name": language_model.NEAREST, "losses": [2.95], "projection": 0.02},
        {"name": language_model.DEFAULT, "losses": [2.1], "projection": 1},
    ]
    assert list(language_model.claims(3.0, rows).values()) == [True, False]


@pytest.mark.exhaustive
def test_muon_is_held_against_other_libraries(run, monkeypatch):
    import muon_peers

    for name, value in {"RUNS": 1, "SIZE": 32, "SMALL_STEPS": 4, "SEEDS": 1}.items():
        monkeypatch.setattr(muon_peers, name, value)
    _, figures = run(muon_peers, "--steps", "2")
    assert figures["small updates"][muon_peers.TORCH] == 0
    assert abs(figures["small updates"][muon_peers.OURS] - 1) < 0.1
    assert [row["name"] for row in figures["libraries"]][:2] == [muon_peers.OURS, muon_peers.TORCH]


def test_lamb_is_trained_its_momentum_measured_and_its_lasting(run, monkeypatch):
    import lamb

    monkeypatch.setattr(lamb, "MAKE", {lamb.LAMB16: lamb.MAKE[lamb.LAMB16]})
    monkeypatch.setattr(lamb, "LAYERS", (4000,))
    monkeypatch.setattr(lamb, "LASTING", {name: lamb.LASTING[name] for name in list(lamb.LASTING)[:1]})
    monkeypatch.setattr(lamb, "RATES", (0.01,))
    monkeypatch.setattr(lamb, "EPOCHS", (2,))
    held = {"all": len(lamb.FORMATS) + 1}
    monkeypatch.setattr(lamb, "claims", lambda trained, layers, lasted: {"all": len(layers) == held["all"]})
    status, figures = run(lamb, "--steps", "3")
    assert status == 0
    assert figures["layers"][0]["length"] == pytest.approx(1, abs=0.01)
    assert figures["epochs"][0]["growth"] > 1
    assert figures["epochs"][0]["after 2"] > 0.2


def test_time_to_compile_is_measured(run, monkeypatch):
    import cost

    monkeypatch.setattr(cost, "LEAVES", (2,))
    _, record = run(cost, "--rounds", "1", "--only", "optax.adamw", "adamw, split16", subject="compile")
    theirs, ours = record["rows"]
    assert (ours["step"], theirs["step"]) == ("adamw, split16", "optax.adamw")
    assert ours["equations per leaf"] > theirs["equations per leaf"] > 0
    assert ours["total"] >= ours["compile"] > 0


def test_steps_are_timed_beside_a_copy_and_through_the_bridge(monkeypatch):
    import speed

    # The other is compiled, for seconds.
    monkeypatch.delitem(speed.NATIVE, "halfstep_torch.AdamW")
    monkeypatch.setitem(speed.LAYOUTS["bridge"], "1 x 2M", [(4, 4)])
    rows = speed.timed("bridge", "1 x 2M", 2, 1)
    assert {"optax.adamw, in JAX", "optax.adamw, OptaxOptimizer"} <= {row["name"] for row in rows}
    assert all(row["ms"] >= row["min"] > 0 for row in rows)
    monkeypatch.setattr(speed, "_ours_in_torch", lambda **_: speed._torch_adamw())
    monkeypatch.setitem(speed.LAYOUTS["step"], "300 x 64 to 4k", [(64,), (96,)])
    copy, *others = speed.timed("step", "300 x 64 to 4k", 2, 1)
    assert copy["x"] == 1
    assert [row["x"] for row in others] == [row["ns"] / copy["ns"] for row in others]


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
    import cost

    monkeypatch.setattr(cost, "WIDTH", 32)
    monkeypatch.setattr(cost, "LAYERS", 1)
    _, record = run(cost, "--rounds", "2", subject="monitor")
    assert [row["name"] for row in record["rows"]] == ["PyTorch", "JAX"]
    assert all(row["step_ms"] > 0 and row["read_ms"] > 0 for row in record["rows"])


def test_what_a_gpu_will_be_asked_holds_on_a_cpu_and_is_not_asked_again(monkeypatch, tmp_path, capsys):
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
    import cost

    status, figures = run(cost, "--only", "1 of 64", "--rounds", "2", subject="host")
    assert status == 0
    rows = {row["row"]: row for row in figures["rows"]}
    assert rows.keys() == cost.ROWS.keys()
    assert 0 < rows["compiled"]["of the house"] < rows["compiled"]["calls"]
    assert rows["torch fused"]["of the house"] == 0 < rows["torch fused"]["calls"]


def test_errors_fed_back_at_unknown_rates_end_no_farther_than_stochastic_ones(run):
    """20 kinds of gradients under 6 schedules that rise: with 256 weights of each a ratio is known to 6 %."""
    import unknown_rates

    rows = unknown_rates.cells("adamw", 1e-3, size=256, known=False)
    largest = {row["schedule"]: float(unknown_rates.ratios(row).max()) for row in rows}
    assert len(largest) == 6
    assert max(largest.values()) < 1

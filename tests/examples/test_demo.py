"""The demo on a model of a few thousand parameters: both frameworks, all rows, a handful of steps."""

import contextlib
import importlib
import io
import json
import math
from dataclasses import dataclass
from pathlib import Path

import pytest

demo = importlib.import_module("demo")
recipe = importlib.import_module("recipe")
report = importlib.import_module("report")

TINY = recipe.Recipe(layers=1, heads=2, width=16, context=8, batch=4, validation_windows=16, evaluations=2)
STEPS = 4

pytestmark = pytest.mark.slow  # compiling the three Flax training steps alone takes over 5 s


@dataclass
class Ran:
    """One tiny run of the whole demo."""

    status: int
    printed: str
    complaints: str
    folder: Path

    @property
    def outcomes(self):
        return [recipe.Outcome(**run) for run in json.loads((self.folder / "demo.json").read_text())["runs"]]


@pytest.fixture(scope="module")
def ran(tmp_path_factory):
    folder = tmp_path_factory.mktemp("demo")
    printed, complaints = io.StringIO(), io.StringIO()
    with contextlib.redirect_stdout(printed), contextlib.redirect_stderr(complaints):
        status = demo.main(["--steps", str(STEPS), "--out", str(folder)], recipe=TINY)
    return Ran(status, printed.getvalue(), complaints.getvalue(), folder)


def test_every_row_of_both_frameworks_is_in_the_table(ran):
    lines = [line for line in ran.printed.splitlines() if line.startswith("|")]
    cells = [[cell.strip() for cell in line.strip("|").split("|")] for line in lines]
    assert len({len(row) for row in cells}) == 1
    expected = [[framework, row.name] for framework in ("Flax", "PyTorch") for row in recipe.ROWS]
    assert [row[:2] for row in cells[2:]] == expected


def test_the_bar_counts_every_step_of_every_run(ran):
    total = 2 * len(recipe.ROWS) * STEPS
    assert "100%|" in ran.complaints
    assert f"{total}/{total}" in ran.complaints


def test_all_runs_saw_the_same_batches(ran):
    assert len({outcome.batches_crc32 for outcome in ran.outcomes}) == 1
    assert "same batches" not in ran.complaints


def test_all_runs_start_from_the_same_loss(ran):
    # The same float32 weights and characters: only the order of sums differs. With n terms per sum and about
    # 30 operations from a character to its loss, a logit is off by at most 30 n 2^-24 of its size; n <= 64 in
    # this model and logits are of order 4, so 5e-4 would be a safe bound on any one of them. Rounding errors
    # of random sign over 128 characters average to under a hundredth of that.
    losses = [outcome.losses[0] for outcome in ran.outcomes]
    assert max(losses) - min(losses) < 5e-6
    assert math.isclose(losses[0], math.log(103), abs_tol=1.5)  # a model that knows nothing yet


def test_float32_training_is_the_same_in_both_frameworks(ran):
    # At first, Adam turns a gradient into its sign. So a weight whose gradient is rounding noise (about 1e-8)
    # may step the other way in the other framework. That moves the loss by 2 lr |gradient|, 1e-11 for one
    # weight and 1e-7 for all of them over all steps; the rest is the bound of the test above, four times.
    flax, torch = (run.losses[-1] for run in ran.outcomes if run.row == recipe.FLOAT32.name)
    assert abs(flax - torch) < 2e-5
    assert ran.outcomes[0].losses[0] - flax > 1e-3  # both did train


def test_bytes_are_counted_from_the_arrays(ran):
    for outcome in ran.outcomes:
        expected = 12 if outcome.row == recipe.FLOAT32.name else 6  # weight, mu and nu of 4 or 2 bytes
        counters = 10 * 8 / outcome.parameters  # at most: in each of 10 arrays, one or two counts of 4 bytes
        assert expected < outcome.bytes_per_parameter <= expected + counters


def test_float32_weights_all_move_and_nearest_ones_do_not(ran):
    moved = {(outcome.framework, outcome.row): 1 - outcome.never_moved for outcome in ran.outcomes}
    for framework in ("Flax", "PyTorch"):
        assert moved[framework, recipe.FLOAT32.name] == 1.0
        assert moved[framework, recipe.NEAREST.name] < moved[framework, recipe.STOCHASTIC.name] < 1.0


def test_four_steps_do_not_show_the_stall_and_the_demo_says_so(ran):
    assert ran.status == 1
    assert ran.complaints.count("to show the stall it must be over +0.1") == 2


def test_the_picture_and_the_table_can_be_made_again(ran, capsys):
    picture = ran.folder / "demo.png"
    assert picture.read_bytes().startswith(b"\x89PNG")
    picture.unlink()
    report.main([str(ran.folder / "demo.json")])
    assert picture.read_bytes().startswith(b"\x89PNG")
    assert capsys.readouterr().out.strip() in ran.printed


def test_steps_below_one_are_refused(capsys):
    with pytest.raises(SystemExit) as refused:
        demo.main(["--steps", "0"])
    assert refused.value.code == 2
    assert "--steps=0 trains nothing. Use an integer >= 1." in capsys.readouterr().err

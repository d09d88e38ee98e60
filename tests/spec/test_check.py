"""A third backend can check itself, and the check can fail."""

import pathlib
import shutil

import pytest

from halfstep_spec import check
from halfstep_spec.vectors import FOLDER

ADAPTERS = pathlib.Path(__file__).parents[2] / "examples" / "adapters"


def checked(capsys, *arguments):
    status = check.main([str(argument) for argument in arguments])
    out = capsys.readouterr().out
    rows = [line.strip("| ").split(" | ") for line in out.splitlines() if line.startswith("| ")]
    return status, {row[0]: [int(n) for n in row[1:4]] for row in rows[1:] if row[1].isdigit()}, out


def adapter(tmp_path, text):
    path = tmp_path / "adapter.py"
    path.write_text(text)
    return path


@pytest.mark.slow
def test_a_backend_in_plain_python_passes_what_it_offers(capsys):
    status, clauses, out = checked(capsys, ADAPTERS / "plain_python.py")
    assert status == 0
    assert all(failed == 0 for _, failed, _ in clauses.values()), out
    for clause in ("A2", "A3", "A5", "A9", "A10", "L1", "M2", "N3", "P2", "R2", "R3", "R6", "W3", "W4", "W8"):
        assert clauses[clause][0], clause


def test_a_backend_that_breaks_a_clause_is_told_which(tmp_path, capsys):
    """It adds a dot to names, and knows nothing else."""
    text = "from halfstep_spec import leaf_id as right\n"
    text += "def leaf_id(case):\n    return {'id': ('uint32', [right(case.arguments['leaf'] + '.')])}\n"
    status, clauses, out = checked(capsys, adapter(tmp_path, text), "--json", tmp_path / "record.json")
    assert status == 1
    assert clauses["W7"] == [0, 8, 0]
    assert all(row[:2] == [0, 0] for clause, row in clauses.items() if clause != "W7")
    assert "elements differ; the first at (0,)" in out
    assert (tmp_path / "record.json").read_text().count('"failed"') == 8


@pytest.mark.parametrize(
    ("body", "said"),
    [
        ("raise ZeroDivisionError('no')", "ZeroDivisionError: no"),
        ("return {}", "outputs are []"),
        ("return {'id': ('uint32', [[1]])}", "expected uint32(1,)"),
    ],
)
def test_what_a_backend_does_wrong_is_a_failure(body, said, tmp_path, capsys):
    status, clauses, out = checked(capsys, adapter(tmp_path, f"def leaf_id(case):\n    {body}\n"))
    assert (status, clauses["W7"][1]) == (1, 8)
    assert said in out


def test_the_vectors_may_be_an_archive(tmp_path, capsys):
    archive = shutil.make_archive(str(tmp_path / "vectors"), "zip", FOLDER)
    status, clauses, _ = checked(capsys, adapter(tmp_path, ""), "--vectors", archive)
    assert status == 0
    assert clauses["W7"] == [0, 0, 8]


def test_what_is_no_adapter_and_no_vectors_is_refused(tmp_path, capsys):
    assert check.main([str(tmp_path / "missing.py")]) == 2
    assert "missing.py is not a Python file" in capsys.readouterr().out
    assert check.main([str(adapter(tmp_path, "")), "--vectors", str(tmp_path)]) == 2
    assert "holds no manifest.json" in capsys.readouterr().out

"""`make mutants`: what it changes, and by what it is seen. The run itself takes an hour."""

import ast
import json
import os
import subprocess
import sys

import pytest

import line_map
import mutants

SOURCE = '''"""A text of 1 < 2."""


def sign(x: int = 3) -> int:
    if x < 0 and not x:
        raise ValueError(f"{x + 1} is below 0")
    say_once("seen")
    seen.append(x)
    seen[0] -= x
    return max(x,
               x - 1)
'''


def test_an_expression_becomes_another_and_texts_annotations_and_errors_stay():
    found = [(mutant.before, mutant.after) for mutant in mutants.mutants_of("a/b/c.py", SOURCE)]
    assert set(found) == {
        ("3", "4"),
        ("x < 0 and (not x)", "x < 0 or not x"),
        ("x < 0", "x <= 0"),
        ("0", "1"),
        ("not x", "x"),
        ("max(x, x - 1)", "min(x, x - 1)"),
        ("x - 1", "x + 1"),
        ("1", "2"),
        ("x < 0 and (not x)", "False"),
        ("x < 0 and (not x)", "True"),
        ("seen.append(x)", "pass"),
        ("seen[0] -= x", "pass"),
    }


def test_a_mutant_is_its_source_but_for_that_expression():
    for mutant in mutants.mutants_of("a/b/c.py", SOURCE):
        changed = mutant.applied(SOURCE)
        assert ast.dump(ast.parse(changed)) != ast.dump(ast.parse(SOURCE))
        assert changed.count("\n") >= SOURCE.count("\n") - 1
        assert changed.splitlines()[: mutant.line - 1] == SOURCE.splitlines()[: mutant.line - 1]


def test_a_seed_draws_the_same_and_another_seed_others(monkeypatch):
    monkeypatch.setattr(mutants, "PACKAGES", ("shared_spec/halfstep/rules",))
    drawn = mutants.drawn(20, 0)
    assert drawn == mutants.drawn(20, 0)
    assert drawn != mutants.drawn(20, 1)


def test_a_hundred_are_from_every_room_and_stay_when_other_files_change(monkeypatch):
    drawn = mutants.drawn(100, 0)
    assert len({(mutant.file, mutant.line) for mutant in drawn}) == 100
    assert len({mutant.name for mutant in drawn}) == 100
    assert {mutant.room for mutant in drawn} > {"halfstep", "halfstep_jax/xla", "halfstep_torch/sharded"}
    monkeypatch.setattr(mutants, "PACKAGES", ("pkg_torch/halfstep_torch/sharded",))
    assert mutants.drawn(3, 0) == [mutant for mutant in drawn if mutant.room == "halfstep_torch/sharded"][:3]


def test_a_test_that_fails_without_the_mutant_is_no_witness(monkeypatch, tmp_path):
    monkeypatch.setattr(mutants, "TREE", tmp_path)
    (tmp_path / "a").mkdir()
    file, ends = tmp_path / "a" / "b.py", iter([0, 1, 0, 1, 1])

    def run(tests, seconds):
        assert seconds == 9
        if len(tests) > 1:
            assert file.read_text() != SOURCE
            (tmp_path / "said.txt").write_text(f"FAILED {tests[-1]}::test_x - AssertionError\n")
        else:
            assert file.read_text() == SOURCE
        return next(ends)

    monkeypatch.setattr(mutants, "_run", run)
    file.write_text(SOURCE)
    mutant, runs = next(mutants.mutants_of("a/b.py", SOURCE)), mutants.Runs(9)
    assert runs.verdict(mutant, ["a"] * 21 + ["seen.py"]) == "died: seen.py::test_x"
    assert runs.verdict(mutant, ["a", "broken.py"]) == "unknown: broken.py::test_x fails without it"
    (tmp_path / "said.txt").unlink()
    monkeypatch.setattr(mutants, "_run", lambda *_: (tmp_path / "said.txt").write_text("no tests ran") and 5)
    with pytest.raises(RuntimeError, match="ended with 5, and no test failed"):
        runs.verdict(mutant, ["a"])


def test_what_a_failed_test_says_is_written_though_output_is_buffered(tmp_path):
    (tmp_path / "pytest.ini").write_text("[pytest]")
    (tmp_path / "test_a.py").write_text("def test_x():\n    assert False\n")
    program = f"import mutants, pathlib; mutants.TREE = pathlib.Path({str(tmp_path)!r}); " + (
        "print(mutants._run(['test_a.py'], 60))"
    )
    environment = {key: value for key, value in os.environ.items() if key != "PYTHONUNBUFFERED"}
    ended = subprocess.run(
        [sys.executable, "-c", program],
        env=environment | {"PYTHONPATH": str(mutants.ROOT / "tools")},
        capture_output=True,
        text=True,
        check=True,
    )
    assert ended.stdout == "1\n"
    assert "FAILED test_a.py::test_x" in (tmp_path / "said.txt").read_text()


# JAX's, where other tests have brought it.
@pytest.mark.filterwarnings("ignore:os.fork:RuntimeWarning")
def test_tests_that_take_too_long_do_not_count_as_failed(monkeypatch, tmp_path):
    monkeypatch.setattr(mutants, "TREE", tmp_path)
    monkeypatch.setattr(mutants, "_test", lambda _: [x for x in iter(int, 1)])
    file = tmp_path / "a.py"
    file.write_text(SOURCE)
    mutant = next(mutants.mutants_of("a.py", SOURCE))
    assert mutants.Runs(1).verdict(mutant, ["a"]) == "open: its tests took over 1 s"
    assert file.read_text() == SOURCE


def test_the_tests_of_a_line_are_those_that_run_it_the_quickest_first(tmp_path):
    seconds = {"slow": 49, "cheap": 1, "cases[0]": 2, "cases[1]": 2, "cases[2]": 2, "cases[3]": 2, "other": 0}
    lines = {
        "a.py:5": [name for name in seconds if name != "other"],
        "a.py:9": ["other"],
        "b.py:5": ["other"],
    }
    (tmp_path / "1.json").write_text(json.dumps({"seconds": seconds, "lines": {}}))
    (tmp_path / "2.json").write_text(json.dumps({"seconds": {"slow": 1}, "lines": lines}))
    tests_of = line_map.LineMap(tmp_path).tests_of
    order = ["cheap", "cases[0]", "cases[1]", "cases[2]", "slow", "cases[3]"]
    assert tests_of("a.py", range(4, 6), 100) == order
    assert tests_of("a.py", range(4, 6), 10) == [x for x in order if x != "slow"]
    assert tests_of("a.py", range(7, 8), 100) == ["other", *order]  # a line that no test has run by itself


TESTS = """import os, runpy
from on_torch.processes import _Group

def sign(rank):
    runpy.run_path({file!r})['sign'](rank)

def test_here():
    sign(1)

def test_elsewhere():
    _Group().run((sign,))
"""
GROUP = """import os

class _Group:
    def run(self, checks):
        if not os.fork():
            checks[0](1)
            os._exit(0)
        assert os.wait()[1] == 0
"""


@pytest.mark.slow
def test_a_run_notes_the_lines_that_its_tests_run_in_other_processes_too(monkeypatch, tmp_path):
    file, folder = f"{line_map.PACKAGES[0]}/signs.py", tmp_path / "map"
    tests = TESTS.format(file=str(tmp_path / file))
    for name, text in ((file, SOURCE), ("test_signs.py", tests), ("on_torch/processes.py", GROUP)):
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text(text)
    monkeypatch.setattr(line_map, "ROOT", tmp_path)
    (tmp_path / "tools").symlink_to(mutants.ROOT / "tools")
    line_map.note(folder)
    found = line_map.LineMap(folder)
    assert {*found.tests_of(file, range(7, 8), 9)} == {
        "test_signs.py::test_here",
        "test_signs.py::test_elsewhere",
    }
    assert 6 not in found.lines[file]
    monkeypatch.setattr(line_map.subprocess, "run", lambda *_, **__: None)
    with pytest.raises(RuntimeError, match=r"no test of .* runs a line of"):
        line_map.note(folder)

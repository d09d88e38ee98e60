"""Which quick tests run which lines of the packages: noted by one run of them, of which this is a plugin."""

import collections
import contextlib
import json
import os
import pathlib
import shutil
import subprocess
import sys
import threading
from collections.abc import Callable

import pytest

ROOT = pathlib.Path(__file__).parents[1]
PACKAGES = ("shared_spec/halfstep", "pkg_jax/halfstep_jax", "pkg_torch/halfstep_torch")
_FOLDER = "HALFSTEP_LINE_MAP"


def note(folder: pathlib.Path) -> None:
    """Run all quick tests once, and note in a folder what they run."""
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir(parents=True)
    paths = os.pathsep.join(str(ROOT / x) for x in ("tools", "shared_spec", "pkg_jax", "pkg_torch"))
    command = [sys.executable, "-m", "pytest", "-q", "-p", "line_map", f"--rootdir={ROOT}"]
    environment = os.environ | {"PYTHONPATH": paths, _FOLDER: str(folder)}
    subprocess.run(command, cwd=ROOT, env=environment, check=False)
    if not LineMap(folder).lines:
        raise RuntimeError(f"line_map: no test of {ROOT} runs a line of {', '.join(PACKAGES)}")


_SECONDS: dict[str, float] = collections.defaultdict(float)
_LINES: dict[str, set[str]] = collections.defaultdict(set)


@contextlib.contextmanager
def _noted(test: str):
    """Note the lines of the packages that a test runs, and its time."""
    folders = tuple(f"{pathlib.Path.cwd() / package}/" for package in PACKAGES)
    lines: set[tuple[str, int]] = set()

    def at_line(frame, event, argument):
        lines.add((frame.f_code.co_filename, frame.f_lineno))
        return at_line

    def at_call(frame, event, argument):
        return at_line if frame.f_code.co_filename.startswith(folders) else None

    start = sum(os.times()[:4])
    threading.settrace(at_call)
    sys.settrace(at_call)
    try:
        yield
    finally:
        sys.settrace(None)
        threading.settrace(None)  # type: ignore[arg-type]
        _SECONDS[test] += sum(os.times()[:4]) - start
        for file, line in lines:
            _LINES[f"{os.path.relpath(file)}:{line}"].add(test)


@pytest.hookimpl(wrapper=True)
def pytest_runtest_protocol(item):
    """Note a test: in that run this module is a plugin."""
    with _noted(item.nodeid):
        return (yield)


def pytest_collection_finish():
    """Have processes that train together note what they run, too."""
    processes = sys.modules.get("on_torch.processes")
    if processes:
        run = processes._Group.run
        processes._Group.run = lambda group, checks: run(group, tuple(map(_Elsewhere, checks)))


class _Elsewhere:
    """A check of a test that another process runs."""

    def __init__(self, check: Callable[[int], None]) -> None:
        self._check, self._test = check, os.environ["PYTEST_CURRENT_TEST"].rsplit(" (", 1)[0]

    def __call__(self, rank: int) -> None:
        with _noted(self._test):
            self._check(rank)
        pytest_sessionfinish()


def pytest_sessionfinish():
    """Write what a process has noted."""
    seen = {"seconds": _SECONDS, "lines": {line: sorted(tests) for line, tests in _LINES.items()}}
    if _SECONDS:
        (pathlib.Path(os.environ[_FOLDER]) / f"{os.getpid()}.json").write_text(json.dumps(seen))


class LineMap:
    """Which quick tests run which lines of the tree, and how long they take."""

    def __init__(self, folder: pathlib.Path) -> None:
        self.seconds: dict[str, float] = {}
        self.lines: dict[str, dict[int, set[str]]] = {}
        for path in folder.glob("*.json"):
            seen = json.loads(path.read_text())
            for test, seconds in seen["seconds"].items():
                self.seconds[test] = self.seconds.get(test, 0) + seconds
            for place, tests in seen["lines"].items():
                file, line = place.rsplit(":", 1)
                self.lines.setdefault(file, {}).setdefault(int(line), set()).update(tests)

    def tests_of(self, file: str, at: range, seconds: float) -> list[str]:
        """Return the tests that run one of some lines, or of their file if these run as it is imported.

        The quickest come first, and of many cases of one test three before the others.
        """
        lines = self.lines.get(file, {})
        found = set().union(*(lines.get(line, ()) for line in at))
        cases: collections.Counter[str] = collections.Counter()
        order = []
        for test in sorted(found or set().union(*lines.values()), key=lambda x: (self.seconds[x], x)):
            function = test.split("[")[0]
            order.append((cases[function] > 2, len(order), test))
            cases[function] += 1
        total, chosen = 0.0, []
        for _, _, test in sorted(order):
            if not chosen or (total + self.seconds[test] <= seconds and len(chosen) < 400):
                total += self.seconds[test]
                chosen.append(test)
        return chosen

"""`make gpu-bits`: which programs are executed, and the record of what they gave.

Without the option these tests are not collected: the compilers for a GPU have environments of their own. What
tests the interpreter needs none of them, and always runs.
"""

import importlib
import json
import pathlib
import sys
import time
from collections.abc import Callable, Iterator

import pytest

_COMPILED = ("xla", "triton")


def pytest_ignore_collect(collection_path, config):
    """Leave alone what imports a compiler, unless it was asked for."""
    name = collection_path.name.removeprefix("test_").split("_")[0].removesuffix(".py")
    return True if config.getoption("--gpu-bits") is None and name in _COMPILED else None


def pytest_configure(config):
    """Let the helpers of `make compiled` be imported; those of XLA must come before JAX."""
    if config.getoption("--gpu-bits"):
        sys.path.insert(0, str(pathlib.Path(__file__).parents[2] / "benchmarks"))
        importlib.import_module("compiled")


@pytest.fixture
def record(request) -> Callable[[dict], None]:
    """Return a function that keeps a row for the table and the record, with the time that it took."""
    start = time.process_time()

    def keep(row: dict) -> None:
        row = row | {"cpu_seconds": round(time.process_time() - start, 1)}
        request.node.user_properties.append(("gpu_bits", row))

    return keep


@pytest.hookimpl(hookwrapper=True)
def pytest_terminal_summary(terminalreporter, config) -> Iterator[None]:
    """Print what was executed, and write it where that was asked for."""
    yield
    reports = terminalreporter.getreports("passed") + terminalreporter.getreports("failed")
    rows = [row for report in reports for name, row in report.user_properties if name == "gpu_bits"]
    if config.getoption("--gpu-bits") is None:
        return
    terminalreporter.write_sep("=", "executed")
    rows.sort(key=lambda row: (row["compiler"], row["step"], row["shape"]))
    for row in rows:
        shape, differing = "x".join(map(str, row["shape"])), row["differing"] or "none"
        terminalreporter.write_line(
            f"{row['compiler']:7s}{row['step']:68s}{shape:>10s}{row['launches']:>6d} launches"
            f"{row['numbers']:>10,d} numbers, differing: {differing}"
        )
    for name, reason in (not_executed := importlib.import_module("gpu_bits.steps").NOT_EXECUTED).items():
        terminalreporter.write_line(f"not executed: {name}: {reason}")
    if path := config.getoption("--gpu-bits-json"):
        record = {"gpu_bits": config.getoption("--gpu-bits"), "target": "sm_90a", "versions": _versions()}
        tests = _tests(terminalreporter)
        before = json.loads(path.read_text()) if path.exists() else {}
        if record.items() <= before.items():
            rows, tests = _joined(before, rows, tests)
        record |= _totals(rows) | {"tests": tests, "not_executed": not_executed}
        head = json.dumps(record, indent=1)
        # A row for each line, so that two records can be compared.
        lines = ",\n  ".join(json.dumps(row) for row in rows)
        path.write_text(f'{head[:-2]},\n "rows": [\n  {lines}\n ]\n}}\n')


def _joined(before: dict, rows: list[dict], tests: dict) -> tuple[list[dict], dict]:
    """Return the rows and the tests of a record in which what was run again takes its place.

    A file of which only a part was run again keeps its counts, unless a test failed.
    """

    def place(row: dict) -> tuple:
        return row["compiler"], row["step"], *row["shape"]

    def is_whole(file: str) -> bool:
        return "failed" in tests[file] or sum(tests[file].values()) >= sum(
            before["tests"].get(file, {}).values()
        )

    joined = {place(row): row for row in (*before["rows"], *rows)}
    whole = {file: counts for file, counts in tests.items() if is_whole(file)}
    return [joined[key] for key in sorted(joined)], before["tests"] | whole


def _totals(rows: list[dict]) -> dict:
    """Return what the rows come to. What is moved anew at each evaluation is apart: C3 assumes that no
    device does so."""
    kinds = {"differing": 0, "differing_if_wild": 0, "differing_by_A8": 0}
    for row in rows:
        for name, count in row["differing"].items():
            wild = "differing_if_wild" if name.startswith("wild") else "differing"
            kinds["differing_by_A8" if name.endswith("(A8)") else wild] += count
    runs = {
        f"{compiler}_steps": sum(row["compiler"] == compiler for row in rows)
        for compiler in ("XLA", "Triton")
    }
    sums = {name: sum(row[name] for row in rows) for name in ("numbers", "bits", "launches", "cpu_seconds")}
    return runs | sums | kinds


def _tests(terminalreporter) -> dict[str, dict[str, int]]:
    """Return how many tests of each file passed, and how many did not."""
    counts: dict[str, dict[str, int]] = {}
    for outcome in ("passed", "failed", "error", "skipped"):
        for report in terminalreporter.getreports(outcome):
            file = counts.setdefault(report.nodeid.split("::")[0], {})
            file[outcome] = file.get(outcome, 0) + 1
    return counts


def _versions() -> dict[str, str]:
    import jax
    import torch
    import triton

    return {module.__name__: module.__version__ for module in (jax, torch, triton)}

"""`make gpu-bits`: which programs are executed, and the record of what they gave.

Without the option these tests are not collected: the compilers for a GPU have environments of their own. What
tests the interpreter needs none of them, and always runs.
"""

import importlib
import json
import pathlib
import sys
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
    """Return a function that keeps a row for the table and the record."""
    return lambda row: request.node.user_properties.append(("gpu_bits", row))


@pytest.hookimpl(hookwrapper=True)
def pytest_terminal_summary(terminalreporter, config) -> Iterator[None]:
    """Print what was executed, and write it where that was asked for."""
    yield
    reports = terminalreporter.getreports("passed") + terminalreporter.getreports("failed")
    rows = [row for report in reports for name, row in report.user_properties if name == "gpu_bits"]
    if not rows:
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
        head = json.dumps({"versions": _versions(), "not_executed": not_executed}, indent=1)
        # A row for each line, so that two records can be compared.
        lines = ",\n  ".join(json.dumps(row) for row in rows)
        path.write_text(f'{head[:-2]},\n "rows": [\n  {lines}\n ]\n}}\n')


def _versions() -> dict[str, str]:
    import jax
    import torch
    import triton

    return {module.__name__: module.__version__ for module in (jax, torch, triton)}

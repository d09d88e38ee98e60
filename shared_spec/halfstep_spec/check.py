"""Hold a backend against the golden vectors, through an adapter: a Python file with a function per op.

python -m halfstep_spec.check adapter.py
python -m halfstep_spec.check adapter.py --vectors vectors.zip

An adapter has a function of the name of each op that it offers. It takes a `Case` and returns its outputs by
name: each an `Array`, or a dtype and patterns. Ops that it lacks, and cases for which it raises
NotImplementedError, count as not offered. `examples/adapters/` has five.
"""

import argparse
import collections
import dataclasses
import importlib.util
import json
import pathlib
import shutil
import sys
import tempfile
from collections.abc import Iterable
from typing import Any

import numpy as np

from halfstep_spec import SPEC_VERSION
from halfstep_spec.compare import assert_same
from halfstep_spec.vectors import FOLDER, WIDTHS, Array, Case, load

PASSED, FAILED, NOT_OFFERED = "passed", "failed", "not offered"


@dataclasses.dataclass(frozen=True)
class Result:
    """The outcome of one case.

    Attributes:
        case: the question.
        outcome: "passed", "failed" or "not offered".
        reason: why it failed.
    """

    case: Case
    outcome: str
    reason: str = ""


def load_adapter(path: str | pathlib.Path) -> Any:
    """Return the module that a file holds; files beside it can be imported."""
    path = pathlib.Path(path).resolve()
    spec = importlib.util.spec_from_file_location(f"adapter_{path.stem}", path)
    if not path.is_file() or spec is None or spec.loader is None:
        raise ValueError(f"check: {path} is not a Python file. Pass an adapter, such as adapter.py.")
    module = importlib.util.module_from_spec(spec)
    sys.path.insert(0, str(path.parent))
    try:
        spec.loader.exec_module(module)
    finally:
        sys.path.remove(str(path.parent))
    return module


def run_case(adapter: Any, case: Case) -> Result:
    """Ask an adapter one question, and compare every output as the case says."""
    function = getattr(adapter, case.op, None)
    if function is None:
        return Result(case, NOT_OFFERED)
    try:
        actual = {name: _array(value) for name, value in function(case).items()}
    except NotImplementedError:
        return Result(case, NOT_OFFERED)
    except Exception as error:  # whatever a backend does with a question is an answer to it
        return Result(case, FAILED, f"{type(error).__name__}: {error}".splitlines()[0])
    if actual.keys() != case.outputs.keys():
        return Result(case, FAILED, f"outputs are {sorted(actual)}, due are {sorted(case.outputs)}")
    for name, expected in case.outputs.items():
        try:
            assert_same(actual[name], expected, name)
        except AssertionError as error:
            return Result(case, FAILED, str(error))
    return Result(case, PASSED)


def table(results: Iterable[Result]) -> list[str]:
    """Return the table of clauses; a case counts for every clause that it asks about."""
    rows: dict[str, collections.Counter] = collections.defaultdict(collections.Counter)
    reasons: dict[str, str] = {}
    for result in results:
        for clause in result.case.clauses:
            rows[clause][result.outcome] += 1
            if result.outcome == FAILED:
                reasons.setdefault(clause, f"{result.reason} ({result.case.comment})")
    lines = ["| clause | passed | failed | not offered | the first failure |", "|---|--:|--:|--:|---|"]
    for clause in sorted(rows, key=lambda name: (name[0], int(name[1:]))):
        counts = " | ".join(str(rows[clause][outcome]) for outcome in (PASSED, FAILED, NOT_OFFERED))
        lines.append(f"| {clause} | {counts} | {_shortened(reasons.get(clause, ''))} |")
    return lines


def summary(results: Iterable[Result]) -> str:
    """Return how many cases came out how."""
    counts = collections.Counter(result.outcome for result in results)
    total = sum(counts.values())
    return f"{total} cases: " + ", ".join(f"{counts[name]} {name}" for name in (PASSED, FAILED, NOT_OFFERED))


def record(adapter: str, results: Iterable[Result]) -> dict[str, Any]:
    """Return the outcomes for JSON, by key, of every case that the adapter offers."""
    offered = [result for result in results if result.outcome != NOT_OFFERED]
    cases = {
        result.case.key: {"clauses": result.case.clauses, "outcome": result.outcome, "reason": result.reason}
        for result in offered
    }
    return {"adapter": adapter, "spec_version": SPEC_VERSION, "cases": cases}


def _array(value: Any) -> Array:
    """Return a result of an adapter as an array of patterns."""
    if isinstance(value, Array):
        return value
    dtype, bits = value
    return Array(dtype, np.asarray(bits, np.dtype(f"uint{WIDTHS[dtype]}")))


def _shortened(text: str, length: int = 160) -> str:
    text = text.replace("|", "/")
    return text if len(text) <= length else f"{text[: length - 3]}..."


def _vectors(path: pathlib.Path, scratch: str) -> dict[str, list[Case]]:
    """Return the cases of a folder of vectors, or of an archive of one."""
    if path.is_file():
        shutil.unpack_archive(path, scratch)
        path = pathlib.Path(scratch)
    manifests = sorted(path.rglob("manifest.json"))
    if not manifests:
        raise ValueError(f"check: {path} holds no manifest.json. Pass the golden vectors by --vectors.")
    return load(SPEC_VERSION, manifests[0].parent)


def main(argv: list[str] | None = None) -> int:
    """Run the command line; return the exit status: 1 if a case failed."""
    parser = argparse.ArgumentParser(
        prog="python -m halfstep.check", description="Hold a backend against the golden vectors."
    )
    parser.add_argument("adapter", help="a Python file with a function per op")
    parser.add_argument("--vectors", type=pathlib.Path, default=FOLDER, help="their folder, or an archive")
    parser.add_argument("--json", type=pathlib.Path, help="write what came out to a file")
    arguments = parser.parse_args(argv)
    try:
        adapter = load_adapter(arguments.adapter)
        with tempfile.TemporaryDirectory() as scratch:
            cases = _vectors(arguments.vectors, scratch)
    except (ValueError, OSError) as error:
        print(error)
        return 2
    results = [run_case(adapter, case) for of_file in cases.values() for case in of_file]
    print("\n".join([*table(results), "", summary(results)]))
    if arguments.json:
        arguments.json.write_text(json.dumps(record(arguments.adapter, results), indent=1) + "\n")
    return int(any(result.outcome == FAILED for result in results))


if __name__ == "__main__":
    sys.exit(main())

"""Do the quick tests see every line? One of them is changed at a time, and they must fail.

    make mutants                        # 100 mutants, MINUTES=120
    python tools/mutants.py --list      # which ones

A mutant changes one token (a comparison, an operator, a number, a bool, `and`, `not`, min or max), drops
one statement, or fixes the condition of one `if`. Texts, annotations and messages stay. A seed draws them,
as many in each room, which is a folder of a package; those of a file stay the same when others change. One
run of the quick tests notes which of them run which line. Then a copy of the tree in `out/mutants` is
changed, and the tests that run the line go, the quickest first, until one fails: in processes that are
forked from one that has the frameworks. Each row is written as it comes, and a later run goes on where this
one ended. A mutant that lives is a test that is missing, or a line that changes nothing: `--again` tries
those once more, and `--wide` holds them against all quick tests.
"""

import argparse
import ast
import collections
import dataclasses
import json
import math
import os
import pathlib
import re
import resource
import shutil
import signal
import subprocess
import sys
import time
import warnings
import zlib
from collections.abc import Iterator

import pytest

from line_map import PACKAGES, ROOT, LineMap, note

TREE = ROOT / "out" / "mutants"
MAP = ROOT / "out" / "line-map"

_SWAPS = {
    **{ast.Lt: ast.LtE, ast.LtE: ast.Lt, ast.Gt: ast.GtE, ast.GtE: ast.Gt, ast.Eq: ast.NotEq},
    **{ast.NotEq: ast.Eq, ast.Is: ast.IsNot, ast.IsNot: ast.Is, ast.In: ast.NotIn, ast.NotIn: ast.In},
    **{ast.Add: ast.Sub, ast.Sub: ast.Add, ast.Mult: ast.Add, ast.Div: ast.Mult, ast.FloorDiv: ast.Mult},
    **{ast.Mod: ast.FloorDiv, ast.LShift: ast.RShift, ast.RShift: ast.LShift, ast.BitAnd: ast.BitOr},
    **{ast.And: ast.Or, ast.Or: ast.And},
}
_CALLS = {"min": "max", "max": "min", "any": "all", "all": "any", "minimum": "maximum", "maximum": "minimum"}


@dataclasses.dataclass(frozen=True)
class Mutant:
    """One changed expression or statement.

    Attributes:
        file: where it is, relative to the repository.
        line: its first line.
        column: where it begins there, in bytes.
        stop: its last line, and the byte behind its end.
        before: its text, as `ast` writes it.
        after: what stands there instead.
        nth: how many of the same stand before it in the file.
    """

    file: str
    line: int
    column: int
    stop: tuple[int, int]
    before: str
    after: str
    nth: int = 0

    @property
    def room(self) -> str:
        """The folder of a package that it is in."""
        parts = pathlib.PurePath(self.file).parts[1:-1]
        return "/".join(parts[:2])

    @property
    def name(self) -> str:
        """By which a row of the record is found again, wherever the line has gone."""
        return f"{self.file}: {self.before} -> {self.after}" + f" ({self.nth + 1})" * bool(self.nth)

    def applied(self, source: str) -> str:
        """Return a source with the change."""
        lines = source.encode().splitlines(keepends=True)
        last, end = self.stop
        head, tail = lines[self.line - 1][: self.column], lines[last - 1][end:]
        after = self.after if self.after == "pass" else f"({self.after})"
        changed = [*lines[: self.line - 1], head + after.encode() + tail, *lines[last:]]
        return b"".join(changed).decode()


def mutants_of(file: str, source: str) -> Iterator[Mutant]:
    """Yield every mutant of a module."""
    met: collections.Counter[tuple[str, str]] = collections.Counter()
    for node in _code(ast.parse(source)):
        for part, change in _changes(node):
            stop = (part.end_lineno or part.lineno, part.end_col_offset or 0)
            before, after = ast.unparse(part), ast.unparse(change)
            yield Mutant(file, part.lineno, part.col_offset, stop, before, after, met[before, after])
            met[before, after] += 1


def _code(node: ast.AST) -> Iterator[ast.expr | ast.stmt]:
    """Yield expressions and statements that run, without texts, annotations, errors and log lines."""
    call = node.value if isinstance(node, ast.Expr) else node
    called = call.func if isinstance(call, ast.Call) else None
    quiet = isinstance(called, ast.Name) and called.id in ("say_once", "TypeVar", "cast")
    if isinstance(node, (ast.Raise, ast.JoinedStr)) or quiet:
        return
    if isinstance(node, (ast.expr, ast.stmt)):
        yield node
    for field, value in ast.iter_fields(node):
        if field in ("annotation", "returns", "type_comment", "type_params", "decorator_list"):
            continue
        for child in value if isinstance(value, list) else [value]:
            if isinstance(child, ast.AST):
                yield from _code(child)


def _changes(node: ast.expr | ast.stmt) -> Iterator[tuple[ast.expr | ast.stmt, ast.expr | ast.stmt]]:
    """Yield pairs: a part of the source, and its replacement."""
    if isinstance(node, ast.If):
        yield from ((node.test, ast.Constant(value)) for value in (False, True))
    elif _can_be_dropped(node):
        yield node, ast.Pass()
    elif isinstance(node, ast.expr):
        yield from ((node, change) for change in _other_expressions(node))


def _can_be_dropped(node: ast.AST) -> bool:
    """Whether a statement has an effect and defines no name, so that the code after it still runs."""
    if isinstance(node, ast.Assign):
        return all(isinstance(target, (ast.Attribute, ast.Subscript)) for target in node.targets)
    is_call = isinstance(node, ast.Expr) and isinstance(node.value, ast.Call)
    return is_call or isinstance(node, (ast.AugAssign, ast.Delete))


def _other_expressions(node: ast.expr) -> Iterator[ast.expr]:
    """Yield the replacements of an expression."""
    if isinstance(node, ast.Compare) and len(node.ops) == 1:
        yield ast.Compare(node.left, [_SWAPS[type(node.ops[0])]()], node.comparators)
    elif isinstance(node, ast.BinOp) and type(node.op) in _SWAPS:
        # Texts and lists have no difference.
        if not any(isinstance(x, (ast.JoinedStr, ast.List, ast.Tuple)) for x in (node.left, node.right)):
            yield ast.BinOp(node.left, _SWAPS[type(node.op)](), node.right)
    elif isinstance(node, ast.BoolOp):
        yield ast.BoolOp(_SWAPS[type(node.op)](), node.values)
    elif isinstance(node, ast.UnaryOp) and isinstance(node.op, ast.Not):
        yield node.operand
    elif isinstance(node, ast.Constant) and isinstance(node.value, bool):
        yield ast.Constant(not node.value)
    elif isinstance(node, ast.Constant) and isinstance(node.value, int):
        yield ast.Constant(node.value + 1)
    elif isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and node.func.id in _CALLS:
        yield ast.Call(ast.Name(_CALLS[node.func.id]), node.args, node.keywords)
    elif isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute) and node.func.attr in _CALLS:
        yield ast.Call(ast.Attribute(node.func.value, _CALLS[node.func.attr]), node.args, node.keywords)


def drawn(count: int, seed: int) -> list[Mutant]:
    """Return mutants, the rooms in turn, no line twice."""
    rooms: dict[str, list[Mutant]] = {}
    for package in PACKAGES:
        for path in sorted((ROOT / package).rglob("*.py")):
            if path.name in ("__main__.py", "check.py", "version.py"):
                continue  # commands, which run in processes of their own
            for mutant in mutants_of(str(path.relative_to(ROOT)), path.read_text()):
                rooms.setdefault(mutant.room, []).append(mutant)
    queues = [
        sorted(rooms[room], key=lambda x: zlib.crc32(f"{seed} {x.name}".encode())) for room in sorted(rooms)
    ]
    chosen: dict[tuple[str, int], Mutant] = {}
    while len(chosen) < count and any(queues):
        for queue in queues:
            while queue and (queue[-1].file, queue[-1].line) in chosen:
                queue.pop()
            if queue and len(chosen) < count:
                mutant = queue.pop()
                chosen[mutant.file, mutant.line] = mutant
    return list(chosen.values())


def copy_tree() -> None:
    """Make a fresh copy of what git has of the tree."""
    shutil.rmtree(TREE, ignore_errors=True)
    listed = subprocess.run(["git", "ls-files", "-z"], cwd=ROOT, check=True, capture_output=True).stdout
    for name in filter(None, listed.decode().split("\0")):
        if (ROOT / name).is_file():
            (TREE / name).parent.mkdir(parents=True, exist_ok=True)
            shutil.copy2(ROOT / name, TREE / name)
    for folder in list(TREE.glob("**")):  # what is compiled: of a file that has changed it is not taken
        cache = ROOT / folder.relative_to(TREE) / "__pycache__"
        if cache.is_dir():
            shutil.copytree(cache, folder / "__pycache__")


class Runs:
    """Runs of tests on the copy of the tree."""

    def __init__(self, seconds: float) -> None:
        self._seconds = seconds
        self._passed: dict[str, bool] = {}

    def verdict(self, mutant: Mutant, tests: list[str]) -> str:
        """Return whether tests see a mutant: "lived", or "died" and by which test, or "open".

        That test passes without the mutant. Tests that take too long do not count as failed.
        """
        path = TREE / mutant.file
        source = path.read_text()
        path.write_text(mutant.applied(source))
        try:
            # Most die by the first few, which take less than to collect them all.
            codes = (_run(some, self._seconds) for some in (tests[:20], tests[20:]) if some)
            code = next((code for code in codes if code != 0), 0)
        finally:
            path.write_text(source)
        if code == 0:
            return "lived"
        if code is None:
            return f"open: its tests took over {self._seconds:g} s"
        said = (TREE / "said.txt").read_text()
        failed = re.findall(r"^(?:FAILED|ERROR) (.+?)(?: - .*)?$", said, re.MULTILINE)
        # What cannot even be imported fails in a conftest.
        failed = failed or re.findall(
            r"^ImportError while loading conftest '.*/(tests/.*)'", said, re.MULTILINE
        )
        if not failed:
            raise RuntimeError(f"mutants: {tests} ended with {code}, and no test failed:\n{said[-2000:]}")
        if failed[0] not in self._passed:
            self._passed[failed[0]] = _run([failed[0]], self._seconds) == 0
        return f"died: {failed[0]}" if self._passed[failed[0]] else f"unknown: {failed[0]} fails without it"


def _run(tests: list[str], seconds: float) -> int | None:
    """Return how pytest ended in a process of its own; None if it did not in so many seconds of a processor.

    Others may work beside it, so that it may take ten times as long by the clock.
    """
    child, end = os.fork(), time.monotonic() + 10 * seconds
    if not child:
        os.setpgid(0, 0)
        resource.setrlimit(resource.RLIMIT_CPU, (math.ceil(seconds), math.ceil(seconds) + 5))
        _test(tests)
    while time.monotonic() < end:
        done, status = os.waitpid(child, os.WNOHANG)
        if done:
            code = os.waitstatus_to_exitcode(status)
            return None if code in (-signal.SIGXCPU, -signal.SIGKILL) else code
        time.sleep(0.05)
    os.killpg(child, signal.SIGKILL)
    os.waitpid(child, 0)
    return None


def _test(tests: list[str]) -> None:
    """Run tests in this process, which ends with them."""
    code = 1
    try:
        os.chdir(TREE)
        # The tree itself, as `python -m pytest` has it: processes that tests start look for them there.
        sys.path[:0] = [str(TREE / folder) for folder in ("shared_spec", "pkg_jax", "pkg_torch", "")]
        sys.path_importer_cache.clear()  # of folders that were not there yet
        os.environ["PYTHONPATH"] = os.pathsep.join(sys.path[:4])
        sys.dont_write_bytecode = True
        said = os.open(TREE / "said.txt", os.O_WRONLY | os.O_CREAT | os.O_TRUNC)
        os.dup2(said, 1)
        os.dup2(said, 2)
        code = pytest.main(["-q", "-x", "-p", "no:cacheprovider", "-p", "no:xdist", *tests])
    finally:
        sys.stdout.flush()  # into a file it is buffered, and nothing else writes it
        os._exit(int(code))


def _load_frameworks() -> None:
    """Import what every child needs, and nothing of halfstep."""
    os.environ["JAX_PLATFORMS"] = "cpu"
    os.environ["XLA_FLAGS"] = "--xla_force_host_platform_device_count=8"
    warnings.filterwarnings("ignore", "os.fork", RuntimeWarning)
    import jax  # noqa: F401
    import optax  # noqa: F401
    import torch

    torch.set_num_threads(1)  # threads do not outlive a fork


def main() -> int:
    """Run mutants that have no verdict yet; print what lives, and return 1 if over a tenth does."""
    parser = argparse.ArgumentParser(description="Change a line at a time, and run the tests that run it.")
    parser.add_argument("--count", type=int, default=100)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--minutes", type=float, default=1e9, help="after which no other one is begun")
    parser.add_argument("--json", type=pathlib.Path, help="the record, which a later run goes on with")
    parser.add_argument("--list", action="store_true", help="print the mutants")
    parser.add_argument("--seconds", type=float, default=120, help="of a processor, for the tests of one")
    parser.add_argument("--again", action="store_true", help="try those that did not die once more")
    parser.add_argument("--wide", action="store_true", help="hold those that lived against all quick tests")
    parser.add_argument("--watch", action="store_true", help="note anew which tests run which lines")
    arguments = parser.parse_args()
    mutants = drawn(arguments.count, arguments.seed)
    if arguments.list:
        print("\n".join(f"{mutant.line:4} of {mutant.name}" for mutant in mutants))
        return 0
    record: dict = {"seed": arguments.seed, "count": arguments.count, "mutants": {}}
    if arguments.json and arguments.json.exists():
        record = json.loads(arguments.json.read_text())
    rows, end = record["mutants"], time.monotonic() + 60 * arguments.minutes
    copy_tree()
    if arguments.watch or not list(MAP.glob("*.json")):
        note(MAP)
    line_map, runs = LineMap(MAP), Runs(arguments.seconds * (20 if arguments.wide else 2))
    _load_frameworks()
    for mutant in mutants:
        before = rows.get(mutant.name, {}).get("verdict")
        due = before is None or ((arguments.again or arguments.wide) and not before.startswith("died"))
        if time.monotonic() > end or not due:
            continue
        tests = (
            ["tests"]
            if arguments.wide
            else line_map.tests_of(mutant.file, range(mutant.line, mutant.stop[0] + 1), arguments.seconds)
        )
        start = time.monotonic()
        found = runs.verdict(mutant, tests) if tests else "lived: no quick test runs it"
        if arguments.wide and found == "lived":
            found = "lived, whatever quick test ran"
        seconds = round(time.monotonic() - start, 1)
        rows[mutant.name] = {"line": mutant.line, "verdict": found, "tests": len(tests), "seconds": seconds}
        print(f"{found}, {seconds:.0f} s: {mutant.line} of {mutant.name}", flush=True)
        if arguments.json:
            arguments.json.write_text(json.dumps(record, indent=1) + "\n")
    verdicts = [rows[mutant.name]["verdict"] for mutant in mutants if mutant.name in rows]
    died = sum(found.startswith("died") for found in verdicts)
    print(f"{len(verdicts)} of {len(mutants)} ran: {died} died, {len(verdicts) - died} did not")
    return int(10 * died < 9 * len(verdicts))


if __name__ == "__main__":
    sys.exit(main())

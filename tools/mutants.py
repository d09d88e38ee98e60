"""Do the quick tests see every room? One line of the packages is changed at a time, and they must fail.

    make mutants                        # 100 mutants, MINUTES=30
    python tools/mutants.py --list      # which ones, and their tests

A mutant is one token: a comparison, an operator, a number, a bool, `and`, `not`, min or max. Texts,
annotations and messages stay. A seed draws them, as many in each room; a room is a folder of a package. A
copy of the tree in `out/mutants` is changed, and the tests of the room run on it until one fails. Processes
are forked from one that has the frameworks, so that a mutant takes as long as its tests. Each row is written
as it comes, and a later run goes on where this one ended. A mutant that lives is a test that is missing, or a
line that changes nothing: `--again` tries those once more, and `--wide` holds them against all quick tests.
"""

import argparse
import ast
import dataclasses
import json
import math
import os
import pathlib
import random
import re
import resource
import shutil
import signal
import subprocess
import sys
import time
import warnings
from collections.abc import Iterator

ROOT = pathlib.Path(__file__).parents[1]
PACKAGES = ("shared_spec/halfstep", "pkg_jax/halfstep_jax", "pkg_torch/halfstep_torch")
TREE = ROOT / "out" / "mutants"
TESTS = {
    "halfstep": (
        "halfstep twin/test_twin twin/test_newest on_torch/test_description on_torch/test_diagnosis "
        "on_torch/test_rule_check on_torch/test_bad_input on_torch/test_bad_rules twin/test_user_rule "
        "on_jax/test_diagnosis on_jax/test_reports spec/test_check"
    ),
    "halfstep/checkpoint": ("halfstep twin/test_state_file twin/test_refused_files twin/test_key_paths"),
    "halfstep/rules": (
        "on_torch/test_bad_input twin/test_muon twin/test_muon_split twin/test_adafactor twin/test_ademamix "
        "twin/test_adan twin/test_schedule_free twin/test_adamw_in_codes twin/test_store_state_twin "
        "on_torch/test_bad_rules on_jax/test_bad_rules test_vectors"
    ),
    "halfstep/storage": (
        "twin/test_codes twin/test_storage_twin twin/test_bad_tables twin/test_bad_relative "
        "on_torch/test_formats on_torch/test_bad_input on_jax/test_bad_formats test_vectors"
    ),
    "halfstep_jax": (
        "twin/test_twin on_jax/test_rule on_jax/test_leaves on_jax/test_bad_input on_jax/test_chains "
        "on_jax/test_reports on_jax/test_diagnosis on_jax/test_placement on_jax/test_averages "
        "on_jax/test_sharding on_jax/test_shard_map on_jax/test_weights_in_codes on_jax/test_memory "
        "on_jax/test_lamb twin/test_schedule_free"
    ),
    "halfstep_jax/checkpoint": (
        "on_jax/test_checkpoints twin/test_state_file twin/test_refused_files twin/test_optax_state "
        "on_jax/test_float32_weights"
    ),
    "halfstep_jax/gradients": ("on_jax/test_accumulation"),
    "halfstep_jax/integrations": ("twin/test_integrations twin/test_config"),
    "halfstep_jax/numbers": (
        "on_jax/test_random_words on_jax/test_rounding on_jax/test_roots on_jax/test_clip "
        "on_jax/test_exactness on_jax/test_bad_input on_jax/test_params twin/test_muon on_jax/test_hazards"
    ),
    "halfstep_jax/rules": (
        "on_jax/test_adam on_jax/test_bad_input on_jax/test_bad_rules on_jax/test_links_alone "
        "on_jax/test_lamb on_jax/test_momentum on_jax/test_weight_rules on_jax/test_clip "
        "on_jax/test_store_state on_jax/test_bad_store_state twin/test_muon twin/test_adafactor "
        "twin/test_schedule_free test_vectors"
    ),
    "halfstep_jax/storage": (
        "on_jax/test_formats on_jax/test_format_bytes on_jax/test_codebook on_jax/test_tiles "
        "on_jax/test_bad_formats twin/test_codes twin/test_storage_twin on_jax/test_moments test_vectors"
    ),
    "halfstep_jax/weights": (
        "on_jax/test_params on_jax/test_weight_rules on_jax/test_bad_input on_jax/test_chains "
        "on_jax/test_float32_weights test_vectors"
    ),
    "halfstep_jax/xla": (
        "on_jax/test_primitives on_jax/test_exactness on_jax/test_derivatives on_jax/test_sharding "
        "on_jax/test_hazards"
    ),
    "halfstep_torch": (
        "twin/test_twin on_torch/test_optimizer on_torch/test_groups on_torch/test_bad_input "
        "on_torch/test_bad_rules on_torch/test_state_dict on_torch/test_description on_torch/test_diagnosis "
        "on_torch/test_streamed_state on_torch/test_rule on_torch/test_rule_check on_torch/test_averages "
        "on_torch/test_weight_averages twin/test_schedule_free twin/test_adamw_in_codes "
        "on_torch/test_sharded_tools"
    ),
    "halfstep_torch/bridge": ("twin/test_name_map twin/test_moving twin/test_optax_optimizer"),
    "halfstep_torch/checkpoint": (
        "on_torch/test_float32_state twin/test_state_file twin/test_refused_files "
        "on_torch/test_weight_averages"
    ),
    "halfstep_torch/distributed": (
        "on_torch/test_windows on_torch/test_advice on_torch/test_sharded on_torch/test_sharded_bad_input "
        "on_torch/test_sharded_rules on_torch/test_sharded_checkpoints on_torch/test_sharded_tools "
        "on_torch/test_sharded_cost"
    ),
    "halfstep_torch/engine": (
        "on_torch/test_optimizer on_torch/test_layouts on_torch/test_compile_choice on_torch/test_counts "
        "on_torch/test_grad_scaler on_torch/test_advice on_torch/test_bad_steps on_torch/test_temporaries "
        "on_torch/test_groups on_torch/test_interrupts on_torch/test_compiling on_torch/test_sharded"
    ),
    "halfstep_torch/gradients": ("on_torch/test_accumulation on_torch/test_release"),
    "halfstep_torch/integrations": ("twin/test_integrations twin/test_config"),
    "halfstep_torch/numbers": (
        "on_torch/test_random_words on_torch/test_rounding on_torch/test_norms on_torch/test_clip "
        "on_torch/test_operations on_torch/test_bad_input twin/test_muon test_vectors"
    ),
    "halfstep_torch/optimizer_state": (
        "on_torch/test_state_dict on_torch/test_damaged_state on_torch/test_groups on_torch/test_names "
        "on_torch/test_schedulers on_torch/test_bad_input"
    ),
    "halfstep_torch/rules": (
        "on_torch/test_adam on_torch/test_lamb on_torch/test_momentum on_torch/test_clip "
        "on_torch/test_bad_rules on_torch/test_bad_input on_torch/test_store_state twin/test_muon "
        "twin/test_muon_split twin/test_adafactor on_torch/test_against_torch test_vectors"
    ),
    "halfstep_torch/sharded": (
        "on_torch/test_sharded on_torch/test_sharded_rules on_torch/test_sharded_bad_input "
        "on_torch/test_sharded_checkpoints on_torch/test_sharded_tools on_torch/test_sharded_cost"
    ),
    "halfstep_torch/storage": (
        "on_torch/test_formats on_torch/test_codebook twin/test_codes twin/test_storage_twin "
        "on_torch/test_state_dict on_torch/test_diagnosis test_vectors"
    ),
    "halfstep_torch/weights": (
        "on_torch/test_weight_rules on_torch/test_optimizer on_torch/test_bad_rules "
        "on_torch/test_float32_state test_vectors"
    ),
}
"""Of each room the tests that are nearest, below `tests`; a module's own examples come before them."""

_SWAPS = {
    **{
        ast.Lt: ast.LtE,
        ast.LtE: ast.Lt,
        ast.Gt: ast.GtE,
        ast.GtE: ast.Gt,
        ast.Eq: ast.NotEq,
        ast.NotEq: ast.Eq,
    },
    **{ast.Is: ast.IsNot, ast.IsNot: ast.Is, ast.In: ast.NotIn, ast.NotIn: ast.In},
    **{ast.Add: ast.Sub, ast.Sub: ast.Add, ast.Mult: ast.Add, ast.Div: ast.Mult, ast.FloorDiv: ast.Mult},
    **{ast.Mod: ast.FloorDiv, ast.LShift: ast.RShift, ast.RShift: ast.LShift, ast.BitAnd: ast.BitOr},
    **{ast.And: ast.Or, ast.Or: ast.And},
}
_CALLS = {"min": "max", "max": "min", "any": "all", "all": "any", "minimum": "maximum", "maximum": "minimum"}


@dataclasses.dataclass(frozen=True)
class Mutant:
    """One changed expression.

    Attributes:
        file: where it is, relative to the repository.
        line: its first line.
        column: where it begins there, in bytes.
        stop: its last line, and the byte behind its end.
        before: its text, as `ast` writes it.
        after: what stands there instead.
    """

    file: str
    line: int
    column: int
    stop: tuple[int, int]
    before: str
    after: str

    @property
    def room(self) -> str:
        """The folder of a package that it is in."""
        parts = pathlib.PurePath(self.file).parts[1:-1]
        return "/".join(parts[:2])

    @property
    def name(self) -> str:
        """By which a row of the record is found again."""
        return f"{self.file}:{self.line}: {self.before} -> {self.after}"

    def applied(self, source: str) -> str:
        """Return a source with the change."""
        lines = source.encode().splitlines(keepends=True)
        last, end = self.stop
        head, tail = lines[self.line - 1][: self.column], lines[last - 1][end:]
        changed = [*lines[: self.line - 1], head + f"({self.after})".encode() + tail, *lines[last:]]
        return b"".join(changed).decode()


def mutants_of(file: str, source: str) -> Iterator[Mutant]:
    """Yield every mutant of a module."""
    for node in _code(ast.parse(source)):
        for after in _changes(node):
            stop = (node.end_lineno or node.lineno, node.end_col_offset or 0)
            yield Mutant(file, node.lineno, node.col_offset, stop, ast.unparse(node), ast.unparse(after))


def _code(node: ast.AST) -> Iterator[ast.expr]:
    """Yield the expressions that run, without texts, annotations, errors and what is logged."""
    called = node.func if isinstance(node, ast.Call) else None
    quiet = isinstance(called, ast.Name) and called.id in ("say_once", "TypeVar", "cast")
    if isinstance(node, (ast.Raise, ast.JoinedStr)) or quiet:
        return
    if isinstance(node, ast.expr):
        yield node
    for field, value in ast.iter_fields(node):
        if field in ("annotation", "returns", "type_comment", "type_params", "decorator_list"):
            continue
        for child in value if isinstance(value, list) else [value]:
            if isinstance(child, ast.AST):
                yield from _code(child)


def _changes(node: ast.expr) -> Iterator[ast.expr]:
    """Yield what an expression may become."""
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
    by_room: dict[str, list[Mutant]] = {}
    for package in PACKAGES:
        for path in sorted((ROOT / package).rglob("*.py")):
            if path.name in ("__main__.py", "check.py", "version.py"):
                continue  # commands, which run in processes of their own
            file = str(path.relative_to(ROOT))
            for mutant in mutants_of(file, path.read_text()):
                by_room.setdefault(mutant.room, []).append(mutant)
    generator = random.Random(seed)
    queues = {room: generator.sample(found, len(found)) for room, found in sorted(by_room.items())}
    chosen: dict[tuple[str, int], Mutant] = {}
    while len(chosen) < count and any(queues.values()):
        for queue in queues.values():
            while queue and (queue[-1].file, queue[-1].line) in chosen:
                queue.pop()
            if queue and len(chosen) < count:
                mutant = queue.pop()
                chosen[mutant.file, mutant.line] = mutant
    return list(chosen.values())


def tests_of(mutant: Mutant) -> list[str]:
    """Return the tests of a mutant's room, nearest first: its module's own examples, then what speaks of it.

    Of a new room, all there are.
    """
    if mutant.room not in TESTS:
        return [mutant.file, "tests"]
    names = TESTS[mutant.room].split()
    paths = [f"tests/{name}" if (ROOT / "tests" / name).is_dir() else f"tests/{name}.py" for name in names]
    words = re.compile(rf"\b({'|'.join(map(re.escape, _names_of(mutant)))})\b", re.IGNORECASE)
    return [mutant.file, *sorted(paths, key=lambda path: -_nearness(ROOT / path, words))]


def _names_of(mutant: Mutant) -> list[str]:
    """Return the name of a mutant's module, and the public names that it defines."""
    path = ROOT / mutant.file
    nodes = ast.parse(path.read_text()).body
    defined = [node.name for node in nodes if isinstance(node, (ast.FunctionDef, ast.ClassDef))]
    return [path.stem, *(name for name in defined if not name.startswith("_"))]


def _nearness(path: pathlib.Path, words: re.Pattern) -> float:
    """Return how often lines of tests speak of a module; the golden vectors take longest, and come last."""
    if path.stem == "test_vectors":
        return -1
    text = "".join(
        file.read_text() for file in ([path] if path.is_file() else sorted(path.glob("test_*.py")))
    )
    return len(words.findall(text)) / (1 + text.count("\n"))


def copy_tree() -> None:
    """Make a fresh copy of what git has of the tree."""
    shutil.rmtree(TREE, ignore_errors=True)
    listed = subprocess.run(["git", "ls-files", "-z"], cwd=ROOT, check=True, capture_output=True).stdout
    for name in filter(None, listed.decode().split("\0")):
        if (ROOT / name).is_file():
            (TREE / name).parent.mkdir(parents=True, exist_ok=True)
            shutil.copy2(ROOT / name, TREE / name)


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
            code = _run(tests, self._seconds)
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
        sys.path[:0] = [str(TREE / folder) for folder in ("shared_spec", "pkg_jax", "pkg_torch")]
        sys.path_importer_cache.clear()  # of folders that were not there yet
        os.environ["PYTHONPATH"] = os.pathsep.join(sys.path[:3])
        sys.dont_write_bytecode = True
        said = os.open(TREE / "said.txt", os.O_WRONLY | os.O_CREAT | os.O_TRUNC)
        os.dup2(said, 1)
        os.dup2(said, 2)
        import pytest

        code = pytest.main(["-q", "-x", "-p", "no:cacheprovider", "-p", "no:xdist", *tests])
    finally:
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
    parser = argparse.ArgumentParser(
        description="Change a line at a time, and run the tests that are nearest."
    )
    parser.add_argument("--count", type=int, default=100)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--minutes", type=float, default=1e9, help="after which no other one is begun")
    parser.add_argument("--json", type=pathlib.Path, help="the record, which a later run goes on with")
    parser.add_argument("--list", action="store_true", help="print the mutants and their tests")
    parser.add_argument("--seconds", type=float, default=600, help="of a processor, for the tests of one")
    parser.add_argument("--again", action="store_true", help="try those that did not die once more")
    parser.add_argument("--wide", action="store_true", help="hold those that lived against all quick tests")
    arguments = parser.parse_args()
    mutants = drawn(arguments.count, arguments.seed)
    if arguments.list:
        print("\n".join(f"{mutant.name}\n    {' '.join(tests_of(mutant))}" for mutant in mutants))
        return 0
    record: dict = {"seed": arguments.seed, "count": arguments.count, "mutants": {}}
    if arguments.json and arguments.json.exists():
        record = json.loads(arguments.json.read_text())
    rows, end = record["mutants"], time.monotonic() + 60 * arguments.minutes
    copy_tree()
    _load_frameworks()
    runs = Runs(arguments.seconds)
    for mutant in mutants:
        before = rows.get(mutant.name, {}).get("verdict")
        due = before is None or ((arguments.again or arguments.wide) and not before.startswith("died"))
        if time.monotonic() > end or not due:
            continue
        tests = ["tests"] if before and arguments.wide else tests_of(mutant)
        start = time.monotonic()
        found = runs.verdict(mutant, tests)
        seconds = time.monotonic() - start
        if tests == ["tests"] and found == "lived":
            found = "lived, whatever quick test ran"
        rows[mutant.name] = {"room": mutant.room, "verdict": found, "seconds": round(seconds, 1)}
        print(f"{found}, {seconds:.0f} s: {mutant.name}", flush=True)
        if arguments.json:
            arguments.json.write_text(json.dumps(record, indent=1) + "\n")
    verdicts = [rows[mutant.name]["verdict"] for mutant in mutants if mutant.name in rows]
    died = sum(found.startswith("died") for found in verdicts)
    print(f"{len(verdicts)} of {len(mutants)} ran: {died} died, {len(verdicts) - died} did not")
    return int(10 * died < 9 * len(verdicts))


if __name__ == "__main__":
    sys.exit(main())

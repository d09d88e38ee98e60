"""Train one small transformer on real text, in Flax and in PyTorch, three times each; `make demo` runs this.

The rows differ in how the weights are kept: float32; bfloat16 with every update rounded to nearest; bfloat16
with every update rounded stochastically. Then it prints one table, draws the loss curves, and checks its own
claim: nearest rounding stalls, stochastic rounding follows float32. The exit status is 1 where that does not
hold.
"""

from __future__ import annotations

import argparse
import contextlib
import functools
import importlib
import importlib.metadata
import json
import multiprocessing
import os
import platform
import queue
import sys
from collections.abc import Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import asdict, replace
from pathlib import Path

# Both must stand before a framework is imported. The demo is about rounding, not about a device. Idle OpenMP
# threads sleep: on a machine with other work, spinning ones make every step several times slower.
os.environ.setdefault("JAX_PLATFORMS", "cpu")
os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")

from tqdm import tqdm

import report
from recipe import ROWS, Outcome, Recipe
from text import load_text

SCRIPTS = {"flax": "train_flax", "torch": "train_torch"}
PACKAGES = ("jax", "flax", "optax", "torch", "numpy")


def run_all(recipe: Recipe, frameworks: Sequence[str]) -> list[Outcome]:
    """Train every row in every framework: a process for each framework, under one progress bar."""
    context = multiprocessing.get_context("spawn")
    news, total = context.Queue(), len(frameworks) * len(ROWS) * recipe.steps
    threads = max(1, (os.cpu_count() or 1) // len(frameworks))
    begin = functools.partial(ProcessPoolExecutor, mp_context=context, initializer=_begin)
    with (
        begin(len(frameworks), initargs=(news, threads)) as pool,
        tqdm(total=total, unit="step", dynamic_ncols=True) as bar,
    ):
        runs = [pool.submit(train_rows, framework, recipe) for framework in frameworks]
        now = {}
        while bar.n < total and not any(run.done() and run.exception() for run in runs):
            with contextlib.suppress(queue.Empty):
                framework, row, loss = news.get(timeout=1)
                now[framework] = f"{framework} {row}, loss {loss:.2f}"
                bar.set_description("; ".join(now.values()), refresh=False)
                bar.update()
        return [outcome for run in runs for outcome in run.result()]


def _begin(news: multiprocessing.Queue, threads: int) -> None:
    """In a process for one framework: share the processors, and keep where to tell of steps."""
    global _NEWS
    # Before torch is imported, which reads it then.
    os.environ["OMP_NUM_THREADS"] = str(threads)
    _NEWS = news
    news.cancel_join_thread()  # where the other framework failed, nobody reads any more


def train_rows(framework: str, recipe: Recipe) -> list[Outcome]:
    """Train every row in one framework, and tell of each step."""
    script, text = importlib.import_module(SCRIPTS[framework]), load_text()
    return [
        script.train(recipe, row, text, lambda loss, row=row: _NEWS.put((framework, row.name, loss)))
        for row in ROWS
    ]


def write_figures(path: Path, recipe: Recipe, outcomes: list[Outcome]) -> None:
    """Keep what the table and the picture are made of, and what it was made with."""
    versions = {"python": platform.python_version()}
    for package in PACKAGES:
        try:
            versions[package] = importlib.metadata.version(package)
        except importlib.metadata.PackageNotFoundError:
            continue  # --only needs one framework, not both
    figures = {
        "recipe": asdict(recipe),
        "versions": versions,
        "runs": [asdict(outcome) for outcome in outcomes],
    }
    path.write_text(json.dumps(figures, indent=1) + "\n")


def parse(argv: Sequence[str] | None) -> argparse.Namespace:
    """Read the command line."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "--steps",
        type=int,
        default=Recipe.steps,
        help="updates per run (default: %(default)s)",
    )
    parser.add_argument("--only", choices=SCRIPTS, help="train in this framework alone")
    parser.add_argument(
        "--out",
        type=Path,
        default=Path("out"),
        help="folder for demo.png and demo.json (default: %(default)s)",
    )
    options = parser.parse_args(argv)
    if options.steps < 1:
        parser.error(f"--steps={options.steps} trains nothing. Use an integer >= 1.")
    return options


def main(argv: Sequence[str] | None = None, recipe: Recipe | None = None) -> int:
    """Run the demo; return the exit status."""
    options = parse(argv)
    recipe = replace(recipe or Recipe(), steps=options.steps)
    outcomes = run_all(recipe, [options.only] if options.only else list(SCRIPTS))
    options.out.mkdir(parents=True, exist_ok=True)
    write_figures(options.out / "demo.json", recipe, outcomes)
    report.draw(options.out / "demo.png", outcomes, recipe)
    print(f"\n{report.table(outcomes)}\n")
    print(f"Loss curves: {options.out / 'demo.png'}. Figures: {options.out / 'demo.json'}.")
    problems = report.broken_claims(outcomes)
    for problem in problems:
        print(problem, file=sys.stderr)
    return 1 if problems else 0


if __name__ == "__main__":
    sys.exit(main())

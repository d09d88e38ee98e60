"""Train one small transformer on real text, in Flax and in PyTorch, three times each; `make demo` runs this.

The rows differ in how the weights are kept: float32; bfloat16 with every update rounded to nearest; bfloat16
with every update rounded stochastically. Then it prints one table, draws the loss curves, and checks its own
claim: nearest rounding stalls, stochastic rounding follows float32. The exit status is 1 where that does not
hold.
"""

from __future__ import annotations

import argparse
import importlib
import importlib.metadata
import json
import os
import platform
import sys
from collections.abc import Sequence
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
    """Train every row in every framework, under one progress bar."""
    scripts = {name: importlib.import_module(SCRIPTS[name]) for name in frameworks}
    text, outcomes = load_text(), []
    total = len(frameworks) * len(ROWS) * recipe.steps
    with tqdm(total=total, unit="step", dynamic_ncols=True) as bar:

        def on_step(loss: float) -> None:
            bar.set_postfix_str(f"validation loss {loss:.3f}", refresh=False)
            bar.update()

        for framework, script in scripts.items():
            for row in ROWS:
                bar.set_description(f"{framework}: {row.name}")
                outcomes.append(script.train(recipe, row, text, on_step))
    return outcomes


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

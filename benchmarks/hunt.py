"""Run the hunt of tests/hunt at length, in parts that can be broken off and taken up again.

    make hunt
    python benchmarks/hunt.py [--first 0] [--parts 20] --json benchmarks/results/NAME.json
    python benchmarks/hunt.py --join A.json B.json --json benchmarks/results/NAME.json


A part is `pytest tests/hunt` with a seed of its own: 5,000 examples of the steps; 250 headers, 250 files and
1,250 state dicts with anything in them; 50 lives of 25 events. A part that the record has is not run again.
What fails is printed, with the example that Hypothesis has shrunk, and the record keeps its name. Parts may
run side by side, each into a file of its own; `--join` puts their parts into one record and runs nothing.
"""

import argparse
import datetime
import json
import os
import pathlib
import platform
import re
import subprocess
import sys
import time

ROOT = pathlib.Path(__file__).parents[1]
EXAMPLES, FIRST_SEED = 5000, 100
COMMAND = ("-m", "pytest", "-q", "-n0", "-p", "no:cacheprovider", "-m", "slow or not slow", "tests/hunt")


def rules_drawn() -> list[str]:
    """Return the rules that the hunt draws, as its settings name them."""
    command = [sys.executable, "-c", "from hunt.settings import RULES; print(*RULES)"]
    return subprocess.run(
        command, cwd=ROOT / "tests", capture_output=True, text=True, check=True
    ).stdout.split()


def part(seed: int, rules: list[str]) -> dict:
    """Run the hunt with a seed; return what passed and what failed."""
    environment = {**os.environ, "HUNT": str(EXAMPLES), "HUNT_SEED": str(seed)}
    start = time.perf_counter()
    done = subprocess.run(
        [sys.executable, *COMMAND], cwd=ROOT, env=environment, capture_output=True, text=True
    )
    failed = re.findall(r"^FAILED (\S+)", done.stdout, re.MULTILINE)
    if done.returncode:
        print(done.stdout[-20000:], done.stderr[-4000:], sep="\n", flush=True)
    passed = re.search(r"(\d+) passed", done.stdout)
    return {
        "seed": seed,
        "examples": EXAMPLES,
        "rules": rules,
        "passed": int(passed[1]) if passed else 0,
        "failed": failed,
        "exit": done.returncode,
        "seconds": round(time.perf_counter() - start),
    }


def joined(record: dict, parts: list[dict]) -> dict:
    """Return a record with further parts; a part of a seed that the record has must be of other rules."""
    parts = sorted([*record["parts"], *parts], key=lambda part: part["seed"])
    known = [(part["seed"], tuple(part.get("rules", ()))) for part in parts]
    twice = {seed for seed, rules in known if known.count((seed, rules)) > 1}
    if twice:
        raise ValueError(f"seeds {sorted(twice)} stand twice. Join each part once.")
    return {
        "parts": parts,
        "date": datetime.date.today().isoformat(),
        "python": platform.python_version(),
        "examples": sum(part["examples"] for part in parts),
    }


def main() -> int:
    """Run the parts that are missing, or join parts; return 1 where any failed."""
    parser = argparse.ArgumentParser(description="Run the hunt of tests/hunt in parts.")
    parser.add_argument("--parts", type=int, default=20, help="the part before which to end")
    parser.add_argument("--first", type=int, default=0, help="the part to begin with")
    parser.add_argument("--join", type=pathlib.Path, nargs="*", default=[], help="records to take parts from")
    parser.add_argument("--json", type=pathlib.Path, required=True, help="the record, read and written")
    arguments = parser.parse_args()
    record = {"parts": []}
    if arguments.json.exists():
        record = json.loads(arguments.json.read_text())
    for other in arguments.join:
        record = joined(record, json.loads(other.read_text())["parts"])
    rules = rules_drawn()
    for number in range(arguments.first, 0 if arguments.join else arguments.parts):
        seed = FIRST_SEED + number
        if any(known["seed"] == seed and known.get("rules") == rules for known in record["parts"]):
            continue
        done = part(seed, rules)
        record = joined(record, [done])
        arguments.json.write_text(json.dumps(record, indent=1) + "\n")
        print(json.dumps(done), flush=True)
    arguments.json.write_text(json.dumps(record, indent=1) + "\n")
    return int(any(known["exit"] for known in record["parts"]))


if __name__ == "__main__":
    sys.exit(main())

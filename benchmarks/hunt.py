"""Run the hunt of tests/hunt at length, in parts that can be broken off and taken up again.

    make hunt
    python benchmarks/hunt.py [--parts 20] [--json benchmarks/results/NAME.json]

A part is `pytest tests/hunt` with a seed of its own: 5,000 examples of the steps; 250 headers, 250 files and
1,250 state dicts with anything in them; 50 lives of 25 events. A part that the record has is not run again.
What fails is printed, with the example that Hypothesis has shrunk, and the record keeps its name.
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


def part(seed: int) -> dict:
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
        "passed": int(passed[1]) if passed else 0,
        "failed": failed,
        "exit": done.returncode,
        "seconds": round(time.perf_counter() - start),
    }


def main() -> int:
    """Run the parts that are missing; return 1 where any failed."""
    parser = argparse.ArgumentParser(description="Run the hunt of tests/hunt in parts.")
    parser.add_argument("--parts", type=int, default=20)
    parser.add_argument("--first", type=int, default=0, help="the part to begin with")
    parser.add_argument("--json", type=pathlib.Path, required=True, help="the record, read and written")
    arguments = parser.parse_args()
    record = {"parts": []}
    if arguments.json.exists():
        record = json.loads(arguments.json.read_text())
    for number in range(arguments.first, arguments.parts):
        seed = FIRST_SEED + number
        if any(known["seed"] == seed for known in record["parts"]):
            continue
        record["parts"].append(part(seed))
        record |= {
            "date": datetime.date.today().isoformat(),
            "python": platform.python_version(),
            "examples": sum(known["examples"] for known in record["parts"]),
        }
        arguments.json.write_text(json.dumps(record, indent=1) + "\n")
        print(json.dumps(record["parts"][-1]), flush=True)
    return int(any(known["exit"] for known in record["parts"]))


if __name__ == "__main__":
    sys.exit(main())

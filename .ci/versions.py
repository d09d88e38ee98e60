"""Try the oldest and the newest versions of the frameworks, each set in an environment of its own.

    make versions

`python -m halfstep` takes steps under each recipe and compares them with the reference. Then the reference,
eager torch and a share of JAX's modes answer the golden vectors. Prints a row of the table in
docs/project.md for each set; the exit status is 1 where anything fails.
"""

import os
import pathlib
import platform
import re
import subprocess
import sys

ROOT = pathlib.Path(__file__).parents[1]
SETS = {
    "oldest": "jax==0.6.2 jaxlib==0.6.2 optax==0.2.5 ml_dtypes==0.5.1 torch==2.9.0 numpy==2.0.2",
    "newest": "jax jaxlib optax ml_dtypes torch numpy",
}
"""The floors of pyproject.toml, and whatever the index has; the pinned set is what the other targets use."""
SHOWN = ("jax", "optax", "torch", "numpy")
TOOLS = ("pytest", "hypothesis", "jsonschema", "safetensors")
EVERY_BIT = "every bit is the bit of the reference"


def run(*command: object) -> tuple[int, str]:
    """Return the exit status of a command and what it prints."""
    path = os.pathsep.join(str(ROOT / name) for name in ("pkg_jax", "pkg_torch", "shared_spec"))
    environment = os.environ | {"PYTHONPATH": path, "JAX_PLATFORMS": "cpu"}
    done = subprocess.run(
        [str(word) for word in command], cwd=ROOT, env=environment, capture_output=True, text=True
    )
    return done.returncode, done.stdout + done.stderr


def install(name: str, packages: list[str]) -> pathlib.Path:
    """Return the Python of an environment that has the packages."""
    folder = ROOT / ".venv-versions" / name
    python = folder / "bin" / "python"
    # torch goes first and alone, as in the Makefile.
    torch, others = [p for p in packages if p.startswith("torch")], [p for p in packages if p[:5] != "torch"]
    pip = (python, "-m", "pip", "install", "-qq", "--disable-pip-version-check")
    for command in ((sys.executable, "-m", "venv", folder), (*pip, *torch), (*pip, *others, *TOOLS)):
        status, text = run(*command)
        if status:
            sys.exit(text)
    return python


def row(name: str) -> tuple[bool, str]:
    """Return whether a set holds, and its row of the table."""
    python = install(name, SETS[name].split())
    ask = "import importlib.metadata as m; print(*(m.version(name) for name in " + repr(SHOWN) + "))"
    versions = run(python, "-c", ask)[1].split()
    status, printed = run(python, "-W", "error", "-m", "halfstep")
    steps = f"{printed.count(EVERY_BIT)} of 2 frameworks"
    command = (
        "-m",
        "pytest",
        "-q",
        "-p",
        "no:cacheprovider",
        "--import-mode=importlib",
        "tests/test_vectors.py",
    )
    failed, report = run(python, *command)
    if status or failed:
        print(f"{name}\n{printed}\n{report[-8000:]}", file=sys.stderr)
    counts = re.findall(r"(\d+) (passed|failed|error)", report.splitlines()[-1])
    vectors = ", ".join(" ".join(count) for count in counts)
    cells = (name, platform.python_version(), *versions, steps, vectors)
    return not (status or failed), f"| {' | '.join(cells)} |"


def main() -> int:
    """Print the table; return the exit status."""
    print(f"| set | Python | {' | '.join(SHOWN)} | steps that hold every bit | golden vectors |")
    print("|---|---|" + "---|" * len(SHOWN) + "---|---|", flush=True)
    right = True
    for name in SETS:
        holds, cells = row(name)
        right &= holds
        print(cells, flush=True)
    return int(not right)


if __name__ == "__main__":
    sys.exit(main())

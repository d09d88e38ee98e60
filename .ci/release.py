"""Build what a release publishes, and try it where nothing else is installed.

    make release-check
    python .ci/release.py --pythons 3.10 3.12 3.13

Leaves in dist/: the wheel, the sdist, vectors.zip, and SHA256SUMS. `twine check` reads the metadata. Then
each bare environment gets the wheel and one set of extras, or the sdist and no extras. In the environment,
`python -m halfstep` takes steps in the frameworks that are there, and compares them with the reference.
`python -m halfstep.check` checks a backend against vectors.zip. With --pythons the wheel of dist/ is tried
under other Pythons too, with each set of extras. Pythons that are not on this machine are named.
"""

import argparse
import hashlib
import os
import pathlib
import re
import shutil
import subprocess
import sys
import tempfile
import time
import zipfile

ROOT = pathlib.Path(__file__).parents[1]
DIST, VECTORS = ROOT / "dist", ROOT / "shared_spec" / "vectors"
ADAPTER = ROOT / "examples" / "adapters" / "plain_python.py"
BARE = {"jax": ("jax",), "torch": ("torch",), "all": ("jax", "torch"), "": ()}
"""Extras, and the frameworks that they bring; without extras the sdist is installed."""
PINS = ROOT / "constraints.txt"


def run(*command: object, folder: pathlib.Path = ROOT) -> str:
    """Return what a command prints; its failure is ours. Only what is installed can be imported."""
    environment = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
    words = [str(word) for word in command]
    done = subprocess.run(words, cwd=folder, env=environment, capture_output=True, text=True)
    if done.returncode:
        sys.exit(f"{' '.join(words)}\n{done.stdout}{done.stderr}")
    return done.stdout


def write_vectors(archive: pathlib.Path) -> None:
    """Write the golden vectors as an archive that depends on nothing but them."""
    with zipfile.ZipFile(archive, "w", zipfile.ZIP_DEFLATED) as file:
        for path in sorted(VECTORS.glob("*.json")):
            file.writestr(zipfile.ZipInfo(f"vectors/{path.name}"), path.read_bytes(), zipfile.ZIP_DEFLATED)


def version_of(python: str) -> str:
    """Return the version of a Python; "" where there is none."""
    found = shutil.which(python)
    if not found:
        return ""
    done = subprocess.run([found, "--version"], capture_output=True, text=True)
    return "" if done.returncode else done.stdout.split()[1]


def pins(version: str, folder: pathlib.Path) -> pathlib.Path:
    """Return the constraints for a Python: for 3.10, which the pinned NumPy and JAX left, torch's alone."""
    if not version.startswith("3.10."):
        return PINS
    path = folder / "constraints.txt"
    path.write_text("\n".join(line for line in PINS.read_text().splitlines() if line.startswith("torch==")))
    return path


def try_bare(python: str, extras: str, frameworks: tuple[str, ...], folder: pathlib.Path) -> str:
    """Install into an environment of its own, take steps, ask the vectors; return what held."""
    version = version_of(python)
    run(python, "-m", "venv", folder)
    python = folder / "bin" / "python"
    install = (python, "-m", "pip", "install", "--quiet", "--disable-pip-version-check")
    install = (*install, "-c", pins(version, folder))
    if "torch" in frameworks:
        run(*install, "torch")  # first and alone, as in the Makefile
    (built,) = DIST.glob("*.whl" if extras else "*.tar.gz")
    run(*install, f"{built}[{extras}]" if extras else built)
    run(python, "-m", "pip", "check", "--disable-pip-version-check")
    printed = run(python, "-W", "error", "-m", "halfstep", folder=folder)
    parts = printed.split("\n\n")  # one of each framework; torch's has plain steps and kernels
    held = sum("every bit is the bit of the reference" in part for part in parts)
    missing = set(re.findall(r"^(\w+) is not installed$", printed, re.MULTILINE))
    if held != len(frameworks) or missing != {"jax", "torch"} - set(frameworks):
        sys.exit(f"With extras {extras or 'none'}, python -m halfstep prints\n{printed}")
    versions = re.findall(r"^((?:jax|torch) [\d.]+)", printed, re.MULTILINE)
    check = (python, "-m", "halfstep.check", ADAPTER, "--vectors", DIST / "vectors.zip")
    *_, summary = run(*check, folder=folder).splitlines()
    about = ", ".join([f"Python {version}", f"extras {extras or 'none'}", *versions])
    return f"{built.name}, {about}: steps in {held} frameworks; vectors: {summary}"


def try_python(python: str, sets: dict[str, tuple[str, ...]]) -> None:
    """Print what held under a Python for each set of extras."""
    for extras, frameworks in sets.items():
        start = time.perf_counter()
        with tempfile.TemporaryDirectory() as folder:
            held = try_bare(python, extras, frameworks, pathlib.Path(folder))
        print(f"{held} ({time.perf_counter() - start:.0f} s)", flush=True)


def build() -> None:
    """Build dist/ anew, and print the sums of its files."""
    shutil.rmtree(DIST, ignore_errors=True)
    run(sys.executable, "-m", "build", "--no-isolation", "--outdir", DIST, ROOT)
    write_vectors(DIST / "vectors.zip")
    packages = [*DIST.glob("*.whl"), *DIST.glob("*.tar.gz")]
    print(run(sys.executable, "-m", "twine", "--no-color", "check", "--strict", *packages), end="")
    files = sorted([*packages, DIST / "vectors.zip"])
    sums = "".join(f"{hashlib.sha256(path.read_bytes()).hexdigest()}  {path.name}\n" for path in files)
    (DIST / "SHA256SUMS").write_text(sums)
    print(sums, end="", flush=True)


def main() -> None:
    """Build, check, install, try; or try what is built under other Pythons."""
    parser = argparse.ArgumentParser(description="Build what a release publishes, and try it.")
    parser.add_argument("--pythons", nargs="+", help="such as 3.10: try the wheel of dist/ under these alone")
    others = parser.parse_args().pythons
    if not others:
        build()
        try_python(sys.executable, BARE)
    for name in others or []:
        if version_of(f"python{name}"):
            try_python(f"python{name}", {extras: names for extras, names in BARE.items() if extras})
        else:
            print(f"Python {name} is not on this machine: not tried", flush=True)


if __name__ == "__main__":
    main()

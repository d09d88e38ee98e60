"""Build what a release publishes, and try it where nothing else is installed.

    make release-check

Leaves in dist/: the wheel, the sdist, vectors.zip, and SHA256SUMS. `twine check` reads the metadata. Then
each bare environment gets the wheel and one set of extras, or the sdist and none. In it `python -m halfstep`
takes steps in the frameworks that are there and compares them with the reference, and
`python -m halfstep_spec.check` holds a backend against vectors.zip.
"""

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


def try_bare(extras: str, frameworks: tuple[str, ...], folder: pathlib.Path) -> str:
    """Install into an environment of its own, take steps, ask the vectors; return what held."""
    python = folder / "bin" / "python"
    pip = (
        python,
        "-m",
        "pip",
        "install",
        "--quiet",
        "--disable-pip-version-check",
        "-c",
        ROOT / "constraints.txt",
    )
    run(sys.executable, "-m", "venv", folder)
    if "torch" in frameworks:
        run(*pip, "torch")  # first and alone, as in the Makefile
    (built,) = DIST.glob("*.whl" if extras else "*.tar.gz")
    run(*pip, f"{built}[{extras}]" if extras else built)
    run(python, "-m", "pip", "check", "--disable-pip-version-check")
    printed = run(python, "-W", "error", "-m", "halfstep", folder=folder)
    held = len(re.findall("every bit is the bit of the reference", printed))
    missing = set(re.findall(r"^(\w+) is not installed$", printed, re.MULTILINE))
    if held != len(frameworks) or missing != {"jax", "torch"} - set(frameworks):
        sys.exit(f"With extras {extras or 'none'}, python -m halfstep prints\n{printed}")
    check = (python, "-m", "halfstep_spec.check", ADAPTER, "--vectors", DIST / "vectors.zip")
    *_, summary = run(*check, folder=folder).splitlines()
    return f"{built.name}, extras {extras or 'none'}: steps in {held} frameworks; vectors: {summary}"


def main() -> None:
    """Build, check, install, try."""
    shutil.rmtree(DIST, ignore_errors=True)
    run(sys.executable, "-m", "build", "--outdir", DIST, ROOT)
    write_vectors(DIST / "vectors.zip")
    packages = [*DIST.glob("*.whl"), *DIST.glob("*.tar.gz")]
    print(run(sys.executable, "-m", "twine", "--no-color", "check", "--strict", *packages), end="")
    files = sorted([*packages, DIST / "vectors.zip"])
    sums = "".join(f"{hashlib.sha256(path.read_bytes()).hexdigest()}  {path.name}\n" for path in files)
    (DIST / "SHA256SUMS").write_text(sums)
    print(sums, end="", flush=True)
    for extras, frameworks in BARE.items():
        start = time.perf_counter()
        with tempfile.TemporaryDirectory() as folder:
            held = try_bare(extras, frameworks, pathlib.Path(folder))
        print(f"{held} ({time.perf_counter() - start:.0f} s)", flush=True)


if __name__ == "__main__":
    main()

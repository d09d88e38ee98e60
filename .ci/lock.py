"""Pin what the pinned packages bring, and the hashes of all: constraints.txt, and a lock per environment.

    make lock
    python .ci/lock.py --install dev    # into the environment of this Python

Each environment of the Makefile is resolved without installing anything, from the pins that stand. What is
pinned stays, what is new gets the version that was found, and what no environment needs any more goes. To
have newer ones, take their lines out first.

`.ci/locks` has the hashes, each of the file that this Python and platform took. With another, versions alone
are held, by constraints.txt. torch has none, nor what its CUDA build brings: an index may have its build for
a CPU as another file. A set-up installs the lock first, without what it asks for, and torch after it: then
nothing else is left to fetch.
"""

import json
import pathlib
import re
import subprocess
import sys
import sysconfig
import tempfile
from collections.abc import Iterable, Iterator, Mapping, Sequence

CONSTRAINTS = pathlib.Path(__file__).parents[1] / "constraints.txt"
LOCKS = pathlib.Path(__file__).parent / "locks"
BROUGHT = "# What these bring, by `make lock`."
# torch's build for CUDA pins them, each to one version.
WITH_TORCH = ("nvidia-", "cuda-", "triton")


def canonical(name: str) -> str:
    """Return a package's name as an index compares it."""
    return re.sub(r"[-_.]+", "-", name).lower()


def pins(text: str) -> dict[str, str]:
    """Return the versions of a file of constraints, by canonical name."""
    found = re.findall(r"^([\w.-]+)==(\S+)$", text, re.MULTILINE)
    return {canonical(name): version for name, version in found}


def lock_of(environment: str) -> pathlib.Path:
    """Return the file with an environment's hashes for this Python and platform."""
    return LOCKS / f"{environment}-{sys.implementation.cache_tag}-{sysconfig.get_platform()}.txt"


def resolved(*packages: str) -> Iterator[tuple[str, str, str]]:
    """Yield (canonical name, version, hash) of all that pip would install for some packages."""
    with tempfile.TemporaryDirectory() as folder:
        report = pathlib.Path(folder) / "report.json"
        options = ("--dry-run", "--ignore-installed", "--quiet", "--report", report, "-c", CONSTRAINTS)
        subprocess.run([sys.executable, "-m", "pip", "install", *options, *packages], check=True)
        for row in json.loads(report.read_text())["install"]:
            name, version = canonical(row["metadata"]["name"]), row["metadata"]["version"].split("+")[0]
            if name != "halfstep" and not name.startswith(WITH_TORCH):
                yield name, version, row["download_info"]["archive_info"]["hashes"]["sha256"]


def hashed(packages: Iterable[tuple[str, str, str]]) -> str:
    """Return a lock: each package with its hash, but torch."""
    rows = sorted(row for row in packages if row[0] != "torch")
    return "".join(f"{name}=={version} --hash=sha256:{digest}\n" for name, version, digest in rows)


def locked(text: str, environments: Iterable[Mapping[str, str]]) -> str:
    """Return a file of constraints with what environments bring besides its first half.

    Raises:
        ValueError: if two environments have two versions of a package.
    """
    direct = text.split(BROUGHT)[0].rstrip("\n")
    brought: dict[str, str] = {}
    for versions in environments:
        for name, version in versions.items():
            if name in pins(direct):
                continue
            if brought.setdefault(name, version) != version:
                raise ValueError(
                    f"lock: {name} is {brought[name]} in one environment and {version} in another. "
                    "Pin it by hand."
                )
    return "\n".join([direct, BROUGHT, *(f"{name}=={brought[name]}" for name in sorted(brought)), ""])


def _environments(words: Iterable[str]) -> Iterator[list[str]]:
    """Yield the name and packages of each environment: what stands between two "--"."""
    packages: list[str] = []
    for word in [*words, "--"]:
        if word == "--":
            yield packages
            packages = []
        else:
            packages.append(word)


def _with_alone(words: Sequence[str]) -> Iterator[tuple[str, str, str]]:
    """Yield what packages bring, and behind a "+" those that come without what they ask for."""
    cut = [*words, "+"].index("+")
    yield from resolved(*words[:cut])
    if alone := words[cut + 1 :]:
        yield from resolved("--no-deps", *alone)


def install(environment: str) -> None:
    """Install an environment's lock into this Python's, if there is one of it and of this platform."""
    lock = lock_of(environment)
    if lock.exists():
        options = ("-qq", "--disable-pip-version-check", "--require-hashes", "--no-deps", "-r", str(lock))
        subprocess.run([sys.executable, "-m", "pip", "install", *options], check=True)
    else:
        print(f"{lock.name} is not there: versions are held, and not hashes.")


def main() -> int:
    """Write constraints.txt's second half and the locks, or install one."""
    if sys.argv[1] == "--install":
        install(sys.argv[2])
        return 0
    found: list[dict[str, str]] = []
    for name, *packages in _environments(sys.argv[1:]):
        rows = set(_with_alone(packages))
        lock_of(name).write_text(hashed(rows))
        found.append({package: version for package, version, _ in rows})
    CONSTRAINTS.write_text(locked(CONSTRAINTS.read_text(), found))
    return 0


if __name__ == "__main__":
    sys.exit(main())

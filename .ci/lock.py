"""Pin what the pinned packages bring: the second half of constraints.txt, for every environment.

    make lock

Each environment of the Makefile is resolved without installing anything, from the pins that stand. What is
pinned stays, what is new gets the version that was found, and what no environment needs any more goes. To
have newer ones, take their lines out first. Versions are pinned, and not hashes. pip asks for hashes of
everything or of nothing: there are none of this folder, and torch's CPU build is another file than the
index has.
"""

import json
import pathlib
import re
import subprocess
import sys
import tempfile
from collections.abc import Iterable, Iterator, Mapping

CONSTRAINTS = pathlib.Path(__file__).parents[1] / "constraints.txt"
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


def resolved(packages: Iterable[str]) -> dict[str, str]:
    """Return the versions of all that pip would install for some packages, by canonical name."""
    with tempfile.TemporaryDirectory() as folder:
        report = pathlib.Path(folder) / "report.json"
        options = ("--dry-run", "--ignore-installed", "--quiet", "--report", report, "-c", CONSTRAINTS)
        subprocess.run([sys.executable, "-m", "pip", "install", *options, *packages], check=True)
        rows = [row["metadata"] for row in json.loads(report.read_text())["install"]]
    return {canonical(row["name"]): row["version"].split("+")[0] for row in rows}


def locked(text: str, environments: Iterable[Mapping[str, str]]) -> str:
    """Return a file of constraints with what environments bring besides its first half.

    Raises:
        ValueError: if two environments have two versions of a package.
    """
    direct = text.split(BROUGHT)[0].rstrip("\n")
    brought: dict[str, str] = {}
    for versions in environments:
        for name, version in versions.items():
            if name in pins(direct) or name == "halfstep" or name.startswith(WITH_TORCH):
                continue
            if brought.setdefault(name, version) != version:
                raise ValueError(
                    f"lock: {name} is {brought[name]} in one environment and {version} in another. "
                    "Pin it by hand."
                )
    return "\n".join([direct, BROUGHT, *(f"{name}=={brought[name]}" for name in sorted(brought)), ""])


def _environments(words: Iterable[str]) -> Iterator[list[str]]:
    """Yield the packages of each environment: what stands between two "--"."""
    packages: list[str] = []
    for word in [*words, "--"]:
        if word == "--":
            yield packages
            packages = []
        else:
            packages.append(word)


def main() -> int:
    """Write the second half of constraints.txt."""
    found = [resolved(packages) for packages in _environments(sys.argv[1:]) if packages]
    CONSTRAINTS.write_text(locked(CONSTRAINTS.read_text(), found))
    return 0


if __name__ == "__main__":
    sys.exit(main())

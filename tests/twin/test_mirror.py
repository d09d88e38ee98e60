"""Both packages have the same public names and the same files, or `docs/mirror.md` says why not."""

import pathlib
import re

import pytest

import halfstep_jax
import halfstep_torch

ROOT = pathlib.Path(__file__).parents[2]


def explained(section: str) -> dict[str, set[str]]:
    """Return the names that a section of docs/mirror.md lists, by the column of the package that has them."""
    text = (ROOT / "docs" / "mirror.md").read_text()
    table = text.split(f"## {section}\n", 1)[1].split("\n## ", 1)[0]
    found = {"jax": set(), "torch": set()}
    for row in re.findall(r"^\| `([^`]+)` \| (jax|torch) \|", table, flags=re.MULTILINE):
        found[row[1]].add(row[0])
    return found


def files(folder: str) -> set[str]:
    return {path.relative_to(ROOT / folder).as_posix() for path in (ROOT / folder).rglob("*.py")}


NAMES = {"jax": set(halfstep_jax.__all__), "torch": set(halfstep_torch.__all__)}
FILES = {"jax": files("pkg_jax/halfstep_jax"), "torch": files("pkg_torch/halfstep_torch")}


@pytest.mark.parametrize(("section", "found"), [("Public names", NAMES), ("Files", FILES)])
def test_a_difference_between_the_packages_is_explained(section, found):
    docs = explained(section)
    assert found["jax"] - found["torch"] == docs["jax"]
    assert found["torch"] - found["jax"] == docs["torch"]

"""The site shows every public name and every format; `make docs` builds it and follows its links."""

import importlib
import pathlib
import subprocess
import sys

import pytest
import yaml

ROOT = pathlib.Path(__file__).parents[1]
REFERENCE = yaml.safe_load((ROOT / "docs" / "site" / "reference.yml").read_text())


def names_of(column: int) -> list[str]:
    """Return the names that the reference lists for JAX (0) or for PyTorch (1)."""
    rows = [entry.split("|") for page in REFERENCE.values() for entry in page["names"]]
    return [name for row in rows if (name := (row * 2 if len(row) == 1 else row)[column].strip())]


@pytest.mark.parametrize(("column", "package"), [(0, "halfstep_jax"), (1, "halfstep_torch")])
def test_the_reference_has_every_public_name_once(column, package):
    assert sorted(names_of(column)) == sorted(importlib.import_module(package).__all__)


def test_names_that_both_packages_share_are_in_the_reference():
    shared = set(importlib.import_module("halfstep").__all__) - {"__version__"}
    assert shared <= set(names_of(0)) | set(names_of(1))


@pytest.mark.slow
def test_the_page_of_formats_shows_what_the_reference_gives():
    command = [sys.executable, str(ROOT / "benchmarks" / "formats.py"), "--check"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stdout + done.stderr


def test_the_page_of_formats_shows_every_diagram():
    page = (ROOT / "docs" / "concepts" / "formats.md").read_text()
    pictures = {path.name for path in (ROOT / "docs" / "images" / "formats").glob("*.svg")}
    assert len(pictures) > 10
    assert all(f"(../images/formats/{name})" in page for name in pictures)


def test_every_page_is_in_the_navigation():
    """Strict MkDocs says so too, in an environment of its own."""
    navigation = (ROOT / "mkdocs.yml").read_text()
    pages = [path.relative_to(ROOT).as_posix() for path in (ROOT / "docs").rglob("*.md")]
    notebooks = [path.relative_to(ROOT).as_posix() for path in (ROOT / "notebooks").glob("*.ipynb")]
    assert all(f" {path}\n" in navigation for path in pages + notebooks)

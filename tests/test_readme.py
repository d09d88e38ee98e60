"""The Python examples of the README and of docs/ run as they stand; notebooks keep their outputs."""

import collections
import importlib.util
import json
import pathlib
import re
import subprocess
import sys
from collections.abc import Iterator
from typing import Any

import pytest

ROOT = pathlib.Path(__file__).parents[1]
PAGES = (ROOT / "README.md", *sorted((ROOT / "docs").rglob("*.md")))
TEXTS = (*PAGES, ROOT / "shared_spec" / "README.md", *sorted(ROOT.glob("[!R]*.md")))
NOTEBOOKS = sorted((ROOT / "notebooks").glob("*.ipynb"))


def blocks_of(page: pathlib.Path) -> list[str]:
    """Return the Python examples of a page, each a script of its own."""
    return re.findall(r"^```python\n(.*?)^```", page.read_text(), flags=re.DOTALL | re.MULTILINE)


CLIENTS = (
    *("transformers", "accelerate", "lightning", "torchao", "torchtitan"),
    *("bitsandbytes", "adamw_bf16", "torchastic", "labml_nn"),
)
"""Libraries that examples drive or come from, in an environment of their own (`make clients`)."""


def client_of(block: str) -> str:
    """Return which client an example imports, or ""."""
    return next((name for name in CLIENTS if re.search(f"^(from|import) {name}", block, re.MULTILINE)), "")


def alone(block: str) -> bool:
    """Whether an example has a process to itself: it sets what a framework reads when it is imported."""
    return bool(client_of(block)) or "os.environ" in block


def examples() -> Iterator[Any]:
    """Yield the examples of every folder as scripts by place, those that can share a process in one."""
    shared: dict[str, dict[str, str]] = collections.defaultdict(dict)
    for page in PAGES:
        folder = page.parent.relative_to(ROOT).as_posix()
        for i, block in enumerate(blocks_of(page)):
            place = f"{page.relative_to(ROOT).as_posix()}, example {i + 1}"
            if not alone(block):
                shared[folder][place] = block
                continue
            client, marks = client_of(block), []
            if client:
                missing = importlib.util.find_spec(client) is None
                marks = [
                    pytest.mark.clients,
                    pytest.mark.skipif(missing, reason=f"{client} is not installed"),
                ]
            yield pytest.param(client, {place: block}, id=place, marks=marks)
    for folder, blocks in shared.items():
        yield pytest.param("", blocks, id=folder)


def test_each_quick_start_has_an_example_of_its_framework():
    for page, package in (("jax", "halfstep_jax"), ("pytorch", "halfstep_torch")):
        (block,) = blocks_of(ROOT / "docs" / f"quick-start-{page}.md")
        assert f"import {package} as hs" in block


@pytest.mark.slow
@pytest.mark.parametrize(("client", "blocks"), list(examples()))
def test_examples_run(client, blocks, tmp_path):
    """Each in a namespace of its own, as it stands; of one folder in one process, which imports once.

    An example that waits forever says where each of its threads waits.
    """
    script = tmp_path / "examples.py"
    runs = ["import faulthandler; faulthandler.dump_traceback_later(280, exit=True)"]
    runs += [
        f"exec(compile({block!r}, {place!r}, 'exec'), {{'__name__': '__main__'}})"
        for place, block in blocks.items()
    ]
    script.write_text("\n".join(runs))
    # Clients warn of what they do themselves.
    strict = [] if client else ["-W", "error"]
    command = [sys.executable, *strict, str(script)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=300, cwd=tmp_path)
    assert done.returncode == 0, done.stderr


# Pages that the site makes, and what tells it which of two pictures the dark has; `make docs` follows both.
ON_THE_SITE = r"reference/messages\.md|.*\.svg#only-(?:light|dark)"


@pytest.mark.parametrize("page", TEXTS, ids=lambda page: str(page.relative_to(ROOT)))
def test_links_lead_to_files_and_headings_that_exist(page):
    for target in re.findall(r"\]\((?!https?:)([^)]+)\)", page.read_text()):
        if re.fullmatch(ON_THE_SITE, target):
            continue
        path, _, heading = target.partition("#")
        file = (page.parent / path) if path else page
        assert file.exists(), target
        headings = re.findall(r"^#+ (.*)$", file.read_text(), flags=re.MULTILINE) if heading else []
        assert not heading or heading in [anchor(text) for text in headings], target


def anchor(heading: str) -> str:
    """Return the name under which code hosts link to a heading."""
    return re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-")


@pytest.mark.parametrize("notebook", NOTEBOOKS, ids=lambda path: path.stem)
def test_notebooks_keep_the_outputs_of_one_run(notebook):
    """They read on a code host, where nothing is executed."""
    cells = [cell for cell in json.loads(notebook.read_text())["cells"] if cell["cell_type"] == "code"]
    assert [cell["execution_count"] for cell in cells] == list(range(1, len(cells) + 1))
    for cell in cells:
        shows = re.search(r"plt\.show\(|print\(|^\w+\Z", "".join(cell["source"]), flags=re.MULTILINE)
        assert bool(shows) == bool(cell["outputs"]), "".join(cell["source"])[:200]
        assert not [
            out for out in cell["outputs"] if out["output_type"] == "error" or out.get("name") == "stderr"
        ]


def words_of(text: str) -> int:
    """Return how many words and numbers a text has."""
    return len(re.findall(r"[^\s|]*\w[^\s|]*", text))


def test_the_readme_has_at_most_900_words():
    """Without its programs, and with its tables."""
    text = re.sub(r"^```.*?^```", "", (ROOT / "README.md").read_text(), flags=re.DOTALL | re.MULTILINE)
    assert words_of(text) <= 900


@pytest.fixture
def written(monkeypatch):
    """The lines of tables that `make peers` and `make tables` would write now, by page."""
    monkeypatch.syspath_prepend(str(ROOT / "benchmarks"))
    comparison, tables = map(importlib.import_module, ("comparison", "record_tables"))
    texts = comparison.pages()
    texts |= {
        page: "\n".join(tables.text_of(table()) for table in of.values())
        for page, of in tables.TABLES.items()
    }
    for name in ("comparison", "record_tables"):
        sys.modules.pop(name)
    return {
        page: {line for line in text.splitlines() if line.startswith("|")} for page, text in texts.items()
    }


def test_the_pages_have_at_most_28_000_words_beside_the_tables_that_a_command_writes(written):
    """Prose, programs and other tables, on every page of docs/."""
    words = 0
    for page in PAGES[1:]:
        tables = written.get(page.relative_to(ROOT).as_posix(), set())
        words += words_of("\n".join(line for line in page.read_text().splitlines() if line not in tables))
    assert words <= 28_000


@pytest.mark.parametrize("page", TEXTS, ids=lambda page: str(page.relative_to(ROOT)))
def test_lines_of_prose_have_at_most_120_characters(page):
    prose = re.sub(r"^```.*?^```", "", page.read_text(), flags=re.DOTALL | re.MULTILINE)
    long = [
        line for line in prose.splitlines() if len(line) > 120 and not line.lstrip().startswith(("|", "!["))
    ]
    assert not long

"""The site shows every public name and every format; `make docs` builds it and follows its links."""

import functools
import importlib
import inspect
import json
import pathlib
import re
import shutil
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


DOCS_PYTHON = ROOT / ".venv-docs" / "bin" / "python"
# The docstring that Griffe gives the pages for each public name, and the sentence in the table of its page.
DOCSTRINGS = """
import griffe, json, sys
sys.path.insert(0, "docs/site")
import hooks

extensions, paths = griffe.load_extensions("docs/site/docstrings.py"), ["pkg_jax", "pkg_torch", "shared_spec"]
loader = griffe.GriffeLoader(search_paths=paths, allow_inspection=False, extensions=extensions)
for package in ("halfstep", *hooks.PACKAGES.values()):
    loader.load(package)
loader.resolve_aliases(external=None)
shown = {
    f"{package}.{name}": (loader.modules_collection[hooks.documented(package, name)], package, name)
    for package in hooks.PACKAGES.values()
    for name in hooks.sources(package)
}
print(json.dumps({
    path: (
        x.docstring.value if x.docstring else "",
        hooks.first_sentence(package, name),
        [name for name, method in x.functions.items() if name[0] != "_" and not method.docstring],
    )
    for path, (x, package, name) in shown.items()
}))
"""


@pytest.mark.slow
@pytest.mark.skipif(not DOCS_PYTHON.is_file(), reason="needs `make docs`")
def test_every_public_name_has_its_docstring_in_the_reference():
    command = [str(DOCS_PYTHON), "-c", DOCSTRINGS]
    environment = {"PATH": "/usr/bin:/bin"}
    done = subprocess.run(
        command, cwd=ROOT, capture_output=True, text=True, timeout=120, check=True, env=environment
    )
    found = json.loads(done.stdout)
    assert len(found) == len(names_of(0)) + len(names_of(1))
    for path, (shown, sentence, bare_methods) in found.items():
        package, name = path.split(".")
        said = inspect.getdoc(getattr(importlib.import_module(package), name))
        first = " ".join(said.split("\n\n")[0].split())
        assert first, path
        assert " ".join(shown.split()).startswith(first), path
        assert sentence, path
        assert first.startswith(sentence.replace("\\|", "|")), path
        assert not bare_methods, path


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


def test_texts_of_a_diagram_do_not_overprint():
    """A letter of 12 pixels takes a box of 6.5 x 14 or less."""
    text = re.compile(r'<text x="([\d.]+)" y="([\d.]+)"(?: text-anchor="(\w+)")?>([^<]*)<')
    shift = {"": 0, "middle": 0.5, "end": 1}
    for path in (ROOT / "docs" / "images" / "formats").glob("*.svg"):
        boxes = []
        for x, y, anchor, letters in text.findall(path.read_text()):
            width = 6.5 * len(letters)
            left = float(x) - shift[anchor] * width
            box = (left, left + width, float(y) - 11, float(y) + 3)
            over = [
                o for *b, o in boxes if box[0] < b[1] and b[0] < box[1] and box[2] < b[3] and b[2] < box[3]
            ]
            assert not over, f"{path.name}: {letters!r} over {over}"
            boxes.append((*box, letters))
        assert len(boxes) > 10


def test_every_page_is_in_the_navigation_or_named_as_left_out():
    """Strict MkDocs checks it too, in an environment of its own."""
    navigation = (ROOT / "mkdocs.yml").read_text()
    pages = [path.relative_to(ROOT).as_posix() for path in (ROOT / "docs").rglob("*.md")]
    notebooks = [path.relative_to(ROOT).as_posix() for path in (ROOT / "notebooks").glob("*.ipynb")]
    assert all(f" {path}\n" in navigation for path in pages + notebooks)


NODE = shutil.which("node")
# What the script of the page Try it gives without a page: `tests/test_site_in_browser.py` has a browser.
TRY = """
eval(require("fs").readFileSync("try-data.js", "utf8"));
const { agreeing, loss, parameters } = require(process.argv[2]);
const said = (text) => { try { return parameters(text) } catch (error) { return error.message } };
const { vectors } = HALFSTEP;
vectors[0][4] = vectors[0][4].replace(/^./, (x) => x === "7" ? "6" : "7");
console.log(JSON.stringify({
  agree: [agreeing(vectors.slice(1)), agreeing(vectors.slice(0, 1)), vectors.length],
  lost: [loss(1e-7, 0.02, "bfloat16").lost, loss(0.1, 0.02, "bfloat16").lost],
  moved: loss(1e-5, 0.02, "bfloat16").stochastic,
  counts: ["8B", "350M", "8e9", "-5", "many"].map(said),
}));
"""


@pytest.mark.skipif(NODE is None, reason="needs node")
def test_the_page_try_it_rounds_as_every_golden_vector_and_reads_numbers(tmp_path, monkeypatch):
    monkeypatch.syspath_prepend(str(ROOT / "docs" / "site"))
    (tmp_path / "try-data.js").write_text(importlib.import_module("try_data").script(ROOT))
    sys.modules.pop("try_data")
    (tmp_path / "run.js").write_text(TRY)
    command = [NODE, "run.js", str(ROOT / "docs" / "site" / "try.js")]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, timeout=60, check=True)
    found = json.loads(done.stdout)
    vectors = found["agree"][2]
    assert vectors > 150
    assert found["agree"] == [vectors - 1, 0, vectors]  # one was changed
    assert found["lost"][0] > 0.99 > 0.01 > found["lost"][1]
    assert abs(found["moved"] - 1) < 1e-5  # the mean over all words, not one draw
    assert found["counts"][:3] == [8e9, 35e7, 8e9]
    assert found["counts"][3:] == [
        "-5 parameters: use a number from 1 to 1e15.",
        '"many" is no number of parameters. Write 8e9, 8B or 350M.',
    ]


@pytest.fixture(scope="module")
def messages():
    """The module that reads every message from the source, as the site does; it reads once."""
    with pytest.MonkeyPatch.context() as patched:
        patched.syspath_prepend(str(ROOT / "docs" / "site"))
        module = importlib.import_module("messages")
        patched.setattr(module, "messages", functools.cache(module.messages))
        yield module
    sys.modules.pop("messages", None)


# A line that raises or logs, and does not hand on what another says, as `raise ValueError(self.problem)`.
HANDED_ON = r"\w+: |(self\.)?problem\)|name\)|refusal\("
SAYS = re.compile(rf"\b(?:raise \w*(?:Error|Exception)|say_once|warnings\.warn)\((?!{HANDED_ON})")


def test_the_index_has_the_text_of_every_error_and_log_line(messages):
    """Found by words, not by the walk that makes the index: each line that raises or logs is in it."""
    known = {(message.file, message.line) for message in messages.messages(ROOT)}
    files = [path for package in messages.PACKAGES for path in sorted((ROOT / package).rglob("*.py"))]
    lines = {
        (path.relative_to(ROOT).as_posix(), number)
        for path in files
        for number, line in enumerate(path.read_text().splitlines(), 1)
        if SAYS.search(line) and not line.lstrip().startswith(("def ", "#", ">>>"))
    }
    assert len(lines) > 100
    assert not lines - known


@pytest.mark.parametrize(
    ("call", "error"),
    [
        ("halfstep_jax.adamw(1e-3, recipe='nope')", ValueError),
        ("halfstep_jax.adamw(1e-3, mu_dtype='nope')", ValueError),
        ("halfstep_torch.scale_by_adam(b1=2.0)", ValueError),
        ("halfstep_jax.adamw(1e-3, seed='one')", TypeError),
    ],
)
def test_an_error_that_a_user_meets_is_in_the_index(messages, call, error):
    packages = {name: importlib.import_module(name) for name in ("halfstep_jax", "halfstep_torch")}
    with pytest.raises(error) as met:
        eval(call, packages)
    said = " ".join(str(met.value).split())
    forms = (
        re.sub(r"(?:\\ )?…(?:\\ )?", ".*", re.escape(message.text)) for message in messages.messages(ROOT)
    )
    assert any(re.fullmatch(form, said) for form in forms if len(form) > 20), said


def test_the_index_is_in_order_and_links_to_the_source(messages):
    page = messages.page(ROOT, "https://source")
    assert all(title[0].isupper() for title in re.findall("^## (.*)", page, re.MULTILINE))
    assert "## ValueError" in page
    assert "## Log lines and warnings" in page
    for file, line in re.findall(r"\(https://source/(\S+)#L(\d+)\)", page):
        assert len((ROOT / file).read_text().splitlines()) >= int(line)

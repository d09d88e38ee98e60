"""What a user's type checker says of the programs of the pages, and of a recipe that there is not."""

import importlib.util
import itertools
import json
import os
import pathlib
import re
import subprocess
import sys
import tokenize
from collections.abc import Iterator
from typing import get_args

import pytest

from halfstep import recipes
from test_readme import PAGES, ROOT, blocks_of, client_of

# Optax's states are declared as any tree at all, so that a checker knows no field of them.
OF_OPTAX = dict.fromkeys(("reportAttributeAccessIssue", "reportIndexIssue"), "none")
WRONG = {
    "torch": 'hs.AdamW([], recipe="nope")',
    "torch, in place": 'hs.AdamW([], **hs.recipes.one_pass, lr="fast")',
    "jax": 'hs.adamw(1e-3, param_storage="split9")',
    "jax, rounding": 'hs.scale_by_schedule_free(mu_rounding="none")',
}


ROOTS = [str(ROOT / name) for name in ("pkg_jax", "pkg_torch", "shared_spec")]
# As a user has it, whose packages are installed; Optax and Orbax have no types.
MYPY = f"""
[mypy]
strict = True
mypy_path = {os.pathsep.join(ROOTS)}
[mypy-halfstep.*,halfstep_jax.*,halfstep_torch.*,halfstep_spec.*]
follow_imports = silent
[mypy-optax.*,orbax.*]
ignore_missing_imports = True
"""
# Programs of a chain and of a loop are strict in full. Others may leave functions of their own without types.
STRICT = ("docs_how_to_optax_chain_1", "docs_how_to_pytorch_loop_1")
LESS = "# mypy: allow-untyped-defs, allow-untyped-calls\n"


def write_programs(folder: pathlib.Path) -> None:
    """Write the programs of all pages, each as a file, and what there is not as files `in_...`."""
    for page in PAGES:
        name = re.sub(r"\W", "_", str(page.relative_to(ROOT).with_suffix("")))
        for i, block in enumerate(blocks_of(page)):
            if not client_of(block):
                program = f"{name}_{i + 1}"
                (folder / f"{program}.py").write_text(block + ("" if program in STRICT else LESS))
    for name, line in WRONG.items():
        text = f"import halfstep_{name.split(',')[0]} as hs\n\n{line}\n"
        (folder / f"in_{name.replace(', ', '_').replace(' ', '_')}.py").write_text(text)


def wrong_lines(folder: pathlib.Path) -> set[str]:
    """Return the lines that are wrong on purpose, as `FILE:LINE`."""
    return {f"{path.name}:3" for path in folder.glob("in_*.py")}


def found_by_pyright(folder: pathlib.Path, **settings) -> set[str]:
    """Return `FILE:LINE message` of everything that pyright finds in a folder's files."""
    config = {"include": ["."], "extraPaths": ROOTS, "typeCheckingMode": "basic", "pythonVersion": "3.10"}
    (folder / "pyrightconfig.json").write_text(json.dumps(config | settings))
    command = [sys.executable, "-m", "pyright", "--pythonpath", sys.executable, "--outputjson", "-p", "."]
    done = subprocess.run(command, cwd=folder, capture_output=True, text=True, timeout=300)
    found = json.loads(done.stdout)["generalDiagnostics"]
    return {f"{pathlib.Path(x['file']).name}:{x['range']['start']['line'] + 1} {x['message']}" for x in found}


@pytest.mark.slow
def test_pyright_passes_the_programs_of_all_pages_and_finds_a_recipe_or_a_storage_that_there_is_not(tmp_path):
    write_programs(tmp_path)
    found = found_by_pyright(tmp_path, **OF_OPTAX)
    assert {x.split(" ")[0] for x in found} == wrong_lines(tmp_path), found


@pytest.mark.slow
@pytest.mark.skipif(importlib.util.find_spec("mypy") is None, reason="`make setup` brings mypy")
def test_mypy_strict_passes_the_programs_of_all_pages_and_finds_what_there_is_not(tmp_path):
    write_programs(tmp_path)
    (tmp_path / "mypy.ini").write_text(MYPY)
    command = [
        sys.executable,
        "-m",
        "mypy",
        "--no-incremental",
        "--no-error-summary",
        "--hide-error-context",
        ".",
    ]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, timeout=600)
    found = re.findall(r"^(\S+?:\d+): error:", done.stdout, re.MULTILINE)
    assert set(found) == wrong_lines(tmp_path), done.stdout + done.stderr


def test_the_type_of_a_recipe_names_them_all():
    names, _ = get_args(recipes.Recipe)
    assert set(get_args(names)) == set(dir(recipes))


def statements(path: pathlib.Path) -> Iterator[tuple[list[tokenize.TokenInfo], list[str]]]:
    """Yield the code of every logical line, and the comments in it and right above it."""
    code: list[tokenize.TokenInfo] = []
    comments: list[tokenize.TokenInfo] = []
    with path.open("rb") as file:
        for token in tokenize.tokenize(file.readline):
            if token.type == tokenize.NEWLINE:
                first = code[0].start[0]
                yield code, [x.string for x in comments if x.start[0] >= first - 1]
                code, comments = [], []
            elif token.type == tokenize.COMMENT:
                comments.append(token)
            elif token.string.strip() and token.type not in (tokenize.ENCODING, tokenize.NL):
                code.append(token)


def unexplained(path: pathlib.Path) -> list[str]:
    """Return `FILE:LINE` of what says Any and neither why, nor that it is an alias with a docstring."""
    found, after = [], [*statements(path), ([], [])]
    for (code, comments), (following, _) in itertools.pairwise(after):
        words = [x.string for x in code]
        is_alias = code[0].start[1] == 0 and words[1:2] in (["="], [":"])
        explained = is_alias and bool(following) and following[0].type == tokenize.STRING
        explained |= any("ignore[" not in comment for comment in comments)
        if "Any" in words and words[0] not in ("from", "import") and not explained:
            found.append(f"{path.relative_to(ROOT)}:{code[0].start[0]}")
    return found


@pytest.mark.parametrize("package", ["pkg_jax", "pkg_torch", "shared_spec/halfstep"])
def test_any_is_an_alias_with_a_docstring_or_has_a_comment_that_says_why(package):
    found = [x for path in sorted((ROOT / package).rglob("*.py")) for x in unexplained(path)]
    assert not found, "Use a type, `object` or an alias such as Array; or say in a comment what it is."

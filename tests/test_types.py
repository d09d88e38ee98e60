"""What a user's type checker says of the programs of the pages, and of a recipe that there is not."""

import json
import pathlib
import subprocess
import sys
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


def errors(folder: pathlib.Path, **settings) -> set[str]:
    """Return `FILE:LINE message` of everything that pyright finds in a folder's files."""
    roots = [str(ROOT / name) for name in ("pkg_jax", "pkg_torch", "shared_spec")]
    config = {"include": ["."], "extraPaths": roots, "typeCheckingMode": "basic", "pythonVersion": "3.10"}
    (folder / "pyrightconfig.json").write_text(json.dumps(config | settings))
    command = [sys.executable, "-m", "pyright", "--pythonpath", sys.executable, "--outputjson", "-p", "."]
    done = subprocess.run(command, cwd=folder, capture_output=True, text=True, timeout=300)
    found = json.loads(done.stdout)["generalDiagnostics"]
    return {f"{pathlib.Path(x['file']).name}:{x['range']['start']['line'] + 1} {x['message']}" for x in found}


@pytest.mark.slow
def test_the_programs_of_all_pages_pass_a_type_checker(tmp_path):
    for page in PAGES:
        name = "_".join(page.relative_to(ROOT).with_suffix("").parts)
        for i, block in enumerate(blocks_of(page)):
            if not client_of(block):
                (tmp_path / f"{name}_{i + 1}.py").write_text(block)
    assert not errors(tmp_path, **OF_OPTAX)


@pytest.mark.slow
def test_a_type_checker_finds_a_recipe_or_a_storage_that_there_is_not(tmp_path):
    for name, line in WRONG.items():
        text = f"import halfstep_{name.split(',')[0]} as hs\n\n{line}\n"
        (tmp_path / f"in_{name.replace(', ', '_').replace(' ', '_')}.py").write_text(text)
    found = errors(tmp_path)
    assert {x.split(" ")[0] for x in found} == {f"{path.name}:3" for path in tmp_path.glob("*.py")}


def test_the_type_of_a_recipe_names_them_all():
    names, _ = get_args(recipes.Recipe)
    assert set(get_args(names)) == set(dir(recipes))

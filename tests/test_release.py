"""What a release needs beside its code: metadata, the files that a code host shows, and that they agree."""

import pathlib
import re
import sys

import pytest
import yaml

import halfstep
import halfstep_jax
import halfstep_torch

if sys.version_info >= (3, 11):
    import tomllib
else:
    tomllib = pytest.importorskip("tomli")

ROOT = pathlib.Path(__file__).parents[1]
PLACEHOLDER = "halfstep.invalid"
TEMPLATES = sorted((ROOT / ".github" / "ISSUE_TEMPLATE").glob("*.yml"))


def text(name: str) -> str:
    return (ROOT / name).read_text()


PROJECT = tomllib.loads(text("pyproject.toml"))["project"]


def test_one_line_has_the_address_of_the_project():
    suffixes = {".md", ".toml", ".cff", ".yml", ".yaml", ".py", ".ipynb"}
    folders = ("", ".github/**/", "docs/**/", "shared_spec/*", "notebooks/", "examples/**/", "benchmarks/")
    files = {path for folder in folders for path in ROOT.glob(f"{folder}*") if path.suffix in suffixes}
    lines = [line for path in files for line in path.read_text().splitlines() if PLACEHOLDER in line]
    assert lines == [f'address = "https://{PLACEHOLDER}"']


def test_one_version_is_named_everywhere():
    citation = yaml.safe_load(text("CITATION.cff"))
    assert citation["version"] == halfstep.__version__
    assert re.findall(r"^## (\S+?),? ", text("CHANGELOG.md"), re.MULTILINE)[0] == halfstep.__version__
    assert halfstep_jax.__version__ == halfstep_torch.__version__ == halfstep.__version__
    assert citation["license"] == PROJECT["license"]


def test_a_release_has_at_most_fifteen_lines_of_changes():
    for release in text("CHANGELOG.md").split("\n## ")[1:]:
        assert 0 < len(re.findall("^- ", release, re.MULTILINE)) <= 15


def test_the_notice_names_constants_that_the_reference_uses():
    source = "".join(path.read_text() for path in (ROOT / "shared_spec" / "halfstep_spec").rglob("*.py"))
    constants = re.findall(r"0x[0-9a-f]{8}", text("NOTICE"))
    tables = re.findall(r'"(u?(?:dynamic|linear)\d)"', text("NOTICE"))
    assert len(constants) == 3
    assert len(tables) == 2
    assert all(name.lower() in source.lower() for name in [*constants, *tables])
    assert {"LICENSE", "NOTICE"} == set(PROJECT["license-files"])


def test_the_commands_of_contributors_are_targets():
    targets = re.findall(r"^([a-z-]+):", text("Makefile"), re.MULTILINE)
    named = re.findall(r"make ([a-z ]+)[`\n ]", re.sub(r" +#.*", "", text("CONTRIBUTING.md")))
    assert named
    assert {target for words in named for target in words.split()} <= set(targets)


def test_hooks_run_what_the_makefile_runs():
    (repository,) = yaml.safe_load(text(".pre-commit-config.yaml"))["repos"]
    assert repository["repo"] == "local"
    for hook in repository["hooks"]:
        command = hook["entry"].removeprefix(".venv/bin/").removesuffix(" --force-exclude")
        assert re.search(rf"/{re.escape(command)}(?= |$)", text("Makefile"), re.MULTILINE), command


@pytest.mark.parametrize("template", TEMPLATES, ids=lambda path: path.stem)
def test_templates_are_forms(template):
    form = yaml.safe_load(template.read_text())
    assert {"name", "description", "body"} <= set(form)
    for field in form["body"]:
        assert field["type"] in {"textarea", "input", "dropdown"}
        assert field["attributes"]["label"]


@pytest.mark.parametrize("name", ["ci", "release"])
def test_every_command_of_a_workflow_exists(name):
    """No host has run the workflows, so a test reads them."""
    jobs = yaml.safe_load(text(f".github/workflows/{name}.yml"))["jobs"]
    commands = [step["run"] for job in jobs.values() for step in job["steps"] if "run" in step]
    targets = re.findall(r"^([a-z-]+):", text("Makefile"), re.MULTILINE)
    for command in commands:
        first, *rest = command.split()
        assert first in {"make", "python", ".ci/run"}, command
        assert first != "make" or set(rest) <= set(targets), command
        assert all((ROOT / word).exists() for word in command.split() if "/" in word), command


def test_the_workflow_runs_the_python_that_the_package_claims():
    matrix = yaml.safe_load(text(".github/workflows/ci.yml"))["jobs"]["platforms"]["strategy"]["matrix"]
    assert f">={matrix['python'][0]}" == PROJECT["requires-python"]


def test_the_oldest_versions_that_are_tried_are_the_floors_of_the_package():
    oldest = dict(pair.split("==") for pair in re.findall(r"\w+==[\d.]+", text(".ci/versions.py")))
    extras = PROJECT["optional-dependencies"]
    floors = dict(need.split(">=") for need in [*PROJECT["dependencies"], *extras["jax"], *extras["torch"]])
    assert oldest.keys() == floors.keys()
    for name, floor in floors.items():
        assert f"{oldest[name]}.".startswith(f"{floor}."), name

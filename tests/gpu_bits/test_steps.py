"""What is executed is all that there is: a new format, recipe, rule or storage is found, or named here."""

import json
import pathlib
import re

import pytest

import halfstep_spec as spec
from gpu_bits import moment_formats
from gpu_bits.steps import NOT_EXECUTED, steps
from halfstep.storage.codes import CODES
from halfstep.storage.moment_formats import ROUNDINGS

ROOT = pathlib.Path(__file__).parents[2]


@pytest.fixture(scope="module")
def made() -> list[spec.Step]:
    return list(steps().values())


def test_all_codes_are_executed():
    assert moment_formats.not_executed() == []
    assert len(moment_formats.pairs()) >= max(map(len, CODES.values()))


def test_pairs_of_formats_become_steps_with_weights_of_either_width(made):
    adams = [step for step in made if type(step.rule) is spec.ScaleByAdam]
    for pair in moment_formats.pairs():
        formats = tuple(map(moment_formats.as_spec, pair))
        dtypes = {step.param_dtype for step in adams if _formats(step) == formats}
        assert dtypes >= {"bfloat16", "float32"}, moment_formats.text(pair)


def _formats(step: spec.Step) -> tuple[spec.Format, ...]:
    moments = step.rule.moments
    return tuple(spec.as_format(moments[name].dtype) for name in ("mu", "nu"))


def test_all_recipes_rules_storages_and_roundings_are_executed(made):
    names = "\n".join(steps())
    assert len(moment_formats.recipe_options()) >= 6
    assert all(f"recipe {name}" in names for name in moment_formats.recipe_options())
    rules = {kind for name, kind in spec.RULES.items() if name not in NOT_EXECUTED}
    assert {type(step.rule) for step in made} >= {*rules, spec.StoreState}
    assert {step.param_storage for step in made} == set(spec.PARAM_STORAGES)
    assert {step.rule.moments["mu"].rounding for step in made if "mu" in step.rule.moments} == {
        name for name in ROUNDINGS if name not in ("auto", "nearest_unchecked")
    }


def test_the_record_is_of_these_versions_and_steps_and_the_pages_quote_it():
    """`make gpu-bits` writes it. What was run again, such as a new step, takes its place in it."""
    path = max((ROOT / "benchmarks/results").glob("*-gpu-bits.json"))
    record = json.loads(path.read_text())
    pins = "".join((ROOT / name).read_text() for name in ("constraints.txt", "Makefile"))
    pinned = dict(re.findall(r"^(?:TRITON := )?([\w-]+)==([\w.]+)", pins, re.MULTILINE))
    assert record["gpu_bits"] == "all"
    for name, version in record["versions"].items():
        assert version.split("+")[0] == pinned[name]
    assert [file for file, counts in record["tests"].items() if counts.keys() != {"passed"}] == []
    assert record["differing"] == 0
    for compiler in ("XLA", "Triton"):
        assert {row["step"] for row in record["rows"] if row["compiler"] == compiler} == set(steps())
    checks = (ROOT / "docs/project.md").read_text()
    assert path.name in checks
    assert path.name in (ROOT / "shared_spec/README.md").read_text()
    for name in ("XLA_steps", "Triton_steps", "launches", "bits", "differing_by_A8", "differing_if_wild"):
        assert f"{record[name]:,}" in checks, name

"""The vector files: form, freshness, and what guards them."""

import dataclasses
import json
import shutil

import jsonschema
import pytest

from golden import VECTORS
from halfstep_spec import RULES, SPEC_VERSION
from halfstep_spec.cases import FILES as FILES_OF_CASES
from halfstep_spec.generate import build, changed_answers, differing
from halfstep_spec.vectors import FOLDER, Case, file_text, load

FILES = sorted(
    path.name for path in FOLDER.glob("*.json") if path.name not in ("manifest.json", "schema.json")
)


@pytest.fixture
def copied(tmp_path):
    return shutil.copytree(FOLDER, tmp_path / "vectors")


@pytest.mark.parametrize("name", FILES)
def test_files_have_the_form_of_the_schema(name):
    schema = json.loads((FOLDER / "schema.json").read_text())
    data = json.loads((FOLDER / name).read_text())
    jsonschema.validate(data, schema)
    keys = [case["key"] for case in data["cases"]]
    assert keys == sorted(set(keys))


def test_the_schema_refuses_what_it_does_not_know():
    schema = json.loads((FOLDER / "schema.json").read_text())
    data = json.loads((FOLDER / FILES[0]).read_text()) | {"host": "mine"}
    with pytest.raises(jsonschema.ValidationError, match="host"):
        jsonschema.validate(data, schema)


@pytest.mark.slow
def test_the_spec_still_gives_every_byte():
    built = build()
    assert differing(built) == []
    assert changed_answers(built) == []


@pytest.mark.slow
def test_a_changed_byte_is_found(copied):
    path = copied / "moments.json"
    path.write_text(path.read_text().replace("3f800000", "3f800001", 1))
    assert differing(build(), copied) == ["moments.json"]
    assert changed_answers(build(), copied)
    with pytest.raises(ValueError, match=r"moments.json has sha256"):
        load(SPEC_VERSION, copied)


def test_every_rule_has_vectors():
    """A rule is found by its file, and its cases by theirs."""
    assert RULES.keys() <= FILES_OF_CASES.keys()
    asked = {case.op for cases in VECTORS.values() for case in cases}
    assert {f"{name}_step" for name in RULES} <= asked


def test_a_new_case_changes_no_answer_and_one_that_goes_or_differs_does(copied):
    built = {name: (FOLDER / name).read_text() for name in FILES}
    data = json.loads(built["moments.json"])
    gone = data["cases"].pop(3)
    (copied / "moments.json").write_text(json.dumps(data))
    assert changed_answers(built, copied) == []
    assert changed_answers(built | {"moments.json": json.dumps(data)}) == [f"moments.json#{gone['key']}"]
    data["cases"][0]["comment"] = "another comment"
    assert changed_answers(built | {"moments.json": json.dumps(data)}, copied) == []
    data["cases"][0]["outputs"]["correction"]["bits"] = "3f800000"
    key = data["cases"][0]["key"]
    assert changed_answers(built | {"moments.json": json.dumps(data)}, copied) == [f"moments.json#{key}"]


def test_a_question_is_asked_once():
    case = VECTORS["moments"][0]
    notes = dict.fromkeys(case.flags, "a note of ten letters")
    with pytest.raises(ValueError, match=f"twice asks {case.key} twice"):
        file_text("twice", notes, [case, dataclasses.replace(case, comment="in other words")], SPEC_VERSION)


def test_a_key_that_is_not_that_of_its_question_is_refused():
    data = json.loads((FOLDER / "moments.json").read_text())["cases"][0]
    data["inputs"]["b"]["bits"] = "3f000001"
    with pytest.raises(ValueError, match=f"the case named {data['key']} asks"):
        Case.from_json(data)


@pytest.mark.slow
def test_a_missing_or_superfluous_file_is_found(copied):
    (copied / "adam.json").rename(copied / "eve.json")
    assert differing(build(), copied) == ["adam.json", "eve.json"]
    with pytest.raises(ValueError, match="do not match the manifest"):
        load(SPEC_VERSION, copied)


def test_another_spec_version_is_refused():
    with pytest.raises(
        ValueError, match=f"spec_version={SPEC_VERSION}, this reader knows {SPEC_VERSION + 1}"
    ):
        load(SPEC_VERSION + 1)

"""The vector files: form, freshness, and what guards them."""

import json
import shutil

import jsonschema
import pytest

from halfstep_spec import SPEC_VERSION
from halfstep_spec.generate import build, changed_answers, differing
from halfstep_spec.vectors import FOLDER, load

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


@pytest.mark.slow
def test_a_missing_or_superfluous_file_is_found(copied):
    (copied / "adam.json").rename(copied / "eve.json")
    assert differing(build(), copied) == ["adam.json", "eve.json"]
    with pytest.raises(ValueError, match="do not match the manifest"):
        load(SPEC_VERSION, copied)


def test_another_spec_version_is_refused():
    with pytest.raises(ValueError, match="spec_version=1, this reader knows 2"):
        load(SPEC_VERSION + 1)


def test_every_clause_that_a_case_names_stands_in_the_contract():
    text = (FOLDER.parent / "README.md").read_text()
    named = {clause for cases in load(SPEC_VERSION).values() for case in cases for clause in case.clauses}
    assert named
    assert not [clause for clause in sorted(named) if f"**{clause}**" not in text]

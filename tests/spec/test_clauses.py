"""Every clause of the contract has a golden vector, or stands here with the test that holds it."""

import ast
import pathlib
import re

import pytest

from golden import VECTORS
from halfstep_spec.vectors import FOLDER

TESTS = pathlib.Path(__file__).parents[1]
CONTRACT = (FOLDER.parent / "README.md").read_text()

WITHOUT_VECTOR = {
    "A8": (
        "backends may differ there",
        "on_jax/test_exactness.py::test_only_results_below_2_to_the_minus_101_depend_on_subnormal_numbers",
    ),
    "F20": ("a default and what is refused", "twin/test_muon.py::test_what_the_momentum_is_kept_in"),
    "G2": (
        "the two frameworks call the step in different ways",
        "on_jax/test_accumulation.py::test_between_steps_nothing_moves_and_the_inner_state_stays",
    ),
    "T1": ("a file, not numbers", "twin/test_state_file.py::test_both_writers_write_the_same_bytes"),
    "T2": ("a file, not numbers", "twin/test_state_file.py::test_a_file_with_any_byte_changed_is_refused"),
    "T3": (
        "names of arrays in a file",
        "twin/test_state_file.py::test_all_readers_find_what_was_written_and_so_does_safetensors",
    ),
    "T4": ("JSON text in a file", "twin/test_state_file.py::test_a_header_is_json_as_others_read_it"),
    "T5": ("bad input", "twin/test_refused_files.py::test_a_run_with_another_recipe_is_refused_by_both"),
    "C1": ("about all vectors", "test_vectors.py::test_backend_gives_the_golden_bits"),
    "C2": ("about devices", "gpu/test_vectors_on_device.py::test_a_device_gives_the_golden_bits"),
    "C3": (
        "about devices",
        "on_jax/test_roots.py::test_no_root_and_no_quotient_of_a_step_is_left_uncorrected_on_a_gpu",
    ),
    "C4": ("about devices", "test_gpu_programs.py::test_operations_that_round_otherwise_are_found"),
    "C5": (
        "a bound for devices",
        "spec/test_adam.py::test_a_root_and_a_quotient_that_are_off_move_the_term_by_no_more_than_their_bound",
    ),
    "C6": ("it says what was not run", "gpu/test_vectors_on_device.py::test_a_device_gives_the_golden_bits"),
}
"""By clause: why no vector shows it, and the test that holds it."""


def clauses_in(text: str) -> list[str]:
    """Return the clauses that a text states, in its order."""
    return re.findall(r"^- \*\*([A-Z]\d+)\*\*", text, re.MULTILINE)


def clauses_without_vector(text: str) -> list[str]:
    asked = {clause for cases in VECTORS.values() for case in cases for clause in case.clauses}
    return [clause for clause in clauses_in(text) if clause not in asked]


def test_every_clause_has_a_vector_or_a_reason():
    """A clause that gets its first vector leaves the list."""
    assert clauses_without_vector(CONTRACT) == sorted(WITHOUT_VECTOR, key=clauses_in(CONTRACT).index)


def test_a_new_clause_without_a_vector_is_found():
    new = CONTRACT.replace("- **M2**", "- **M9** Moments are kept.\n- **M2**")
    assert set(clauses_without_vector(new)) - WITHOUT_VECTOR.keys() == {"M9"}


def test_every_clause_that_a_case_names_stands_in_the_contract():
    named = {clause for cases in VECTORS.values() for case in cases for clause in case.clauses}
    assert not named - set(clauses_in(CONTRACT))


def test_a_clause_is_stated_once():
    clauses = clauses_in(CONTRACT)
    assert len(clauses) == len(set(clauses)) > 60


@pytest.mark.parametrize("clause", WITHOUT_VECTOR)
def test_the_test_that_holds_a_clause_is_there(clause):
    path, name = WITHOUT_VECTOR[clause][1].split("::")
    functions = [node.name for node in ast.parse((TESTS / path).read_text()).body if hasattr(node, "name")]
    assert name in functions

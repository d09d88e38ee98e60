"""The header of a state file: what is not of its form is refused by its place."""

import copy
import re

import pytest

from halfstep.checkpoint.header_form import check_entry, check_header

LINK = {
    "name": "scale_by_adam",
    "count": 2**31 - 1,
    "seed": [0, 2**32 - 1],
    "numbers": {"b1": 0.9, "weight_decay": 0, "learning_rate": None},
    "options": {"nesterov": False},
    "arrays": {"mu": {"format": {"dtype": "bfloat16"}}},
    "idle": False,
}
HEADER = {
    "writer": "halfstep 0.1.0",
    "spec_version": 3,
    "layout_version": 1,
    "leaves": {"a": 0, "b": 1},
    "recipes": [[LINK], [{**LINK, "count": None, "seed": None}]],
    "formats": {"x": {"dtype": "int8"}},
}
BAD = [
    *((("recipes", 0, 0, "count"), bad) for bad in (-1, 2**31, True, 1.0, "1")),
    *(
        (("recipes", 0, 0, "seed"), bad)
        for bad in ([0, -1], [2**32, 0], [0, True], ["0", 0], [0], [0] * 3, 0)
    ),
    *((("recipes", 0, 0, "numbers", "b1"), bad) for bad in ("0.9", True, [0.9])),
    *((("recipes", 0, 0, "options", "nesterov"), bad) for bad in (0, None)),
    *((("recipes", 0, 0, "arrays", "mu", "format", "dtype"), bad) for bad in (None, 16)),
    *((("leaves", "b"), bad) for bad in (2, -1, False, 0.0)),
    *((("spec_version",), bad) for bad in ("2", 2.0, True)),
    (("recipes",), {}),
    (("recipes", 1), LINK),
]


@pytest.mark.parametrize(("path", "bad"), BAD)
def test_a_header_of_another_form_is_refused_by_its_place(path, bad):
    check_header("load", "f", HEADER)
    header = copy.deepcopy(HEADER)
    *parents, last = path
    inner = header
    for key in parents:
        inner = inner[key]
    inner[last] = bad
    place = ".*".join(re.escape(str(key)) for key in path if not isinstance(key, int))
    with pytest.raises(ValueError, match=f"^load: f has not what save_state writes at: the header.*{place}"):
        check_header("load", "f", header)


@pytest.mark.parametrize("name", HEADER)
def test_a_part_of_a_header_that_is_missing_is_refused(name):
    with pytest.raises(ValueError, match="has not what save_state writes at: the header"):
        check_header("load", "f", {key: value for key, value in HEADER.items() if key != name})


@pytest.mark.parametrize("offsets", [[0], [0, 1, 2], [0, "1"], [True, 1]])
def test_an_array_has_two_offsets(offsets):
    entry = {"dtype": "F32", "shape": [1], "data_offsets": [0, 4]}
    check_entry("load", "f", "w", entry)
    with pytest.raises(ValueError, match=r"the entry of 'w', data_offsets"):
        check_entry("load", "f", "w", {**entry, "data_offsets": offsets})

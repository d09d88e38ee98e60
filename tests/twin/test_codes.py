"""What `halfstep` knows of the codes of every format is what the reference computes for itself."""

import numpy as np
import pytest

from halfstep.storage import codes, tables
from halfstep_spec.storage import codes as spec
from halfstep_spec.storage import relative_codes as spec_codes
from halfstep_spec.storage import tables as spec_tables

REFERENCE = {
    "plain": spec.PLAIN_CODES,
    "scaled": {**spec.SCALED_CODES, **spec.CODEBOOK_CODES},
    "fixed": spec_codes.FIXED_CODES,
    "fine": spec_codes.FINE_CODES,
}
ENTRIES = [(family, name) for family, entries in codes.CODES.items() for name in entries]
FACTS = ("signed", "packed", "for_second_moments", "dithered")


def test_both_know_the_same_formats():
    assert {family: set(entries) for family, entries in codes.CODES.items()} == {
        family: set(entries) for family, entries in REFERENCE.items()
    }


@pytest.mark.parametrize(("family", "name"), ENTRIES)
def test_what_is_known_of_codes_is_what_the_reference_has(family, name):
    ours, theirs = codes.CODES[family][name], REFERENCE[family][name]
    assert [getattr(ours, fact) for fact in FACTS] == [getattr(theirs, fact) for fact in FACTS]
    # The packages take float32 as never freezing (contract F3).
    assert ours.half_gap == (0 if name == "float32" else theirs.half_gap)
    if family in ("scaled", "fine"):
        assert ours.nan_in_scale == theirs.nan_in_scale
        assert ours.scale_range == theirs.scale_range


@pytest.mark.parametrize("name", spec_tables.TABLES)
def test_tables_are_those_of_the_reference(name):
    ours, theirs = tables.TABLES[name], spec_tables.TABLES[name]
    np.testing.assert_array_equal(ours.values.view(np.uint32), theirs.values.view(np.uint32))
    assert (ours.zero, ours.signed) == (theirs.zero, theirs.signed)

"""The comparisons and the runner can fail: if this file is green, green means something."""

import dataclasses

import numpy as np
import pytest

from backends import SpecBackend
from compare import assert_same, differing, within_ulps
from golden import VECTORS
from halfstep_spec.vectors import Array, is_nan


def f32(*patterns: int) -> Array:
    return Array("float32", np.array(patterns, np.uint32), "bits")


def test_zeros_of_different_sign_differ():
    assert differing(f32(0x00000000), f32(0x80000000)).all()


def test_nan_payloads_are_one_class():
    assert not differing(f32(0x7FC00000, 0x7FFFFFFF), f32(0xFFC00001, 0x7F800001)).any()


def test_nan_differs_from_a_number_and_from_infinity():
    assert differing(f32(0x7FC00000, 0x7F800000), f32(0x3F800000, 0x7FC00000)).all()


@pytest.mark.parametrize(
    "other",
    [
        Array("bfloat16", np.array([0x3F80], np.uint16), "bits"),
        Array("float32", np.array([[0x3F800000]], np.uint32), "bits"),
        Array("float32", np.array([], np.uint32), "bits"),
        Array("uint32", np.array([0x3F800000], np.uint32), "bits"),
    ],
    ids=["dtype", "shape", "empty", "label"],
)
def test_another_dtype_or_shape_is_no_match(other):
    with pytest.raises(AssertionError, match="expected"):
        assert_same(other, f32(0x3F800000))


def test_ulps_end_where_they_say():
    one = f32(0x3F800000)
    assert within_ulps(f32(0x3F800003), one, 3).all()
    assert not within_ulps(f32(0x3F800004), one, 3).any()
    assert within_ulps(f32(0x80000001), f32(0x00000001), 2).all()
    assert not within_ulps(f32(0x7FC00000), one, 2**31).any()


@pytest.mark.parametrize("name", VECTORS)
def test_flipping_one_expected_bit_of_any_element_of_any_output_fails(name):
    backend = SpecBackend()
    for case in VECTORS[name]:
        actual = backend.run(case)
        assert actual.keys() == case.outputs.keys()
        for output, expected in case.outputs.items():
            assert_same(actual[output], expected, f"spec breaks {case.clauses} in {output} ({case.comment})")
            number = ~is_nan(expected.bits, expected.dtype)
            # The lowest bit, so that nothing coarser than bits can pass. NaN would stay NaN: it becomes 0.
            flipped = dataclasses.replace(
                expected, bits=np.where(number, expected.bits ^ 1, 0).astype(expected.bits.dtype)
            )
            assert differing(actual[output], flipped).all(), f"{name}#{case.key} {output}"
            if expected.bits.size and expected.compare == "bits":
                with pytest.raises(AssertionError, match="elements differ"):
                    assert_same(actual[output], flipped)


@pytest.mark.parametrize("name", VECTORS)
def test_an_answer_past_its_ulps_fails(name):
    backend = SpecBackend()
    for case in VECTORS[name]:
        near = {output: array for output, array in case.outputs.items() if array.compare != "bits"}
        actual = backend.run(case) if near else {}
        for output, expected in near.items():
            assert expected.compare["because"]
            past = expected.bits + np.array(expected.compare.get("ulps", 0) + 1, expected.bits.dtype)
            if "norm" in expected.compare:
                past = np.float32(1 + 2 * expected.compare["norm"]) * expected.bits.view(np.float32)
                past = past.view(np.uint32)
            with pytest.raises(AssertionError, match=r"elements differ|norm of the difference"):
                assert_same(actual[output], dataclasses.replace(expected, bits=past))


def test_an_unknown_op_is_refused_by_name():
    case = dataclasses.replace(VECTORS["moments"][0], op="divine")
    with pytest.raises(LookupError, match="divine"):
        SpecBackend().run(case)

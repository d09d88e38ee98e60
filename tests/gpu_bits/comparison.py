"""A step as a program gave it, held against the contract."""

import numpy as np

from gpu_bits.steps import nearly_subnormal
from halfstep_spec.compare import differing
from halfstep_spec.vectors import Array, Case


def differences(case: Case, actual: dict[str, Array]) -> dict[str, int]:
    """Return how many numbers differ, by the name of the array; of A8's weights by that and "(A8)"."""
    found: dict[str, int] = {}
    excused = nearly_subnormal(case)
    for name, expected in case.outputs.items():
        got = actual[name]
        assert (got.dtype, got.bits.shape) == (expected.dtype, expected.bits.shape), name
        wrong = differing(got, expected)
        of_a8 = wrong & excused if wrong.shape == excused.shape else np.zeros_like(wrong)
        for label, count in ((name, (wrong & ~of_a8).sum()), (f"{name} (A8)", of_a8.sum())):
            if count:
                found[label] = int(count)
    return found


def size(case: Case) -> dict[str, int]:
    """Return how many numbers are compared, and how many bits they have."""
    arrays = [array.bits for array in case.outputs.values()]
    return {"numbers": sum(x.size for x in arrays), "bits": 8 * sum(x.nbytes for x in arrays)}

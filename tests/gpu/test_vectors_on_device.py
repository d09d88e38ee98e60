"""The golden vectors, in both packages, on a device."""

import pytest

from backends import make
from backends.devices import on_device
from compare import assert_same
from golden import VECTORS


@pytest.mark.parametrize("name", VECTORS)
@pytest.mark.parametrize("backend", ["jax-jit", "torch-eager"])
def test_a_device_gives_the_golden_bits(backend, name, device, pytestconfig):
    one_in, runner, wrong = pytestconfig.getoption("--one-in"), make(backend), []
    cases = [case for case in VECTORS[name] if int(case.digest, 16) % one_in == 0]
    with on_device(device):
        for case in cases:
            try:
                actual = runner.run(case)
                for output, expected in case.outputs.items():
                    assert_same(actual[output], expected, f"clauses {', '.join(case.clauses)}, {output}")
            except Exception as error:  # what a device cannot do is to be seen beside what else it cannot
                wrong.append(f"{case.key} ({case.comment}): {type(error).__name__}: {str(error)[:300]}")
    assert not wrong, f"{len(wrong)} of {len(cases)} cases:\n" + "\n".join(wrong)

"""The golden vectors, by the programs that XLA makes for an H100."""

import pytest

from compare import assert_same
from golden import VECTORS
from gpu_bits.xla_backend import XlaBackend
from ptx.approximations import Approximations

# Each is a program to be compiled, or several.
_ONE_IN = {"share": 64, "all": 16}


@pytest.fixture(scope="module")
def backend() -> XlaBackend:
    return XlaBackend()


def pytest_generate_tests(metafunc):
    if "question" in metafunc.fixturenames:
        one_in = _ONE_IN[metafunc.config.getoption("--gpu-bits")]
        cases = [
            (name, case)
            for name, cases in VECTORS.items()
            for case in cases
            if int(case.digest, 16) % one_in == 0
        ]
        ids = [f"{name}/{case.key}" for name, case in cases]
        metafunc.parametrize("question", [case for _, case in cases], ids=ids)


def test_a_program_gives_the_golden_bits(question, backend):
    for how in ("exact", "random"):
        backend.approximations = Approximations(how)
        actual = backend.run(question)
        assert actual.keys() == question.outputs.keys()
        for name, expected in question.outputs.items():
            assert_same(actual[name], expected, f"{how}: {name} ({question.comment})")

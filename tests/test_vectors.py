"""One runner for all golden vectors: backend x file x case. The reference itself runs in test_meta.py."""

import os

import pytest

from backends import BACKENDS, make, missing
from compare import assert_same
from golden import VECTORS
from halfstep_spec.vectors import Case

_ONE_IN = {
    ("torch-compile", True): 48,
    ("torch-compile", False): 40,
    ("jax-sharded", True): 12,
    ("jax-sharded", False): 8,
    ("jax-eager", True): 20,
    ("jax-eager", False): 20,
    ("jax-jit", True): 6,
    ("jax-jit", False): 2,
}
"""By backend, and whether a case is a trajectory: of how many CI takes one. Each is seconds of compiling."""
_ONE_QUICK_IN = {"torch-eager": 1, "jax-jit": 40, "jax-eager": 240}
"""By backend: of how many cases one is quick. JAX compiles every operation of an eager case by itself."""


def _speed(backend: str, case: Case) -> list:
    """Where cases are programs to be compiled, few stay quick.

    Which, their digests say: a case stays where it is when others come.
    """
    number = int(case.digest, 16)
    if number % _ONE_QUICK_IN.get(backend, number + 1) == 0:
        return []
    rare = number % _ONE_IN.get((backend, case.op.endswith("_step")), 1)
    if rare:
        return [pytest.mark.exhaustive]
    return [pytest.mark.slow]


def _case_ids():
    for backend in (name for name in BACKENDS if name != "spec"):
        for name, cases in VECTORS.items():
            for case in cases:
                marks = _speed(backend, case)
                if missing(backend):
                    marks.append(pytest.mark.skip(reason=f"{BACKENDS[backend]} is not installed"))
                yield pytest.param(backend, name, case, id=f"{backend}/{name}/{case.key}", marks=marks)


@pytest.fixture(scope="module")
def backends():
    made = {}
    return lambda name: made.setdefault(name, None) or made.update({name: make(name)}) or made[name]


@pytest.mark.parametrize(("backend", "name", "case"), list(_case_ids()))
def test_backend_gives_the_golden_bits(backend, name, case, backends):
    actual = backends(backend).run(case)
    assert actual.keys() == case.outputs.keys()
    clauses = ", ".join(case.clauses)
    for output, expected in case.outputs.items():
        assert_same(
            actual[output], expected, f"{backend} breaks clause {clauses} in {output} ({case.comment})"
        )


def test_ci_skips_no_backend():
    if os.environ.get("CI"):
        assert not [name for name in BACKENDS if missing(name)]

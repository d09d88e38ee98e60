"""Steps of halfstep_jax, by the programs that XLA makes of them for an H100: the contract's bits."""

import pytest

from gpu_bits.approximations import HOWS, Approximations
from gpu_bits.comparison import count, differences
from gpu_bits.steps import LARGE, MIDDLE, SMALL, case, steps
from gpu_bits.xla_backend import XlaBackend

# Programs that compute an approximation in one kernel, its remainder too, and both again in another: their
# bits are right because a device gives the same approximation twice (contract C3).
TWICE = {("AdamW, e5m2, bfloat16 weights", MIDDLE)}


@pytest.fixture(scope="module")
def backend() -> XlaBackend:
    return XlaBackend()


def programs(config) -> list[tuple[str, tuple[int, int]]]:
    """Return what is run: all of it, or every step at the small shape and a few at the others."""
    few = ("AdamW, stochastic", "AdamW, e5m2, bfloat16 weights")
    larger = {"all": list(steps()), "share": few}[config.getoption("--gpu-bits")]
    shapes = {"all": (MIDDLE, LARGE), "share": (MIDDLE,)}[config.getoption("--gpu-bits")]
    return [(name, SMALL) for name in steps()] + [(name, shape) for shape in shapes for name in larger]


def pytest_generate_tests(metafunc):
    if "step" in metafunc.fixturenames:
        chosen = programs(metafunc.config)
        metafunc.parametrize(("step", "shape"), chosen, ids=[f"{n}, {s[0]}x{s[1]}" for n, s in chosen])


@pytest.mark.filterwarnings("ignore:overflow", "ignore:invalid value", "ignore:divide by zero")
def test_a_step_has_the_contracts_bits(step, shape, backend, record):
    question = case(step, shape, 4 if shape == SMALL else 2)
    found, launches, met = {}, {}, {}
    for how in HOWS:
        backend.approximations = Approximations(how)
        actual = backend.run(question)
        found |= {f"{how}: {name}": n for name, n in differences(question, actual).items()}
        launches[how] = sum(program.launches for program in backend.programs.values())
        met = {name: n for name, n in backend.approximations.met.items() if n}
    record(
        {
            "compiler": "XLA",
            "step": step,
            "shape": shape,
            "numbers": count(question),
            "launches": launches["exact"],
            "approximations": met,
            "differing": found,
        }
    )
    outside = {name: n for name, n in found.items() if not name.endswith("(A8)")}
    if (step, shape) in TWICE:
        assert outside
        outside = {name: n for name, n in outside.items() if not name.startswith("wild")}
    assert not outside

"""Steps of halfstep_torch, by the programs that Triton makes of them for an H100: the contract's bits."""

from collections.abc import Iterator

import pytest

from gpu_bits.comparison import differences, size
from gpu_bits.steps import LARGE, SMALL, case, one_in, steps
from gpu_bits.triton_backend import TritonBackend


@pytest.fixture(scope="module")
def backend() -> Iterator[TritonBackend]:
    backend = TritonBackend()
    with backend.kernels.as_on_gpu():
        yield backend


def programs(config) -> list[tuple[str, tuple[int, int]]]:
    """Return what is run: lengths are no part of a program, so one larger shape is enough."""
    names = one_in(1 if config.getoption("--gpu-bits") == "all" else 9, steps())
    return [(name, SMALL) for name in names] + [("AdamW, master", LARGE)]


def pytest_generate_tests(metafunc):
    if "step" in metafunc.fixturenames:
        chosen = programs(metafunc.config)
        metafunc.parametrize(("step", "shape"), chosen, ids=[f"{n}, {s[0]}x{s[1]}" for n, s in chosen])


@pytest.mark.filterwarnings("ignore")
def test_a_step_has_the_contracts_bits(step, shape, backend, record):
    question = case(step, shape, 4 if shape == SMALL else 2)
    launched = backend.kernels.launches
    found = differences(question, backend.run(question))
    launched = backend.kernels.launches - launched
    record(
        {
            "compiler": "Triton",
            "step": step,
            "shape": shape,
            **size(question),
            "launches": launched,
            "differing": found,
        }
    )
    assert launched
    # Nothing is approximate, so nothing may be moved.
    assert not any(backend.approximations.met.values())
    assert not found

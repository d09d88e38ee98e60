"""Fixtures of this folder."""

import pytest

from halfstep_torch.engine import compile_choice
from halfstep_torch.engine.kernels import kernel, norm_kernel
from halfstep_torch.leaves import group_names
from on_torch.demands import MAKERS


@pytest.fixture(params=MAKERS)
def make(request):
    return MAKERS[request.param]


@pytest.fixture(autouse=True)
def _no_optimizer_was_built():
    """An optimizer without names counts those that its process built before: here those of the test."""
    group_names._NAMELESS.clear()


@pytest.fixture
def fresh():
    """Forget compiled kernels before and after."""
    made = kernel.kernel_of, norm_kernel.norm_kernel_of
    for cached in made:
        cached.cache_clear()
    yield
    for cached in made:
        cached.cache_clear()


@pytest.fixture
def at_once(monkeypatch):
    """Let "auto" compile in the first step."""
    monkeypatch.setattr(compile_choice.CompileChoice, "has", lambda self, caller, k: k.is_ready(wait=True))

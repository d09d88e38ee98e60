"""Fixtures of this folder."""

import pytest

from halfstep_torch.engine import compile_choice, compiled_stage
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
    compiled_stage.compiled_stage.cache_clear()
    yield
    compiled_stage.compiled_stage.cache_clear()


@pytest.fixture
def at_once(monkeypatch):
    """Let "auto" compile in the first step."""
    monkeypatch.setattr(compile_choice, "_COST_OF_COMPILING", 1)

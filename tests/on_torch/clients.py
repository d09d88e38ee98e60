"""What tests that drive other libraries share."""

import importlib
import importlib.machinery
import importlib.util
import sys
from typing import Any
from unittest import mock

import pytest
import torch


def weights(model: torch.nn.Module) -> torch.Tensor:
    """Return all weights of a model, as one array."""
    return torch.cat([p.detach().reshape(-1) for p in model.parameters()])


def needs(client: str):
    """Mark a test that drives a library: `make clients` runs it, if the library is there."""
    missing = importlib.util.find_spec(client) is None
    skip = pytest.mark.skipif(missing, reason=f"{client} is not installed")
    # Clients warn of what they do themselves.
    marks = (pytest.mark.clients, skip, pytest.mark.filterwarnings("default"))

    def mark(test):
        for one in marks:
            test = one(test)
        return test

    return mark


def module_of(monkeypatch: pytest.MonkeyPatch, name: str, *besides: str) -> Any:
    """Import a module of a client as it is, without what its packages import, which asks for much more.

    `besides` are libraries that it imports for other ends: stand-ins take their place.
    """
    for library in besides:
        monkeypatch.setitem(sys.modules, library, mock.MagicMock())
    client, *_ = parts = name.split(".")
    found = importlib.util.find_spec(client)
    assert found is not None
    assert found.submodule_search_locations
    for i in range(1, len(parts)):
        spec = importlib.machinery.ModuleSpec(".".join(parts[:i]), None, is_package=True)
        spec.submodule_search_locations = ["/".join((found.submodule_search_locations[0], *parts[1:i]))]
        monkeypatch.setitem(sys.modules, spec.name, importlib.util.module_from_spec(spec))
    module = importlib.import_module(name)
    monkeypatch.setitem(sys.modules, name, module)
    return module

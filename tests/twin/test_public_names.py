"""What holds of each public name of a package."""

import inspect
import pickle
import types

import pytest

import halfstep_jax
import halfstep_torch

PUBLIC = [
    pytest.param(name, x, id=f"{package.__name__}-{name}")
    for package in (halfstep_jax, halfstep_torch)
    for name in package.__all__
    if not isinstance(x := getattr(package, name), types.ModuleType)
]


@pytest.mark.parametrize(("name", "x"), PUBLIC)
def test_a_public_name_is_found_by_a_pickle_and_has_a_docstring(name, x):
    """Also where its docstring is that of another, from which it is made."""
    assert pickle.loads(pickle.dumps(x)) is x
    assert getattr(x, "__name__", name) == name
    assert inspect.getdoc(x)

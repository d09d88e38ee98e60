"""The proof that `make twin` prints can fail, and does not."""

import importlib

import pytest

twin = importlib.import_module("twin")


@pytest.mark.slow
def test_no_bit_differs_and_one_that_does_is_counted(monkeypatch):
    record = twin.recorded_gradients(3)
    count, total = twin.differing_bits("sixteen_bit", record)
    assert (count, total) == (0, 16 * (64 * 128 + 128 + 128 * 10 + 10))
    original = twin.recipes
    other = {"sixteen_bit": {"param_storage": "nearest"}}
    monkeypatch.setattr(
        twin, "recipes", lambda package: other if package.__name__.endswith("torch") else original(package)
    )
    count, _ = twin.differing_bits("sixteen_bit", record)
    assert count > 0

"""The proof that `make twin` prints can fail, and does not."""

import importlib

import pytest


@pytest.mark.slow
def test_no_bit_differs_and_one_that_does_is_counted(monkeypatch):
    two = importlib.import_module("two_frameworks")
    record = two.recorded_gradients(3)
    count, total = two.differing_bits("sixteen_bit", record)
    assert (count, total) == (0, 16 * (64 * 128 + 128 + 128 * 10 + 10))
    original = two.recipes
    other = {"sixteen_bit": {"param_storage": "nearest"}}
    monkeypatch.setattr(
        two, "recipes", lambda package: other if package.__name__.endswith("torch") else original(package)
    )
    count, _ = two.differing_bits("sixteen_bit", record)
    assert count > 0

"""Marks of tests that drive other libraries."""

import importlib.util

import pytest


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

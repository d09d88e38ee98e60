"""Settings that must stand before any framework is imported; which of many slow cases CI takes."""

import os
import zlib

import pytest

# Eight host devices, so that sharded steps run on a machine without an accelerator.
_DEVICES = "--xla_force_host_platform_device_count=8"
if _DEVICES not in os.environ.get("XLA_FLAGS", ""):
    os.environ["XLA_FLAGS"] = f"{os.environ.get('XLA_FLAGS', '')} {_DEVICES}".strip()
os.environ.setdefault("JAX_PLATFORMS", "cpu")

_MANY = ("on_jax", "on_torch", "twin")
_ONE_IN = 4


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(items):
    """Of the cases of slow tests CI takes one in four, by its name; the rest are `make test-exhaustive`."""
    for item in items:
        case = item.get_closest_marker("slow") and "[" in item.name and item.path.parent.name in _MANY
        if case and zlib.crc32(item.nodeid.encode()) % _ONE_IN:
            item.add_marker(pytest.mark.exhaustive)

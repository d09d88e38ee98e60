"""What must stand before any framework is imported; how many slow cases CI takes; on what device."""

import os
import zlib

import pytest

# Eight host devices, so that sharded steps run on a machine without an accelerator.
_DEVICES = "--xla_force_host_platform_device_count=8"
if _DEVICES not in os.environ.get("XLA_FLAGS", ""):
    os.environ["XLA_FLAGS"] = f"{os.environ.get('XLA_FLAGS', '')} {_DEVICES}".strip()

_MANY = ("on_jax", "on_torch", "twin")
_ONE_IN = 4


def pytest_addoption(parser):
    """Add what the tests of `tests/gpu` ask for."""
    parser.addoption("--device", help='on which tests/gpu is run: "cuda", or "cpu" for its code alone')
    parser.addoption("--one-in", type=int, default=1, help="of how many golden vectors tests/gpu takes one")


def pytest_configure(config):
    """Let JAX see the CPU alone, but where a test was asked for that needs more."""
    if config.getoption("--device") in (None, "cpu"):
        os.environ.setdefault("JAX_PLATFORMS", "cpu")
    else:
        # Both frameworks share its memory, and so do processes.
        os.environ.setdefault("XLA_PYTHON_CLIENT_PREALLOCATE", "false")


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(items):
    """Of the cases of slow tests CI takes one in four, by its name; the rest are `make test-exhaustive`."""
    for item in items:
        case = item.get_closest_marker("slow") and "[" in item.name and item.path.parent.name in _MANY
        if case and zlib.crc32(item.nodeid.encode()) % _ONE_IN:
            item.add_marker(pytest.mark.exhaustive)

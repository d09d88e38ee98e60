"""What these tests ask of a device. Without one they are skipped."""

import pytest


@pytest.fixture(scope="session")
def device(pytestconfig):
    """Return what torch calls the device; skip where there is none."""
    device = pytestconfig.getoption("--device")
    if device is None:
        pytest.skip("needs a GPU: give --device cuda, or --device cpu to run the same code without one")
    from backends.devices import why_absent

    if reason := why_absent(device):
        pytest.skip(reason)
    return device

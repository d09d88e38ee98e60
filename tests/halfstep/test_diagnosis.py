"""What is said of counts: both packages count, and say this."""

import pytest

from halfstep.diagnosis import at_ends


@pytest.mark.parametrize(("share", "is_said"), [(0.0, False), (0.01, False), (0.02, True), (0.11, True)])
def test_ends_are_spoken_of_above_one_percent_at_either(share, is_said):
    assert bool(at_ends("nu", "uroot8", share, 0.0)) == is_said
    assert bool(at_ends("nu", "uroot8", 0.0, share)) == is_said
    assert not at_ends("nu", "bfloat16", share, share)

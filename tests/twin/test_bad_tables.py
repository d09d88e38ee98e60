"""What `codebook` refuses, in both packages: what is wrong, and what to do."""

import pytest

import halfstep_jax
import halfstep_torch

_TABLES = 'Use "dynamic8", "udynamic8", "dynamic4", "udynamic4" or "ulinear4".'


@pytest.mark.parametrize("package", [halfstep_jax, halfstep_torch])
@pytest.mark.parametrize(
    ("call", "error", "message"),
    [
        (
            lambda hs: hs.codebook("dynamic3"),
            ValueError,
            f"codebook: table='dynamic3' is not a table. Did you mean \"dynamic8\"? {_TABLES}",
        ),
        (lambda hs: hs.codebook(8), TypeError, f"codebook: table=8 is not the name of a table. {_TABLES}"),
        (
            lambda hs: hs.codebook("dynamic4", 127),
            ValueError,
            "codebook: block_size=127 is odd, and codes of 'dynamic4' are two to a byte. "
            'Use an even block_size, "row" or None.',
        ),
        (
            lambda hs: hs.codebook("dynamic8", 0),
            ValueError,
            'codebook: block_size=0 is not a block size. Use a positive integer, "row" or None.',
        ),
        (
            lambda hs: hs.codebook("dynamic8", min_size=-1),
            ValueError,
            "codebook: min_size=-1 is negative. Use an integer >= 0.",
        ),
        (
            lambda hs: hs.scale_by_adam(mu_dtype=hs.codebook("ulinear4")),
            ValueError,
            "scale_by_adam: mu_dtype=ulinear4 has no sign. Use it for nu, and a signed format for mu.",
        ),
        (
            lambda hs: hs.scale_by_adam(nu_dtype="udynamic8"),
            ValueError,
            'scale_by_adam: nu_dtype=udynamic8 is a table. Use codebook("udynamic8").',
        ),
        (
            lambda hs: hs.scale_by_adam(nu_dtype=hs.codebook("udynamic8"), nu_rounding="nearest"),
            ValueError,
            'scale_by_adam: nu_dtype=udynamic8 with nu_rounding="nearest" freezes at b2=0.999 '
            '(1-b2 < 1/31.44). Use nu_rounding="stochastic", or nu_dtype="float32".',
        ),
    ],
)
def test_a_bad_table_is_refused_in_the_same_words(package, call, error, message):
    with pytest.raises(error) as caught:
        call(package)
    assert str(caught.value) == message

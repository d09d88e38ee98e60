"""Adan, the worked example of a new rule: against its formula, and JAX against torch in any storage."""

import numpy as np
import pytest

import halfstep_spec
from twin.moving import assert_both_end_alike

STORAGES = ("bfloat16 bfloat16", "scaled float8_e4m3fn ufloat8_e5m3", "codebook dynamic8 udynamic8")


def test_the_reference_follows_the_paper():
    gradients = np.random.default_rng(0).normal(size=(20, 50))
    rule = halfstep_spec.RULES["adan"](eps=0.0)
    state = rule.init((50,))
    for g in gradients:
        u, state = rule.step(g, state, "w")
    # The averages as sums: each of 20 steps rounds them by 2^-24 of magnitudes below 3, three times.
    d = np.diff(gradients, axis=0, prepend=gradients[:1])
    terms = (gradients, d, (gradients + 0.92 * d) ** 2)
    weights = [(1 - b) * b ** np.arange(20)[::-1] / (1 - b**20) for b in (0.98, 0.92, 0.99)]
    m, e, v = (np.tensordot(w, x, 1) for w, x in zip(weights, terms, strict=True))
    np.testing.assert_allclose(u, (m + 0.92 * e) / np.sqrt(v), atol=20 * 3 * 3 * 2.0**-24)


@pytest.mark.parametrize("compile", [False, pytest.param(True, marks=pytest.mark.slow)])
@pytest.mark.parametrize("storage", STORAGES)
def test_jax_and_torch_agree_to_the_bit(storage, compile):
    def make(package, chain):
        *kind, signed, unsigned = storage.split()
        signed, unsigned = (getattr(package, *kind)(x, 8, 0, 0) if kind else x for x in (signed, unsigned))
        dtypes = {"mu_dtype": signed, "diff_dtype": signed, "nu_dtype": unsigned, "grad_dtype": signed}
        rate = package.scale_by_learning_rate(0.01)
        return chain(package.scale_by_adan(**dtypes), rate, package.round_stochastically(3))

    draws = np.random.default_rng(1).normal(size=(13, 16, 24)).astype(np.float32)
    assert_both_end_alike(make, draws, compile=compile)

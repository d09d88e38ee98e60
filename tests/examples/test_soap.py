"""SOAP, the example of a rule that keeps matrices of other shapes: its formula, its bases, what it is for."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import torch

import halfstep_jax
import halfstep_torch
import soap

SHAPE, STEPS, EVERY = (8, 6), 7, 3
GRADIENTS = np.random.default_rng(2).normal(size=(STEPS, *SHAPE)).astype(np.float32)
KEYS = {"exp_avg": "mu", "exp_avg_sq": "nu"}


def steps_of_jax():
    tx = halfstep_jax.as_transform(soap.JaxSoap(every=EVERY))
    state, update = tx.init(jnp.zeros(SHAPE)), jax.jit(tx.update)
    for g in GRADIENTS:
        u, state = update(jnp.asarray(g), state)
        yield u, {name: getattr(state, name) for name in state._fields}


def steps_of_torch():
    w = torch.nn.Parameter(torch.zeros(SHAPE))
    rule = soap.TorchSoap(every=EVERY)
    up = halfstep_torch.scale_by_learning_rate(1.0, flip_sign=False)
    optimizer = halfstep_torch.Optimizer([("w", w)], halfstep_torch.chain(rule, up), compile=False)
    for g in GRADIENTS:
        w.grad = torch.from_numpy(g)
        optimizer.step()
        yield w.detach().clone(), {KEYS.get(key, key): x.clone() for key, x in optimizer.state[w].items()}
        w.detach().zero_()


@pytest.mark.parametrize("steps", [steps_of_jax, steps_of_torch])
def test_an_update_is_the_papers_in_float64_in_the_bases_that_are_kept(steps):
    """A product of r numbers errs by r 2^-24 of the norms of its factors; a root of nu divides four of them.

    The first update is 0: in its own bases the first gradient is diagonal, and the rest is rounding.
    """
    b, mu, nu, left, right = 0.95, 0.0, 0.0, 0.0, 0.0
    for t, (g, (u, state)) in enumerate(zip(GRADIENTS.astype(np.float64), steps(), strict=True), 1):
        kept = {name: np.asarray(x, np.float64) for name, x in state.items() if x is not None and np.ndim(x)}
        q, p = kept["left_basis"], kept["right_basis"]
        left, right = b * left + (1 - b) * g @ g.T, b * right + (1 - b) * g.T @ g
        mu, nu = b * mu + (1 - b) * g, b * nu + (1 - b) * (q.T @ g @ p) ** 2
        if t == 1:
            assert not np.asarray(u).any()
            continue
        root = np.sqrt(nu / (1 - b**t))
        exact = q @ ((q.T @ mu @ p) / (1 - b**t) / (root + 1e-8)) @ p.T
        roundings = 4 * sum(SHAPE) * 2.0**-24
        largest = np.linalg.norm(GRADIENTS, axis=(1, 2)).max()
        bound = roundings * largest / root.min() * np.sqrt(mu.size)
        assert np.linalg.norm(np.asarray(u) - exact) <= bound < 0.1 * np.linalg.norm(exact)
        np.testing.assert_allclose(kept["left"], left, atol=roundings * np.abs(left).max())
        np.testing.assert_allclose(kept["right"], right, atol=roundings * np.abs(right).max())


@pytest.mark.parametrize("steps", [steps_of_jax, steps_of_torch])
def test_bases_begin_as_eigenvectors_follow_by_qr_and_rest_in_between(steps):
    before = None
    for t, (_, state) in enumerate(steps(), 1):
        q, left = (np.asarray(state[name], np.float64) for name in ("left_basis", "left"))
        # Orthogonal, by a backward stable decomposition of eight columns.
        np.testing.assert_allclose(q.T @ q, np.eye(8), atol=8**1.5 * 2.0**-22)
        if t == 1:
            turned = q.T @ left @ q
            assert np.abs(turned - np.diag(np.diag(turned))).max() < 8**1.5 * 2.0**-22 * np.abs(left).max()
        elif t % EVERY == 1:
            expected = np.linalg.qr(left @ before)[0]
            # But for signs; 1e-3: a column is as far as 2^-24 over the gap between its eigenvalue and others.
            np.testing.assert_allclose(np.abs(np.sum(expected * q, 0)), 1, atol=1e-3)
        else:
            np.testing.assert_array_equal(q, before)
        before = q


@pytest.mark.slow
def test_with_bfloat16_weights_it_comes_nearer_than_adam():
    errors = soap.main()
    for package in ("JAX", "PyTorch"):
        # Of noise with a variance of 0.01 nothing can be learned.
        assert errors[f"{package}, SOAP"] - 0.01 < 0.5 * (errors[f"{package}, Adam"] - 0.01)

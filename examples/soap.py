"""SOAP as a rule of a user's own: Adam in the eigenbasis of Shampoo's averages, in both frameworks.

    python examples/soap.py

A rule of scope "parameter" sees whole matrices. It keeps moments of other shapes than the weight (`left`,
`right` and their bases), always in float32. A number of the step says when the bases are refreshed. Products,
eigenvectors and QR are the framework's, so that the two packages agree within rounding, and not to the bit.
`mu` and `nu` are in any format, here in bfloat16, as the weights are.
"""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import torch

import halfstep_jax
import halfstep_torch
from halfstep import Rule, decay_rate, moment, number, option


class Soap(Rule):
    """SOAP (N. Vyas et al., arXiv:2409.11321, algorithm 3), of matrices; a framework gives `basis`."""

    scope = "parameter"

    b1: float = decay_rate(0.95, torch="betas[0]")
    b2: float = decay_rate(0.95, torch="betas[1]")
    eps: float = number(1e-8)
    every: int = option(10)
    mu_dtype: object = None
    nu_dtype: object = None
    mu = moment(rate="b1", torch="exp_avg")
    nu = moment(rate="b2", signed=False, torch="exp_avg_sq")
    left = moment(rate="b2", shape=lambda shape: (shape[0],) * 2, always="float32")
    right = moment(rate="b2", shape=lambda shape: (shape[1],) * 2, always="float32")
    left_basis = moment(shape=lambda shape: (shape[0],) * 2, always="float32")
    right_basis = moment(shape=lambda shape: (shape[1],) * 2, always="float32")

    def numbers(self, h, t, op):
        """Return bias corrections, and what becomes of the bases: 0 nothing, 1 they begin, 2 they follow.

        The first update is 0: in its own bases the first gradient is diagonal, and the rest is rounding.
        """
        r1, r2 = op.unbias((h.b1, t), (h.b2, t))
        refresh = 2.0 * op.float32((t - 1) % self.every == 0)
        return {"r1": r1 * op.float32(t > 1), "r2": r2, "refresh": refresh - op.float32(t == 1)}

    def update(self, g, p, n, m, op):
        """Return Adam's update in the bases, turned back."""

        def turned(a, x, b):
            return op.matmul(op.matmul(a, x), b)

        left = m.left.round(op.ema(m.left.value, op.matmul(g, transposed(g, op)), n.b2))
        right = m.right.round(op.ema(m.right.value, op.matmul(transposed(g, op), g), n.b2))
        a = m.left_basis.round(op.apply(self.basis, n.refresh, left, m.left_basis.value))
        b = m.right_basis.round(op.apply(self.basis, n.refresh, right, m.right_basis.value))
        square = turned(transposed(a, op), g, b)
        nu = m.nu.round(op.ema(m.nu.value, square * square, n.b2))
        mu = turned(transposed(a, op), m.mu.round(op.ema(m.mu.value, g, n.b1)), b)
        return turned(a, (mu * n.r1) / (op.sqrt(nu * n.r2) + n.eps), transposed(b, op))

    def basis(self, refresh, average, basis):
        """Return the basis, or eigenvectors of the average, or one step towards them from the basis.

        The largest come first: there a step of QR leaves them, and `nu` keeps its meaning.
        """
        raise NotImplementedError


class JaxSoap(Soap):
    """SOAP in JAX: what a step does not need is not computed."""

    def basis(self, refresh, average, basis):
        """Choose by the number of the step."""
        ways = (
            lambda x, q: q,
            lambda x, q: jnp.flip(jnp.linalg.eigh(x)[1], 1),
            lambda x, q: jnp.linalg.qr(jnp.matmul(x, q, precision="highest"))[0],
        )
        return jax.lax.switch(refresh.astype(jnp.int32), ways, average, basis)


class TorchSoap(Soap):
    """SOAP in PyTorch."""

    def basis(self, refresh, average, basis):
        """Choose by the number of the step."""
        if refresh == 0:
            return basis
        return torch.linalg.eigh(average)[1].flip(1) if refresh == 1 else torch.linalg.qr(average @ basis)[0]


def transposed(x, op):
    """Return the transposed matrix."""
    return op.apply(lambda x: x.mT, x)


def data(batches: int, rows: int = 32, inputs: int = 24, outputs: int = 16) -> tuple[np.ndarray, np.ndarray]:
    """Return batches of inputs whose directions have sizes from 1 to 1/30, and noisy outputs of a matrix."""
    rng = np.random.default_rng(0)
    mixed = np.linalg.qr(rng.normal(size=(inputs, inputs)))[0]
    matrix = mixed.T @ rng.normal(size=(inputs, outputs))
    x = rng.normal(size=(batches, rows, inputs)) * np.logspace(0, -1.5, inputs) @ mixed
    y = x @ matrix + 0.1 * rng.normal(size=(batches, rows, outputs))
    return x.astype(np.float32), y.astype(np.float32)


def links(package, rule, steps: int) -> tuple:
    """Return the links of a chain: the rule, a rate that falls, and weights rounded stochastically."""
    rate = package.scale_by_learning_rate(lambda count: 0.1 * (1 - count / steps))
    return rule, rate, package.round_stochastically()


def train_jax(rule, steps: int) -> float:
    """Fit a bfloat16 matrix in JAX; return its mean squared error on the last tenth of the batches."""
    x, y = map(jnp.asarray, data(steps))
    tx = optax.chain(*links(halfstep_jax, rule, steps))
    params = jnp.zeros((x.shape[-1], y.shape[-1]), jnp.bfloat16)

    def loss(w, x, y):
        return jnp.mean((x @ w.astype(jnp.float32) - y) ** 2)

    def step(carry, batch):
        params, state = carry
        updates, state = tx.update(jax.grad(loss)(params, *batch), state, params)
        return (optax.apply_updates(params, updates), state), None

    (params, _), _ = jax.lax.scan(step, (params, tx.init(params)), (x, y))
    return float(loss(params, x[-steps // 10 :], y[-steps // 10 :]))


def train_torch(rule, steps: int) -> float:
    """Fit it in PyTorch."""
    x, y = map(torch.from_numpy, data(steps))
    w = torch.nn.Parameter(torch.zeros(x.shape[-1], y.shape[-1], dtype=torch.bfloat16))
    tx = halfstep_torch.chain(*links(halfstep_torch, rule, steps))
    optimizer = halfstep_torch.Optimizer([("w", w)], tx, compile=False)
    for inputs, outputs in zip(x, y, strict=True):
        optimizer.zero_grad()
        ((inputs @ w.float() - outputs) ** 2).mean().backward()
        optimizer.step()
    return float(((x[-steps // 10 :] @ w.detach().float() - y[-steps // 10 :]) ** 2).mean())


def main(steps: int = 200) -> dict[str, float]:
    """Print the errors of SOAP and of Adam under bfloat16 weights; the noise alone is 0.01."""
    jax_soap = halfstep_jax.as_transform(JaxSoap())
    errors = {
        "JAX, SOAP": train_jax(jax_soap, steps),
        "JAX, Adam": train_jax(halfstep_jax.scale_by_adam(b1=0.95, b2=0.95), steps),
        "PyTorch, SOAP": train_torch(TorchSoap(), steps),
        "PyTorch, Adam": train_torch(halfstep_torch.scale_by_adam(b1=0.95, b2=0.95), steps),
    }
    for name, error in errors.items():
        print(f"{name:<14} mean squared error {error:.5f}")
    return errors


if __name__ == "__main__":
    main()

"""AdamW in float32 whose matrices are stored in 8 bits after every step, by the library and by ECO.

Matrices are stored in rows, a scale each, as `scaled` stores moments. Rounded stochastically alone, small
updates arrive in the mean, with the noise of 8 bits. *Fed back*: what rounding leaves out of the weights,
e = w - stored(w), goes into the momentum, from which later steps add it. Rows "int8, fed back" are
`adamw(..., param_storage="int8")` of the library (contract A20), where errors are divided by the rates that
come. Rows "by ECO" divide by the rate of their own step:

    m <- m + (1 - 1 / b1) c1 (sqrt(v / c2) + eps) e / lr

with c1 and c2 the bias corrections: Algorithm 3 of M. Nikdan et al., "ECO: Quantized Training without
Full-Precision Master Weights", arXiv:2601.22101. A rate that rises again then blows up what was fed back; and
a bound on it ("at most 4 roots") is a bias, as stochastic errors are small one way and large the other way.
"""

import dataclasses
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax

import halfstep_jax as hs
from halfstep.rules.adamw_in_codes import AdamWInCodes

B1, B2, EPS = 0.9, 0.999, 1e-8
TINY = 2.0**-100


@dataclasses.dataclass(frozen=True)
class Row:
    """One setting.

    Attributes:
        name: for the tables.
        weights: how matrices are stored: a dtype, a format, or None: in float32.
        feedback: whether errors go into the momentum: "ours", "ECO" or "".
        nearest: whether weights are rounded to nearest.
        bound: how many roots of v are fed back at most.
        mu: of "ours", how the momentum is stored.
    """

    name: str
    weights: Any = None
    feedback: str = ""
    nearest: bool = False
    bound: float = float("inf")
    mu: Any = "float32"


INT8, E4M3 = hs.scaled("int8", "row", 0, scale="fine"), hs.scaled("float8_e4m3fn", "row", 0)
ROWS = (
    Row("float32"),
    Row("float32, another batch order"),
    Row("bfloat16, stochastic", "bfloat16"),
    Row("int8, stochastic", INT8),
    Row("int8, fed back", INT8, "ours"),
    Row("int8, fed back into bfloat16", INT8, "ours", mu="bfloat16"),
    Row("int8, fed back into relative int8", INT8, "ours", mu=hs.relative("int8", 128, 0, 0)),
    Row("int8, fed back by ECO", INT8, "ECO"),
    Row("int8, fed back by ECO, at most 4 roots", INT8, "ECO", bound=4.0),
    Row("int8, fed back by ECO, nearest", INT8, "ECO", nearest=True),
    Row("float8_e4m3fn, stochastic", E4M3),
    Row("float8_e4m3fn, fed back by ECO", E4M3, "ECO"),
)


class State(NamedTuple):
    """State of `adamw`."""

    count: jax.Array
    seed: jax.Array
    mu: Any
    nu: Any


def adamw(row: Row, schedule: optax.Schedule, decay: float) -> optax.GradientTransformationExtraArgs:
    """Return AdamW with matrices stored as a row says; its updates lead from what is stored to what is."""
    if row.feedback == "ours":
        options = {"param_dtype": row.weights, "mu_dtype": row.mu, "mu_rounding": "stochastic"}
        return hs.as_transform(AdamWInCodes(schedule, B1, B2, EPS, weight_decay=decay, **options))

    def init(params):
        mu, nu = (jax.tree.map(jnp.zeros_like, params) for _ in range(2))
        return State(jnp.zeros((), jnp.int32), jnp.zeros(2, jnp.uint32), mu, nu)

    def update(updates, state, params=None, **extra_args):
        count = state.count + 1
        lr, t = schedule(state.count), count.astype(jnp.float32)
        c1, c2 = (1 - b**t for b in (B1, B2))

        def step(path, g, m, v, w):
            m, v = B1 * m + (1 - B1) * g, B2 * v + (1 - B2) * g * g
            root = jnp.sqrt(v / c2) + EPS
            exact = w - lr * (m / c1 / root + decay * w)
            if w.ndim < 2 or row.weights is None:
                return exact - w, m, v
            words = hs.random_words(state.seed, count, jax.tree_util.keystr(path), 0, w.shape)
            stored = _stored(exact, row.weights, None if row.nearest else words)
            if row.feedback:
                z = (1 - 1 / B1) * (exact - stored) / jnp.maximum(lr, TINY)
                m = m + c1 * root * jnp.clip(z, -row.bound, row.bound)
            return stored - w, m, v

        made = jax.tree_util.tree_map_with_path(step, updates, state.mu, state.nu, params)
        u, mu, nu = jax.tree.transpose(jax.tree.structure(updates), jax.tree.structure((0, 0, 0)), made)
        return u, State(count, state.seed, mu, nu)

    return optax.GradientTransformationExtraArgs(init, update)


def _stored(x: jax.Array, fmt: Any, words: jax.Array | None) -> jax.Array:
    """Return in float32 what is stored of x."""
    if isinstance(fmt, str):
        return hs.round_to(x, fmt, words).astype(jnp.float32)
    return fmt.round_trip(x, words)[1]

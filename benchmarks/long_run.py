"""Moments and weights after 200,000 steps, beside float32's of the same gradients.

    python benchmarks/long_run.py [--only NAME ...] [--json benchmarks/results/NAME.json]

4,096 elements. Gradients are normal, and elements differ in size by a lognormal factor of sigma 0.3.
Moments are read every 10,000 steps: 20 readings, ten memories of nu apart. The error of mu is (mu - mu32)
over the root of nu32; that of nu is what it does to the length of a step, sqrt(nu32 / nu) - 1. Weights start
at 1 to 1.75, in bfloat16, and are stepped by Adam at 1e-4, with moments in float32; their error is in gaps.

Words of elements are independent. Therefore the mean of n errors of spread s has the standard error
s / sqrt(n). *z* is the mean in standard errors. *drift* is the difference between the two halves of the run,
in standard errors. *growth* is the spread of the second half over the spread of the first half. Two sentences
about each format must hold:

- right on average: |z| <= 5 for mu and weights. Rounding keeps the mean of nu or of its fourth root, and a
  step is a convex function of nu. So beyond 5 standard errors the mean step is off by at most 3/8 of nu's
  relative variance, which is 4 s^2.
- errors do not grow: |drift| <= 5, and growth between 0.9 and 1.1. Weights that are rounded stochastically
  walk: there is no such sentence about them. *last* is the rms error of the last reading.
"""

import argparse
import json
import pathlib
import sys

import jax
import jax.numpy as jnp
import numpy as np
import optax

import halfstep_jax as hs
from halfstep.storage.codes import CODEBOOK_CODES, FINE_CODES, FIXED_CODES, PLAIN_CODES, SCALED_CODES
from report import finish, print_table

STEPS, READINGS, SHAPE, B1, B2 = 200_000, 20, (32, 128), 0.9, 0.999
BOUND, RATE = 5.0, 1e-4
_STOCHASTIC = {"mu_rounding": "stochastic", "nu_rounding": "stochastic"}
_ROOTS = "uroot4_e4m4"


def settings() -> dict[str, dict]:
    """Return arguments for every format, by name: the other moment is in float32, but for fourth roots."""
    plain = {name: (kind, name) for name, kind in PLAIN_CODES.items() if name not in ("float32", _ROOTS)}
    scaled = {f"scaled {name}": (kind, hs.scaled(name, min_size=0)) for name, kind in SCALED_CODES.items()}
    scaled["scaled int8, fine"] = SCALED_CODES["int8"], hs.scaled("int8", min_size=0, scale="fine")
    tables = {
        f"codebook {name}": (kind, hs.codebook(name, min_size=0)) for name, kind in CODEBOOK_CODES.items()
    }
    chosen = {}
    for name, (kind, fmt) in {**plain, **scaled, **tables}.items():
        if kind.signed:
            chosen[f"mu {name}"] = {"mu_dtype": fmt, "nu_dtype": "float32"}
        if kind.for_second_moments:
            chosen[f"nu {name}"] = {"mu_dtype": "float32", "nu_dtype": fmt}
    fixed = {f"mu relative {name}": hs.relative(name) for name in FIXED_CODES if name != "mulaw8"}
    fine = {f"mu relative {name}, 32": hs.relative(name, 32, min_size=0) for name in FINE_CODES}
    for name, fmt in {**fixed, **fine}.items():
        chosen[name] = {"mu_dtype": fmt, "nu_dtype": "float32"}
    chosen = {name: {**options, **_STOCHASTIC} for name, options in chosen.items()}
    return chosen | {f"nu {_ROOTS}": {"mu_dtype": hs.relative("mulaw8"), "nu_dtype": _ROOTS}}


def train(options: dict, steps: int) -> list[tuple]:
    """Return float32's moments and the decoded ones at each reading: (mu32, nu32, mu, nu)."""
    tx, plain = hs.scale_by_adam(B1, B2, **options), optax.scale_by_adam(B1, B2)
    params = {"w": jnp.zeros(SHAPE, jnp.float32)}
    key = jax.random.key(5)
    sizes = 0.01 * jnp.exp(0.3 * jax.random.normal(jax.random.fold_in(key, 2**31), SHAPE))

    def step(held, t):
        ours, theirs = held
        gradient = {"w": sizes * jax.random.normal(jax.random.fold_in(key, t), SHAPE)}
        return (tx.update(gradient, ours, params)[1], plain.update(gradient, theirs, params)[1]), None

    @jax.jit
    def piece(held, first):
        return jax.lax.scan(step, held, first + jnp.arange(steps // READINGS))[0]

    held, readings = (tx.init(params), plain.init(params)), []
    for reading in range(READINGS):
        held = piece(held, reading * (steps // READINGS))
        decoded = hs.to_optax(held[0], tx, params, plain)
        arrays = (held[1].mu, held[1].nu, decoded.mu, decoded.nu)
        readings.append(tuple(np.asarray(tree["w"], np.float64).ravel() for tree in arrays))
    return readings


def weights(storage: str, steps: int) -> np.ndarray:
    """Return the errors of weights in bfloat16, by reading and element: in gaps of numbers from 1 to 2."""
    formats = {"mu_dtype": "float32", "nu_dtype": "float32"}
    tx, plain = hs.adam(RATE, b1=B1, b2=B2, param_storage=storage, **formats), optax.adam(RATE, B1, B2)
    key = jax.random.key(5)
    start = {"w": jax.random.uniform(key, SHAPE, minval=1.0, maxval=1.75).astype(jnp.bfloat16)}
    wide = {"w": start["w"].astype(jnp.float32)}

    def step(held, t):
        (w, state), (w32, state32) = held
        gradient = {"w": 0.01 * jax.random.normal(jax.random.fold_in(key, t), SHAPE)}
        ours, state = tx.update(gradient, state, w)
        theirs, state32 = plain.update(gradient, state32, w32)
        return ((optax.apply_updates(w, ours), state), (optax.apply_updates(w32, theirs), state32)), None

    @jax.jit
    def piece(held, first):
        return jax.lax.scan(step, held, first + jnp.arange(steps // READINGS))[0]

    held, readings = ((start, tx.init(start)), (wide, plain.init(wide))), []
    for reading in range(READINGS):
        held = piece(held, reading * (steps // READINGS))
        w, w32 = (np.asarray(tree["w"], np.float64).ravel() for tree, _ in held)
        readings.append((w - w32) * 2.0**7)
    return np.stack(readings)


WEIGHTS = {f"weights, {storage}": storage for storage in ("stochastic", "feedback")}


def errors(name: str, readings: list[tuple]) -> np.ndarray:
    """Return the errors of a moment, by reading and element: of mu, or of the length of a step by nu."""
    mu32, nu32, mu, nu = (np.stack(arrays) for arrays in zip(*readings, strict=True))
    return (mu - mu32) / np.sqrt(nu32) if name.startswith("mu") else np.sqrt(nu32 / nu) - 1


def figures(name: str, error: np.ndarray) -> dict:
    """Return mean, spread, the mean in standard errors, and how the halves of the run differ."""
    halves = error[: READINGS // 2], error[READINGS // 2 :]
    spread = float(error.std())
    one = max(spread, 1e-30) / np.sqrt(error.size)
    drift = (halves[1].mean() - halves[0].mean()) / (2 * one)
    mean, growth = float(error.mean()), float(halves[1].std() / max(halves[0].std(), 1e-30))
    allowed = BOUND * one + (1.5 * spread**2 if name.startswith("nu") else 0)
    last = float(np.sqrt((error[-1] ** 2).mean()))
    return {
        "name": name,
        "mean": mean,
        "spread": spread,
        "last": last,
        "z": float(mean / one),
        "drift": float(drift),
        "growth": growth,
        "right": bool(abs(mean) <= allowed),
        "steady": bool(abs(drift) <= BOUND and 0.9 <= growth <= 1.1),
    }


def main() -> int:
    """Run every format, or those whose names begin with what is given."""
    parser = argparse.ArgumentParser(description="Compare moments after 200,000 steps with float32's.")
    parser.add_argument("--only", nargs="+", default=[""], help="names, or beginnings of them")
    parser.add_argument("--steps", type=int, default=STEPS)
    parser.add_argument(
        "--json", type=pathlib.Path, help="the record, read and written; its rows are not run again"
    )
    arguments = parser.parse_args()
    rows = []
    if arguments.json and arguments.json.exists():
        rows = json.loads(arguments.json.read_text())
    done = {row["name"] for row in rows}
    for name, options in {**settings(), **WEIGHTS}.items():
        if name.startswith(tuple(arguments.only)) and name not in done:
            if name in WEIGHTS:
                error = weights(WEIGHTS[name], arguments.steps)
            else:
                error = errors(name, train(options, arguments.steps))
            rows.append(figures(name, error))
            print(json.dumps(rows[-1]), file=sys.stderr, flush=True)
            if arguments.json:
                arguments.json.write_text(json.dumps(rows, indent=1) + "\n")
    keys = {"mean": ".6f", "spread": ".4f", "z": ".1f", "drift": ".1f", "growth": ".3f"}
    print_table(
        f"<moment | {' | '.join(keys)}",
        ((row["name"], *(format(row[key], form) for key, form in keys.items())) for row in rows),
    )
    held = {f"{row['name']}: right on average": row["right"] for row in rows}
    held |= {
        f"{row['name']}: errors do not grow": row["steady"]
        for row in rows
        if row["name"] != "weights, stochastic"
    }
    return finish(held, rows, arguments.json)


if __name__ == "__main__":
    sys.exit(main())

"""How well each format keeps a second moment when gradients shrink tenfold, which freezes most of them.

    python benchmarks/second_moment.py [--json benchmarks/results/NAME.json]

b2 = 0.999; gradients are normal with a lognormal scale per element, of spread sigma *within* a block (a hard
case); after 500 of 3,500 steps they shrink tenfold. Against the same average kept in float32: median and
5-95 % of nu / nu32; "lifted", the share of elements at over 4 times their value, which the range of their
block does not hold, and the mean of the others, of nu and of its fourth root; the RMS of sqrt(nu32 / nu) - 1,
the relative error of the update; "NaN", the share of elements beyond the top of a format without a scale,
which the others leave out.
Rounding is stochastic but where it says nearest.

Of 8 bits the aim is a median within 0.97 and 1.03, and 5 to 95 % within 0.5 and 2, at every sigma. What
misses it is said below the table. At sigma 2 no format of 8 bits has 95 % of *all* elements under 2: in the
widest, `ufloat8_e5m3`, one element in 200 lies below the range of its block. Of those that a block holds 95 %
are, and that is claimed.
"""

import sys

import jax
import jax.numpy as jnp
import numpy as np

import halfstep_jax as hs
import report
from halfstep_jax.storage.formats import Format
from halfstep_jax.storage.state_dtypes import as_format

STEPS, DROP, B2 = 3500, 500, np.float32(0.999)
SIGMAS = (0.5, 1.5, 2.0)
SHAPE = (256, 128)


def _scaled(dtype: str) -> Format:
    return hs.scaled(dtype, block_size=128, min_size=0)


def _codebook(table: str) -> Format:
    return hs.codebook(table, block_size=128, min_size=0)


def _plain(dtype: str) -> Format:
    return as_format("second_moment", "dtype", dtype)


FORMATS = {
    "bfloat16": (_plain("bfloat16"), True),
    "bfloat16, nearest": (_plain("bfloat16"), False),
    "scaled float16": (_scaled("float16"), True),
    "scaled ufloat8_e5m3": (_scaled("ufloat8_e5m3"), True),
    "uroot4_e4m4": (_plain("uroot4_e4m4"), True),
    "scaled uroot8": (_scaled("uroot8"), True),
    "scaled float8_e4m3fn": (_scaled("float8_e4m3fn"), True),
    "scaled float8_e4m3fn, nearest": (_scaled("float8_e4m3fn"), False),
    "scaled int8": (_scaled("int8"), True),
    "codebook udynamic8": (_codebook("udynamic8"), True),
    "codebook udynamic8, nearest": (_codebook("udynamic8"), False),
    "ufloat16_e7m9": (_plain("ufloat16_e7m9"), True),
}


@jax.jit
def averages(sigma: jax.Array) -> dict[str, jax.Array]:
    """Return the average after the last step, in float32 and as every format keeps it."""
    key = jax.random.key(7)
    scales = jnp.exp(sigma * jax.random.normal(jax.random.fold_in(key, 2**31), SHAPE))
    zero = jnp.zeros(SHAPE)

    def step(kept, t):
        g = jax.random.normal(jax.random.fold_in(key, t), SHAPE) * scales
        g = jnp.where(t < DROP, g, np.float32(0.1) * g)
        exact, kept = kept
        exact = B2 * exact + (np.float32(1) - B2) * (g * g)
        new = {}
        for i, (name, (fmt, stochastic)) in enumerate(FORMATS.items()):
            words = hs.random_words(i, t + 1, name, hs.Role.NU, SHAPE) if stochastic else None
            average = B2 * fmt.decode(kept[name]) + (np.float32(1) - B2) * (g * g)
            new[name] = fmt.encode(average, words, keep_nonzero="always")
        return (exact, new), None

    start = zero, {name: fmt.zeros_like(zero) for name, (fmt, _) in FORMATS.items()}
    (exact, kept), _ = jax.lax.scan(step, start, jnp.arange(STEPS))
    return {"float32": exact} | {name: fmt.decode(kept[name]) for name, (fmt, _) in FORMATS.items()}


def figures(sigma: float) -> list[dict]:
    """Return a row of figures for every format."""
    arrays = {name: np.asarray(a, np.float64) for name, a in averages(jnp.float32(sigma)).items()}
    truth, rows = arrays.pop("float32"), []
    for name, kept in arrays.items():
        held = np.isfinite(kept)
        ratio = kept[held] / truth[held]
        low, high = np.quantile(ratio, (0.05, 0.95))
        with np.errstate(divide="ignore"):
            error = np.sqrt(np.mean((np.sqrt(1 / ratio) - 1) ** 2))
        lifted = ratio > 4
        mean = ratio[~lifted].mean() if not lifted.all() else np.nan
        row = {"sigma": sigma, "format": name, "median": np.median(ratio), "low": low, "high": high}
        row["root"] = (ratio[~lifted] ** 0.25).mean() if not lifted.all() else np.nan
        row["high held"] = np.quantile(ratio[~lifted], 0.95) if not lifted.all() else np.nan
        row |= {"lifted": lifted.mean(), "mean": mean, "error": error, "zeros": (kept == 0).mean()}
        row["nan"] = 1 - held.mean()
        rows.append({key: value if isinstance(value, str) else float(value) for key, value in row.items()})
    return rows


def claims(rows: list[dict]) -> dict[str, bool]:
    """Return what the table must show, by sentence."""
    by = {(row["format"], row["sigma"]): row for row in rows}
    wide = [by["bfloat16", s]["median"] for s in SIGMAS] + [by["scaled float16", s]["median"] for s in SIGMAS]
    e5m3 = [by["scaled ufloat8_e5m3", s] for s in SIGMAS]
    return {
        "16 bits: median within 0.97 and 1.03": all(0.97 < value < 1.03 for value in wide),
        "ufloat8_e5m3: median within 0.97 and 1.03": all(0.97 < row["median"] < 1.03 for row in e5m3),
        "ufloat8_e5m3, of all elements, sigma up to 1.5: 5 to 95 % within 0.5 and 2": all(
            0.5 < row["low"] and row["high"] < 2 for row in e5m3 if row["sigma"] <= 1.5
        ),
        "ufloat8_e5m3, of those that a block holds, any sigma: 5 to 95 % within 0.5 and 2": all(
            0.5 < row["low"] and row["high held"] < 2 for row in e5m3
        ),
        "uroot8 and uroot4_e4m4: mean of the fourth root within 0.99 and 1.01": all(
            0.99 < by[name, s]["root"] < 1.01 for name in ("scaled uroot8", "uroot4_e4m4") for s in SIGMAS
        ),
        "uroot4_e4m4: median within 0.97 and 1.03": all(
            0.97 < by["uroot4_e4m4", s]["median"] < 1.03 for s in SIGMAS
        ),
        "ufloat8_e5m3: under 1 element in 100 lifted": all(row["lifted"] < 1e-2 for row in e5m3),
        "ufloat8_e5m3: RMS error of the update under 0.23": all(row["error"] < 0.23 for row in e5m3),
        "none ends in NaN": not any(row["nan"] for row in rows),
        "no stored zero": all(row["zeros"] == 0 for row in rows),
        "nearest bfloat16: 5 times too high": all(by["bfloat16, nearest", s]["median"] > 5 for s in SIGMAS),
    }


def misses(rows: list[dict]) -> list[str]:
    """Return where a format of 8 bits, rounded stochastically, misses the aim, in sentences."""
    bits = ("scaled ufloat8_e5m3", "codebook udynamic8")
    found = []
    for row in (row for row in rows if row["format"] in bits):
        what = [] if 0.97 < row["median"] < 1.03 else [f"median {row['median']:.3f}"]
        what += [] if 0.5 < row["low"] else [f"5 % at {row['low']:.3f}"]
        what += [] if row["high"] < 2 else [f"95 % at {row['high']:.3f}"]
        found += [f"{row['format']}, sigma {row['sigma']}: {', '.join(what)}"] if what else []
    return found


def main() -> int:
    """Print the table, what misses the aim, and whether the table shows what it must."""
    arguments = report.arguments("Keep a second moment through a tenfold drop.")
    rows = [row for sigma in SIGMAS for row in figures(sigma)]
    keys = ("median", "low", "high", "lifted", "mean", "root", "error", "nan")
    report.print_table(
        "sigma | <format | median | 5 % | 95 % | lifted | mean | of nu^(1/4) | RMS error of the update | NaN",
        ((row["sigma"], row["format"], *(f"{row[key]:.3f}" for key in keys)) for row in rows),
    )
    for sentence in misses(rows):
        print(f"misses the aim: {sentence}")
    return report.finish(claims(rows), rows, arguments.json)


if __name__ == "__main__":
    sys.exit(main())

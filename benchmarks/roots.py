"""Roots and quotients of a GPU, corrected: how many are not correctly rounded.

    python benchmarks/roots.py --json benchmarks/results/DATE-roots.json

The right result, moved to a number beside it, imitates an approximate result. A root is at most one number
away, and a quotient at most two, as NVIDIA states for the instructions that XLA uses. Roots are computed for
all mantissas and both parities of the exponent; a root depends on nothing else. Quotients are computed for
random mantissas, a third of which are near a power of two. Exits with 1 if a result is wrong.
"""

import argparse
import json
import pathlib
import sys

import jax
import numpy as np

from halfstep_jax.numbers.roots import corrected_quotient, corrected_root

_CHUNK = 1 << 20


def wrong_roots() -> tuple[int, int]:
    """Return how many roots are wrong, and of how many."""
    corrected, wrong, count = jax.jit(corrected_root), 0, 0
    for first in range(127 << 23, 129 << 23, _CHUNK):
        x = np.arange(first, first + _CHUNK, dtype=np.uint32).view(np.float32)
        right = np.sqrt(x)
        for steps in (-1, 0, 1):
            wrong += _differing(corrected(x, _moved(right, steps)), right)
            count += _CHUNK
    return wrong, count


def wrong_quotients(millions: int) -> tuple[int, int]:
    """Return how many quotients are wrong, and of how many."""
    rng, corrected, wrong, count = np.random.default_rng(0), jax.jit(corrected_quotient), 0, 0
    for _ in range(millions):
        x, y = _numbers(rng), _numbers(rng)
        right = x / y
        for steps in (-2, -1, 0, 1, 2):
            wrong += _differing(corrected(x, y, _moved(right, steps)), right)
            count += _CHUNK
    return wrong, count


def _numbers(rng: np.random.Generator) -> np.ndarray:
    edges = np.concatenate([np.arange(64), np.arange(2**23 - 64, 2**23)])
    mantissa = rng.integers(0, 2**23, _CHUNK)
    mantissa = np.where(rng.random(_CHUNK) < 1 / 3, rng.choice(edges, _CHUNK), mantissa)
    field, sign = rng.integers(70, 180, _CHUNK), rng.integers(0, 2, _CHUNK)
    return (sign << 31 | field << 23 | mantissa).astype(np.uint32).view(np.float32)


def _moved(x: np.ndarray, steps: int) -> np.ndarray:
    return (x.view(np.int32) + np.int32(steps)).view(np.float32)


def _differing(x: jax.Array, y: np.ndarray) -> int:
    return int(np.count_nonzero(np.asarray(x).view(np.uint32) != y.view(np.uint32)))


def main() -> int:
    """Print the counts; return 1 if one is not zero."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--millions", type=int, default=21, help="of quotients, each from five numbers")
    parser.add_argument("--json", type=pathlib.Path, help="where to write the counts")
    arguments = parser.parse_args()
    counts = {"roots": wrong_roots(), "quotients": wrong_quotients(arguments.millions)}
    for name, (wrong, count) in counts.items():
        print(f"{name}: {wrong} wrong of {count:,}")
    if arguments.json:
        record = {name: dict(zip(("wrong", "of"), pair, strict=True)) for name, pair in counts.items()}
        arguments.json.write_text(json.dumps(record, indent=1) + "\n")
    return int(any(wrong for wrong, _ in counts.values()))


if __name__ == "__main__":
    sys.exit(main())

"""Whether rounding could tell random words from random numbers: statistics of their fields, each in sd.

    python benchmarks/random_words.py [--steps 2000] [--elements 65536] [--json benchmarks/results/NAME.json]
    python benchmarks/random_words.py --stream low --order columns --elements 0x1000000 | RNG_test stdin16

A row is a statistic over steps and elements of one leaf, for the word of the contract (W8), for one with a
second mix, and for JAX's own Threefry per element; a number is how many standard deviations a figure is from
what independent uniform numbers have, the worst of the three fields of a word. Every statistic is roughly
normal, so of these some fifty numbers one in fifty runs would pass 3.5; 5 is the limit that is claimed.

- mean; bytes: chi-square of the four bytes of a word; pairs: of the top, and of the lowest, bytes of neighbours
- time: the variance of each element's sum over all steps; and that of each step's sum over all elements
- columns 2^k: the variance of the sums, at each step, over elements that are 2^k apart
- rare: how often an element meets a field below 0.005, whose counts are Poisson's
- lag d: correlation of elements d apart; steps: of an element, and of its neighbours, at consecutive steps
- fields: correlation of those of the weight and of nu; that of mu's with either, less the 2^-8 that they share
- k0: lags 1 to 3 under the multipliers of which the worst is to be feared

A stream writes one field of the words of consecutive steps without end, for batteries that read bits: in
the order of the elements ("steps"), of the steps, 4,096 at a time ("time"), or of the columns of a matrix with
4,096 columns ("columns").
"""

import argparse
import pathlib
import sys
from collections.abc import Callable, Iterator

import numpy as np

import report
from halfstep_spec.numbers.random_words import fold, leaf_id, mix, threefry2x32
from halfstep_spec.numbers.seeds import seed_words

Words = Callable[[np.ndarray, np.ndarray, np.ndarray], np.ndarray]
"""From k0, k1 and uint32 indices to words."""

LIMIT = 5.0
FIELDS = {"weight": 16, "mu": 8, "nu": 0}
STREAMS = {"high": 16, "middle": 8, "low": 0}
MULTIPLIERS = (1, 3, 0xFFFFFFFF, 0x10001, 0x80000001, 0x55555555)
LAGS = (1, 2, 3, 64, 256, 1024)
COLUMNS = (4, 8, 12, 16, 20)
RARE = 328  # of 65,536: 0.005
_COLUMN_LENGTH = 256


def one_mix(k0, k1, index):
    """Return the words of the contract."""
    return mix(index * (k0 | np.uint32(1)) + k1)


def two_mixes(k0, k1, index):
    """Return words of which the index is mixed before it meets the second key."""
    return mix(mix(index ^ k0) + k1)


def threefry(k0, k1, index):
    """Return the words that `jax.random.bits` makes of a key."""
    first, second = threefry2x32((k0, k1), (np.zeros_like(index), index))
    return first ^ second


ROWS: dict[str, Words] = {"one mix (W8)": one_mix, "two mixes": two_mixes, "Threefry": threefry}


def keys(steps: np.ndarray, seed: int = 0, leaf: str = "w") -> tuple[np.ndarray, np.ndarray]:
    """Return k0 and k1 of a leaf's word at some steps (contract W4)."""
    k0, kx = fold(fold(seed_words(seed), steps), leaf_id(leaf))
    return k0, fold((k0, kx), np.zeros_like(steps))[1]


def uniform(field: np.ndarray) -> np.ndarray:
    """Return fields of 16 bits as numbers of mean 0 and variance 1."""
    return ((field & np.uint32(0xFFFF)).astype(np.float32) - np.float32(32767.5)) * np.float32(
        np.sqrt(12 / (2.0**32 - 1))
    )


def statistics(words: Words, steps: int, elements: int) -> dict[str, float]:
    """Return every statistic by name, in standard deviations.

    Args:
        words: to be judged.
        steps: how many, at least 2.
        elements: of the leaf, at least 4,096.
    """
    index, total = np.arange(elements, dtype=np.uint32), steps * elements
    columns = {k: _column_index(k) for k in COLUMNS}
    k0s, k1s = keys(np.arange(1, steps + 1, dtype=np.uint32))
    sums = np.zeros((3, elements))
    rare = np.zeros((3, elements))
    square = np.zeros(3)
    in_columns = {k: np.zeros(3) for k in COLUMNS}
    lags = {d: np.zeros(3) for d in LAGS}
    in_time = {shift: np.zeros(3) for shift in (0, 1, -1)}
    fields = np.zeros((3, 3))
    bytes_, pairs = np.zeros((4, 256)), np.zeros((2, 65536))
    before = None
    for k0, k1 in zip(k0s, k1s, strict=True):
        drawn = words(k0, k1, index)
        x = np.stack([uniform(drawn >> np.uint32(shift)) for shift in FIELDS.values()])
        sums += x
        rare += np.stack([drawn >> np.uint32(s) & np.uint32(0xFFFF) for s in FIELDS.values()]) < RARE
        square += x.sum(1, dtype=np.float64) ** 2 / elements
        fields += x @ x.T
        for d in LAGS:
            lags[d] += (x[:, d:] * x[:, :-d]).sum(1, dtype=np.float64)
        for shift, sum_ in in_time.items():
            if before is not None:
                sum_ += (x * np.roll(before, shift, 1)).sum(1, dtype=np.float64)
        before = x
        for i in range(4):
            bytes_[i] += np.bincount(drawn >> np.uint32(8 * i) & np.uint32(255), minlength=256)
        for i, byte in enumerate((drawn >> np.uint32(24), drawn & np.uint32(255))):
            pairs[i] += np.bincount(byte[:-1] * np.uint32(256) + byte[1:], minlength=65536)
        for k, at in columns.items():
            y = words(k0, k1, at)
            for i, shift in enumerate(FIELDS.values()):
                column = uniform(y >> np.uint32(shift)).sum(0, dtype=np.float64)
                in_columns[k][i] += (column**2).sum() / _COLUMN_LENGTH
    shared = np.array([[0, 2.0**-8, 0], [0, 0, 2.0**-8], [0, 0, 0]])
    apart = np.triu(fields / total - shared, 1)
    share = RARE / 65536
    dispersion = rare.var(1) / (steps * share * (1 - share)) - 1
    found = {
        "mean": _worst(sums.sum(1) / np.sqrt(total)),
        "bytes": _worst(_chi_square(bytes_)),
        "pairs": _worst(_chi_square(pairs)),
        "time, sums of elements": _worst(
            ((sums**2).mean(1) / steps - 1) / np.sqrt((2 - 1.2 / steps) / elements)
        ),
        "time, sums of steps": _worst((square / steps - 1) / np.sqrt((2 - 1.2 / elements) / steps)),
        "rare": _worst(dispersion / np.sqrt(2 / elements)),
        "fields": _worst(apart[np.triu_indices(3, 1)] * np.sqrt(total)),
    }
    for k, sum_ in in_columns.items():
        count = steps * columns[k].shape[1]
        found[f"columns 2^{k}"] = _worst((sum_ / count - 1) / np.sqrt((2 - 1.2 / _COLUMN_LENGTH) / count))
    for d, sum_ in lags.items():
        found[f"lag {d}"] = _worst(sum_ / np.sqrt(steps * (elements - d)))
    for shift, sum_ in in_time.items():
        found[f"steps, shift {shift}"] = _worst(sum_ / np.sqrt((steps - 1) * elements))
    return found


def multipliers(elements: int) -> dict[str, float]:
    """Return the worst correlation at lags 1 to 3 under each multiplier, in standard deviations."""
    index, found = np.arange(elements, dtype=np.uint32), {}
    for k0 in MULTIPLIERS:
        drawn = one_mix(np.uint32(k0), np.uint32(12345), index)
        x = np.stack([uniform(drawn >> np.uint32(shift)) for shift in FIELDS.values()])
        lags = [(x[:, d:] * x[:, :-d]).sum(1, dtype=np.float64) / np.sqrt(elements - d) for d in (1, 2, 3)]
        found[f"k0 = {k0:#x}"] = _worst(np.array(lags))
    return found


def _column_index(k: int) -> np.ndarray:
    """Return the indices of some columns of a matrix with 2^k columns, of `_COLUMN_LENGTH` rows each."""
    return (
        np.arange(_COLUMN_LENGTH, dtype=np.uint32)[:, None] * np.uint32(2**k)
        + np.arange(16, dtype=np.uint32)[None]
    )


def _chi_square(counts: np.ndarray) -> np.ndarray:
    """Return chi-square of rows of counts that should be even, less its mean, over its standard deviation."""
    expected, freedom = counts.mean(1, keepdims=True), counts.shape[1] - 1
    return (((counts - expected) ** 2 / expected).sum(1) - freedom) / np.sqrt(2 * freedom)


def _worst(x: np.ndarray) -> float:
    return float(x.ravel()[np.abs(x).argmax()])


def bits(field: str, order: str, elements: int) -> Iterator[np.ndarray]:
    """Yield one field of the words of steps 1, 2, ..., as uint16; of the field "all" the words, uint32."""
    index, step = np.arange(elements, dtype=np.uint32), 1
    many = 4096 if order == "time" else max(1, 2**22 // elements)
    while True:
        k0, k1 = (k[:, None] for k in keys(np.arange(step, step + many, dtype=np.uint32)))
        drawn = one_mix(k0, k1, index)
        if order == "time":
            drawn = np.ascontiguousarray(drawn.T)
        elif order == "columns":
            drawn = np.ascontiguousarray(drawn.reshape(many, -1, 4096).transpose(0, 2, 1))
        yield drawn if field == "all" else (drawn >> np.uint32(STREAMS[field])).astype(np.uint16)
        step += many


def claims(rows: dict[str, dict[str, float]]) -> dict[str, bool]:
    """Return the sentences that the contract rests on."""
    name = next(iter(ROWS))
    past = [row for row, of_row in rows.items() if abs(of_row[name]) >= LIMIT]
    return {f"every statistic of the contract's words is within {LIMIT:g} sd {past or ''}".rstrip(): not past}


def main() -> int:
    """Print the statistics, or stream words."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--steps", type=int, default=2000)
    parser.add_argument("--elements", type=lambda x: int(x, 0), default=65536)
    parser.add_argument("--stream", choices=["all", *STREAMS], help="write this field of the words")
    parser.add_argument("--order", choices=["steps", "time", "columns"], default="steps")
    parser.add_argument("--json", type=pathlib.Path, help="also write the figures here")
    options = parser.parse_args()
    if options.stream:
        for drawn in bits(options.stream, options.order, options.elements):
            try:
                sys.stdout.buffer.write(drawn)
            except BrokenPipeError:
                return 0
    found = {name: statistics(words, options.steps, options.elements) for name, words in ROWS.items()}
    rows = {row: {name: found[name][row] for name in ROWS} for row in found["two mixes"]}
    rows |= {row: {next(iter(ROWS)): z} for row, z in multipliers(16 * options.elements).items()}
    report.print_table(
        f"<{options.steps:,} steps of {options.elements:,} elements | {' | '.join(ROWS)}",
        [[row, *(f"{of_row[n]:+.1f}" if n in of_row else "" for n in ROWS)] for row, of_row in rows.items()],
    )
    return report.finish(claims(rows), rows, options.json)


if __name__ == "__main__":
    sys.exit(main())

"""Whether rounding could tell random words from random numbers: statistics of their fields, each in sd.

    python benchmarks/random_words.py [--steps 2000] [--elements 65536] [--json benchmarks/results/NAME.json]
    python benchmarks/random_words.py --stream low --order columns | RNG_test stdin16

A row is a statistic over steps and elements of a leaf: for the word of the contract (W8); for one with a mix
of two multiplications, and one with two of these, the second under a key of its own; and for JAX's Threefry.
A number says how many standard deviations a figure is from the figure of independent uniform numbers. It is
the number of the worst of the three fields of a word. Every statistic is roughly normal; 5 is the limit that
is claimed.

- mean; bytes: chi-square of the four bytes of a word; pairs: of the top and of the lowest bytes of neighbours
- time: the variance of each element's sum over all steps, and of each step's sum over all elements
- columns 2^k: the variance of the sums, at each step, over elements that are 2^k apart
- repeats 2^k: how often two of these have the same field
- rare: how often an element meets a field below 0.005, whose counts are Poisson's
- lag d: correlation of elements d apart; steps: of an element and its neighbours at consecutive steps
- fields: correlation of those of the weight and of nu; of mu's with either, less the 2^-8 that they share
- k0: lags 1 to 3 under the multipliers of which the worst is to be feared

A stream writes one field of the words of consecutive steps without end, for batteries that read bits: in the
order of the elements ("steps"), of the steps, 4,096 at a time ("time"), or of the columns of a matrix with
--columns columns ("columns").
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
STREAMS = {"high": 16, "middle": 8, "low": 0}  # fields of the weight, of mu and of nu
MULTIPLIERS = (1, 3, 0xFFFFFFFF, 0x10001, 0x80000001, 0x55555555)
LAGS = (1, 2, 3, 64, 256, 1024)
STRIDES = (4, 8, 12, 16, 20)
RARE = 328  # of 65,536: 0.005
_ROWS, _COLUMNS = 256, 16


def contract(k0, k1, index):
    """Return the words of the contract."""
    return mix(index * (k0 | np.uint32(1)) + k1)


def short(k0, k1, index):
    """Return words of a mix of two multiplications."""
    return short_mix(index * (k0 | np.uint32(1)) + k1)


def twice(k0, k1, index):
    """Return words whose index is mixed before it meets the second key."""
    return short_mix(short_mix(index ^ k0) + k1)


def short_mix(x):
    """Return the two-multiply finaliser of uint32 `x`.

    Source: C. Wellons, hash-prospector, "lowbias32" (2018), with his later constants.
    """
    x = (x ^ (x >> np.uint32(16))) * np.uint32(0x7FEB352D)
    x = (x ^ (x >> np.uint32(15))) * np.uint32(0x846CA68B)
    return x ^ (x >> np.uint32(16))


def threefry(k0, k1, index):
    """Return the words that `jax.random.bits` makes of a key."""
    first, second = threefry2x32((k0, k1), (np.zeros_like(index), index))
    return first ^ second


ROWS: dict[str, Words] = {
    "contract": contract,
    "two multiplications": short,
    "twice two": twice,
    "Threefry": threefry,
}


def keys(steps: np.ndarray, seed: int = 0, leaf: str = "w") -> tuple[np.ndarray, np.ndarray]:
    """Return k0 and k1 of a leaf's word at some steps (contract W4)."""
    k0, kx = fold(fold(seed_words(seed), steps), leaf_id(leaf))
    return k0, fold((k0, kx), np.zeros_like(steps))[1]


class Tally:
    """Sums of statistics of the three fields over steps, with the means and variances that are due."""

    def __init__(self):
        self._sums: dict[str, list] = {}

    def add(self, name: str, value: np.ndarray, variance: float, mean: float = 0.0) -> None:
        """Add the values of one step to a statistic."""
        sum_, total = self._sums.get(name, (0.0, 0.0))
        self._sums[name] = [sum_ + value - mean, total + variance]

    def scores(self) -> dict[str, float]:
        """Return of every statistic the worst field, in standard deviations."""
        return {name: worst(sum_ / np.sqrt(variance)) for name, (sum_, variance) in self._sums.items()}


def statistics(words: Words, steps: int, elements: int) -> dict[str, float]:
    """Return every statistic by name, in standard deviations.

    Args:
        words: to be judged.
        steps: how many, at least 2.
        elements: of the leaf, at least 4,096.
    """
    tally, index = Tally(), np.arange(elements, dtype=np.uint32)
    sums, rare = np.zeros((3, elements)), np.zeros((3, elements))
    bytes_, pairs = np.zeros((4, 256)), np.zeros((2, 65536))
    before = None
    for k0, k1 in zip(*keys(np.arange(1, steps + 1, dtype=np.uint32)), strict=True):
        drawn = words(k0, k1, index)
        fields = fields_of(drawn)
        x = uniform(fields)
        _neighbours(tally, x, before)
        _columns(tally, words, k0, k1)
        sums, rare, before = sums + x, rare + (fields < RARE), x
        for i, byte in enumerate(np.ascontiguousarray(drawn).view(np.uint8).reshape(-1, 4).T):
            bytes_[i] += np.bincount(byte, minlength=256)
        for i, shift in enumerate((24, 0)):
            byte = drawn >> np.uint32(shift) & np.uint32(255)
            pairs[i] += np.bincount(byte[:-1] * np.uint32(256) + byte[1:], minlength=65536)
    chance = RARE / 65536
    return tally.scores() | {
        "mean": worst(sums.sum(1) / np.sqrt(steps * elements)),
        "time, sums of elements": worst(_excess(sums, steps).sum(1) / np.sqrt((2 - 1.2 / steps) * elements)),
        "rare": worst((rare.var(1) / (steps * chance * (1 - chance)) - 1) / np.sqrt(2 / elements)),
        "bytes": worst(_chi_square(bytes_)),
        "pairs": worst(_chi_square(pairs)),
    }


def _neighbours(tally: Tally, x: np.ndarray, before: np.ndarray | None) -> None:
    """Count how fields go with each other, with those of elements next to them, and of the step before."""
    elements = x.shape[1]
    tally.add("time, sums of steps", _excess(x.sum(1, dtype=np.float64), elements), 2 - 1.2 / elements)
    weight, mu, nu = x
    products = np.array([(weight * nu).sum(), (weight * mu).sum(), (mu * nu).sum()], np.float64)
    tally.add("fields", products, elements, np.array([0, 2.0**-8, 2.0**-8]) * elements)
    for d in LAGS:
        tally.add(f"lag {d}", (x[:, d:] * x[:, :-d]).sum(1, dtype=np.float64), elements - d)
    for shift in (0, 1, -1) if before is not None else ():
        tally.add(f"steps, shift {shift}", (x * np.roll(before, shift, 1)).sum(1, dtype=np.float64), elements)


def _columns(tally: Tally, words: Words, k0, k1) -> None:
    """Count sums of, and repeats within, some columns of matrices with rows of 2^k elements."""
    rows, columns = np.arange(_ROWS, dtype=np.uint32)[:, None], np.arange(_COLUMNS, dtype=np.uint32)
    m, n = 65536.0, _ROWS
    due = n - m * (1 - (1 - 1 / m) ** n)
    spread = m * (m - 1) * (1 - 2 / m) ** n + m * (1 - 1 / m) ** n - m**2 * (1 - 1 / m) ** (2 * n)
    for k in STRIDES:
        fields = np.sort(fields_of(words(k0, k1, rows * np.uint32(2**k) + columns)), axis=1)
        sums = uniform(fields).sum(1, dtype=np.float64)
        tally.add(f"columns 2^{k}", _excess(sums, _ROWS).sum(1), (2 - 1.2 / _ROWS) * _COLUMNS)
        repeats = (fields[:, 1:] == fields[:, :-1]).sum((1, 2))
        tally.add(f"repeats 2^{k}", repeats, spread * _COLUMNS, due * _COLUMNS)


def fields_of(words: np.ndarray) -> np.ndarray:
    """Return the fields of the weight, of mu and of nu, on a new first axis."""
    return np.stack([words >> np.uint32(shift) & np.uint32(0xFFFF) for shift in STREAMS.values()])


def uniform(fields: np.ndarray) -> np.ndarray:
    """Return fields of 16 bits as numbers of mean 0 and variance 1."""
    return (fields.astype(np.float32) - np.float32(32767.5)) * np.float32(np.sqrt(12 / (2.0**32 - 1)))


def _excess(sums: np.ndarray, count: int) -> np.ndarray:
    """Return squares of sums of uniform numbers, over their mean, less 1: their variance is 2 - 1.2/count."""
    return sums**2 / count - 1


def multipliers(elements: int) -> dict[str, float]:
    """Return the worst correlation at lags 1 to 3 under each multiplier, in standard deviations."""
    index, found = np.arange(elements, dtype=np.uint32), {}
    for k0 in MULTIPLIERS:
        x = uniform(fields_of(contract(np.uint32(k0), np.uint32(12345), index)))
        lags = [(x[:, d:] * x[:, :-d]).sum(1, dtype=np.float64) / np.sqrt(elements - d) for d in (1, 2, 3)]
        found[f"k0 = {k0:#x}"] = worst(np.array(lags))
    return found


def _chi_square(counts: np.ndarray) -> np.ndarray:
    """Return chi-square of rows of counts that should be even, less its mean, over its standard deviation."""
    expected, freedom = counts.mean(1, keepdims=True), counts.shape[1] - 1
    return (((counts - expected) ** 2 / expected).sum(1) - freedom) / np.sqrt(2 * freedom)


def worst(x: np.ndarray) -> float:
    """Return the number of the largest magnitude."""
    return float(x.ravel()[np.abs(x).argmax()])


def bits(field: str, order: str, elements: int, columns: int) -> Iterator[np.ndarray]:
    """Yield one field of the words of steps 1, 2, ..., as uint16; of the field "all" the words, uint32."""
    index, step = np.arange(elements, dtype=np.uint32), 1
    many = 4096 if order == "time" else max(1, 2**22 // elements)
    while True:
        k0, k1 = (k[:, None] for k in keys(np.arange(step, step + many, dtype=np.uint32)))
        drawn = contract(k0, k1, index)
        if order == "time":
            drawn = np.ascontiguousarray(drawn.T)
        elif order == "columns":
            drawn = np.ascontiguousarray(drawn.reshape(many, -1, columns).transpose(0, 2, 1))
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
    parser.add_argument("--columns", type=lambda x: int(x, 0), default=4096)
    parser.add_argument("--json", type=pathlib.Path, help="also write the figures here")
    options = parser.parse_args()
    if options.stream:
        for drawn in bits(options.stream, options.order, options.elements, options.columns):
            try:
                sys.stdout.buffer.write(drawn)
            except BrokenPipeError:
                return 0
    found = {name: statistics(words, options.steps, options.elements) for name, words in ROWS.items()}
    rows = {row: {name: found[name][row] for name in ROWS} for row in found["contract"]}
    rows |= {row: {next(iter(ROWS)): z} for row, z in multipliers(16 * options.elements).items()}
    report.print_table(
        f"<{options.steps:,} steps of {options.elements:,} elements | {' | '.join(ROWS)}",
        [[row, *(f"{of_row[n]:+.1f}" if n in of_row else "" for n in ROWS)] for row, of_row in rows.items()],
    )
    return report.finish(claims(rows), rows, options.json)


if __name__ == "__main__":
    sys.exit(main())

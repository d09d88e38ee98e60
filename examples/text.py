"""The demo's text: the Python standard library's own documentation, as characters.

`pydoc_data.topics` holds what `help("topics")` prints, 0.4 to 0.6 million characters, and is on every machine
that has Python. Nothing is downloaded. Its wording changes a little from one Python version to the next, and
the figures with it.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from pydoc_data.topics import topics

import numpy as np

VALIDATION_EVERY = 10  # every tenth topic is kept for validation


@dataclass(frozen=True)
class Text:
    """Characters as indices into one sorted vocabulary, split by topic."""

    vocabulary: str
    train: np.ndarray  # shape (characters,), dtype int32
    validation: np.ndarray  # shape (characters,), dtype int32

    def batches(
        self, steps: int, batch: int, context: int, seed: int
    ) -> Iterator[tuple[np.ndarray, np.ndarray]]:
        """Yield `steps` pairs (characters, the characters that follow), each int32 of shape (batch, context).

        A pure function of its arguments, in NumPy, so that both frameworks see the very same batches.
        """
        generator = np.random.default_rng(seed)
        for _ in range(steps):
            starts = generator.integers(0, self.train.size - context, size=(batch, 1))
            windows = self.train[starts + np.arange(context + 1)]
            yield windows[:, :-1], windows[:, 1:]

    def validation_windows(self, count: int, context: int) -> tuple[np.ndarray, np.ndarray]:
        """Return `count` windows spread evenly over the validation text, in the form of `batches`."""
        starts = np.linspace(0, self.validation.size - context - 1, count).astype(np.int64)
        windows = self.validation[starts[:, None] + np.arange(context + 1)]
        return windows[:, :-1], windows[:, 1:]


def load_text() -> Text:
    """Read the documentation topics, in sorted order, and split them into training and validation text."""
    pages = [topics[name] for name in sorted(topics)]
    vocabulary = "".join(sorted(set("".join(pages))))
    index = {character: i for i, character in enumerate(vocabulary)}

    def encode(chosen: list[str]) -> np.ndarray:
        return np.array([index[character] for character in "".join(chosen)], dtype=np.int32)

    kept = pages[::VALIDATION_EVERY]
    rest = [page for i, page in enumerate(pages) if i % VALIDATION_EVERY]
    return Text(vocabulary, train=encode(rest), validation=encode(kept))

"""Random words: one uint32 per element, a pure function of (seed, step, leaf, role, index).

Contract: section W. Keys are few and made with NumPy on the host. Words are many and made with torch on the
device, in int32, because torch has no uint32 arithmetic, and wrapping gives the same bits. There is no state,
and torch's own generators are never read or advanced.
"""

import math
from collections.abc import Callable, Mapping, Sequence

import numpy as np
import torch
from torch import Tensor

from halfstep.random_words import (
    FIELD_SHIFTS,
    GOLDEN_RATIO,
    in_range,
    leaf_number,
    mix,
    threefry2x32,
    word_role,
)
from halfstep_torch.numbers.arrays import XP, TorchArrays
from halfstep_torch.numbers.seeds import Seed, as_seed

# Up to this number of elements torch uses one thread.
_ONE_THREAD = 1 << 15


class _NumpyArrays(TorchArrays):
    """The NumPy operations that mixing needs."""

    def shift(self, bits, by):
        """Return patterns moved down."""
        return (bits.view(np.uint32) >> by).view(np.int32)


_NUMPY = _NumpyArrays()


def mixed_words(sums: Tensor) -> Tensor:
    """Mix int32 sums to words in place (contract W8).

    In eager mode on a CPU, NumPy computes them if one thread is enough. Its logical shifts make it faster,
    with a third to two thirds of torch's time.
    """
    if type(sums) is Tensor and sums.device.type == "cpu":
        if sums.numel() <= _ONE_THREAD or torch.get_num_threads() == 1:
            mix(_NUMPY, sums.numpy())
            return sums
    return mix(XP, sums)


def fold(key: tuple[np.ndarray, np.ndarray], x: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Derive keys from `key` and `x` by Threefry-2x32, 20 rounds on the counter (0, x) with `key`.

    Args:
        key: two uint32 arrays, of shapes that broadcast with `x`.
        x: uint32 array.

    Source: contract W3.
    """
    return threefry2x32(key, (np.zeros_like(x), x))


def leaf_keys(
    seed: int, steps: Sequence[int] | np.ndarray, leaves: Sequence[int] | np.ndarray, roles: Sequence[int]
) -> np.ndarray:
    """Return the keys of many leaves at once: uint32 rows (k0, k1 of the first role, of the second, ...), W4.

    With (k, kx) of a seed, step and leaf, k0 is k | 1, and k1 is the second word of (k, kx) and the role.

    Args:
        seed: a number in [0, 2^64).
        steps: the step of each leaf.
        leaves: the id of each leaf.
        roles: the roles, the same for every leaf.
    """
    high, low = np.uint32(seed >> 32), np.uint32(seed & 0xFFFFFFFF)
    step_words, inverse = np.unique(np.asarray(steps, np.uint32), return_inverse=True)
    step_keys = fold((np.full_like(step_words, high), np.full_like(step_words, low)), step_words)
    k, kx = fold((step_keys[0][inverse], step_keys[1][inverse]), np.asarray(leaves, np.uint32))
    k1 = fold((k[:, None], kx[:, None]), np.asarray(roles, np.uint32)[None, :])[1]
    return np.concatenate([k[:, None] | np.uint32(1), k1], axis=1)


def words_from(index: Tensor, k0, keys: Mapping[int, int | Tensor]) -> Callable[..., Tensor]:
    """Return a function from a role to its int32 words for rounding (contract W6, W8).

    With False as its second argument it returns the sum before mixing (contract F15). A given shape must be
    the shape of `index`.

    Words are mix(index k0 + k1), made once for all roles that share them. The field of the role is at the
    top, and other bits are undefined.

    Args:
        index: int32, the low half of the row-major index. The caller cuts an array so that the high half is
            the same for all of `index`. It adds 0x9E3779B9 times the high half to every k1.
        k0: int32 number or 0-d tensor, odd.
        keys: the k1 of each `word_role`.
    """
    made: dict[int, Tensor] = {}

    def words(role: int, mixed: bool = True, shape: object = None) -> Tensor:
        key = word_role(role)
        if not mixed:
            return index * k0 + keys[key]
        if key not in made:
            made[key] = mixed_words(index * k0 + keys[key])
        return field_on_top(made[key], role)

    return words


def field_on_top(words: Tensor, role: int) -> Tensor:
    """Return int32 words with the field of a role at the top (contract W6)."""
    shift = FIELD_SHIFTS.get(role, 0)
    return words << shift if shift else words


def as_int32(words: np.ndarray) -> np.ndarray:
    """Return uint32 words as int32 of the same patterns."""
    return words.astype(np.uint32, copy=False).view(np.int32)


def high_key(k1: np.ndarray, high: int) -> np.ndarray:
    """Return k1 for elements with the high half `high` of their row-major index (contract W8)."""
    return k1 + GOLDEN_RATIO * np.full_like(k1, high)


def random_words(
    seed: Seed,
    step: int,
    leaf: str | int,
    role: int,
    shape: int | Sequence[int],
    offset: int = 0,
    *,
    device: torch.device | str | None = None,
) -> Tensor:
    """Return a word for each element of an array, by seed, step, leaf, role and index (contract W1 to W8).

    The field of the role is on top. torch's generators are not read.

    Args:
        seed: seed of the random words, as in `round_stochastically`.
        step: the count after its increment, 1 at the first update.
        leaf: the leaf's name, or its id, a number below 2^32.
        role: a `Role`.
        shape: the shape of the array, or of a part.
        offset: the row-major index of the part's first element.
        device: the device of the result.

    Raises:
        TypeError: if the seed is not an integer or a pair.
        ValueError: if the seed, the step or a leaf's id is out of range.

    Example:
        >>> from halfstep_torch import Role
        >>> [hex(word) for word in random_words(0, 1, "w", Role.PARAM, (2,)).tolist()]
        ['0x81148fe2', '0xc4c99cc7']

    Source: contract W1 to W8.
    """
    seed = as_seed("random_words", seed)
    shape = (shape,) if isinstance(shape, int) else tuple(shape)
    offset, role = in_range("offset", offset, 64), in_range("role", role, 32)
    if not 0 <= step < 2**32:
        raise ValueError(
            f"random_words: step={step} is outside [0, 2^32). Use the count of updates, 1 at the first."
        )
    k0, k1 = as_int32(leaf_keys(seed, [step], [leaf_number(leaf)], [word_role(role)])[0]).tolist()
    words, shift = whole_words(k0, k1, shape, device, offset), FIELD_SHIFTS.get(role, 0)
    return (words << shift | XP.shift(words, 32 - shift) if shift else words).view(torch.uint32)


def whole_words(
    k0: int,
    k1: int,
    shape: Sequence[int],
    device: torch.device | str | None,
    offset: int = 0,
    mixed: bool = True,
) -> Tensor:
    """Return the int32 words of an array, or of the part of it that starts at a row-major index.

    Args:
        k0: an odd int32 number.
        k1: an int32 number.
        shape: the shape of the array or part.
        device: the device of the result.
        offset: the row-major index of the first element.
        mixed: whether to mix the sums. Otherwise they are returned (contract F15).
    """
    row = np.array([k1], np.int64).astype(np.uint32)
    total, parts = math.prod(shape), []
    start = offset
    while start < offset + total:
        # The high half of the index is constant within a part.
        stop = min(offset + total, (start >> 32) + 1 << 32)
        high = int(as_int32(high_key(row, start >> 32))[0])
        low = start & 0xFFFFFFFF
        index = torch.arange(low, low + stop - start, dtype=torch.int64, device=device).to(torch.int32)
        parts.append(mixed_words(index * k0 + high) if mixed else index * k0 + high)
        start = stop
    flat = torch.cat(parts) if parts else torch.empty(0, dtype=torch.int32, device=device)
    return flat.reshape(tuple(shape))

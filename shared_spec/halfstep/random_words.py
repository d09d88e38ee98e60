"""Random words: ids of leaves and roles, and the two mixing functions. Contract: section W."""

import enum
import functools
import operator
from typing import SupportsIndex

import numpy as np

from halfstep.arrays import Array, Arrays


class Role(enum.IntEnum):
    """The kind of array that is rounded, which determines the random word and its field (contract W6)."""

    PARAM = 0
    MU = 1
    NU = 2
    ACCUMULATOR = 3
    STATE = 4


FIELD_SHIFTS: dict[int, int] = {Role.PARAM: 0, Role.MU: 8, Role.NU: 16}
"""Roles that share a leaf's word, with the offset of their 16-bit field from its top bit."""

GOLDEN_RATIO = np.uint32(0x9E3779B9)
"""Factor for the high half of an index, which is added to k1 (contract W8)."""

# Random123, threefry.h, R_32x2_*: eight rotations, in two groups of four rounds.
_ROTATIONS = ((13, 15, 26, 6), (17, 29, 16, 24))
_PARITY = np.uint32(0x1BD11BDA)
# Pairs of a shift and a factor. The products of int32 factors wrap to the same patterns.
_MIXING = ((17, 0xED5AD4BB - 2**32), (11, 0xAC4C1B51 - 2**32), (15, 0x31848BAB))

_MOMENT_ROLES = {"param": Role.PARAM, "mu": Role.MU, "trace": Role.MU, "nu": Role.NU}


@functools.lru_cache(maxsize=1 << 16)
def leaf_id(name: str) -> int:
    """Return the 32-bit FNV-1a hash of a leaf's name in UTF-8 (contract W7).

    Example:
        >>> hex(leaf_id("a"))
        '0xe40c292c'

    Source: Fowler, Noll, Vo, "The FNV non-cryptographic hash algorithm", draft-eastlake-fnv, section 2.
    """
    value = 0x811C9DC5
    for byte in name.encode():
        value = ((value ^ byte) * 0x01000193) % 2**32
    return value


def role_of(name: str) -> int:
    """Return the role for a moment's words, which is a `Role` or the hash of its name.

    Example:
        >>> role_of("trace") == Role.MU, role_of("a") == leaf_id("a")
        (True, True)
    """
    return _MOMENT_ROLES[name] if name in _MOMENT_ROLES else leaf_id(name)


def word_role(role: int) -> int:
    """Return the role that gives the key for another role's words (contract W6).

    Example:
        >>> word_role(Role.NU) == Role.PARAM, word_role(Role.STATE) == Role.STATE
        (True, True)
    """
    return Role.PARAM if role in FIELD_SHIFTS else role


def leaf_number(leaf: str | int) -> int:
    """Return a leaf's id, given its name or the id itself."""
    return leaf_id(leaf) if isinstance(leaf, str) else in_range("leaf", leaf, 32)


def in_range(name: str, value: SupportsIndex, bits: int) -> int:
    """Return an argument of `random_words` after a check of its range.

    Raises:
        TypeError: if the value is not an integer.
        ValueError: if the value is outside [0, 2^bits).
    """
    value = operator.index(value)
    if not 0 <= value < 2**bits:
        raise ValueError(
            f"random_words: {name}={value} is outside [0, 2^{bits}). Use an integer in that range."
        )
    return value


def threefry2x32(key: tuple[Array, Array], counter: tuple[Array, Array]) -> tuple[Array, Array]:
    """Encrypt `counter` under `key` with Threefry-2x32 in 20 rounds, elementwise (contract W3).

    Args:
        key: two uint32 arrays, from NumPy or JAX.
        counter: two uint32 arrays.

    Returns:
        Two uint32 arrays.

    Source: J. Salmon et al., "Parallel random numbers: as easy as 1, 2, 3", SC11, section 4.2.
    """
    k0, k1 = key
    schedule = (k0, k1, k0 ^ k1 ^ _PARITY)
    x0, x1 = counter[0] + k0, counter[1] + k1
    for group in range(5):
        for rotation in _ROTATIONS[group % 2]:
            x0 = x0 + x1
            x1 = ((x1 << np.uint32(rotation)) | (x1 >> np.uint32(32 - rotation))) ^ x0
        x0 = x0 + schedule[(group + 1) % 3]
        x1 = x1 + schedule[(group + 2) % 3] + np.uint32(group + 1)
    return x0, x1


def mix(xp: Arrays, x: Array) -> Array:
    """Return int32 patterns mixed by the three-multiply finaliser (contract W8), in place if possible.

    Source: C. Wellons, hash-prospector (2018), "triple32".
    """
    for shift, factor in _MIXING:
        x ^= xp.shift(x, shift)
        x *= factor
    x ^= xp.shift(x, 14)
    return x

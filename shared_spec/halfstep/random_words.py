"""Random words: the numbers of leaves and roles, and the two functions that mix. Contract: section W."""

import enum
import functools
import operator
from typing import SupportsIndex

import numpy as np

from halfstep.arrays import Array, Arrays


class Role(enum.IntEnum):
    """What is rounded: it says which word is read, and which field of it (contract W6)."""

    PARAM = 0
    MU = 1
    NU = 2
    ACCUMULATOR = 3
    STATE = 4


FIELD_SHIFTS: dict[int, int] = {Role.PARAM: 0, Role.MU: 8, Role.NU: 16}
"""The roles that share a leaf's word, and how far below the top of it their field of 16 bits begins."""

GOLDEN_RATIO = np.uint32(0x9E3779B9)
"""The factor of the high half of an index, which is added to k1 (contract W8)."""

# Random123, threefry.h, R_32x2_*: eight rotations, four to a group of rounds.
_ROTATIONS = ((13, 15, 26, 6), (17, 29, 16, 24))
_PARITY = np.uint32(0x1BD11BDA)
# Pairs of a shift and a factor; as int32, whose products wrap to the same patterns.
_MIXING = ((17, 0xED5AD4BB - 2**32), (11, 0xAC4C1B51 - 2**32), (15, 0x31848BAB))

_MOMENT_ROLES = {"param": Role.PARAM, "mu": Role.MU, "trace": Role.MU, "nu": Role.NU}


@functools.lru_cache(maxsize=1 << 16)
def leaf_id(name: str) -> int:
    """Return the 32-bit FNV-1a hash of the UTF-8 bytes of a leaf's name (contract W7).

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
    """Return the role of a moment's words: a `Role`, or the hash of its name.

    Example:
        >>> role_of("trace") == Role.MU, role_of("a") == leaf_id("a")
        (True, True)
    """
    return _MOMENT_ROLES[name] if name in _MOMENT_ROLES else leaf_id(name)


def word_role(role: int) -> int:
    """Return the role under whose key the words of a role are made (contract W6).

    Example:
        >>> word_role(Role.NU) == Role.PARAM, word_role(Role.STATE) == Role.STATE
        (True, True)
    """
    return Role.PARAM if role in FIELD_SHIFTS else role


def leaf_number(leaf: str | int) -> int:
    """Return the id of a leaf, given its name or the id itself."""
    return leaf_id(leaf) if isinstance(leaf, str) else in_range("leaf", leaf, 32)


def in_range(name: str, value: SupportsIndex, bits: int) -> int:
    """Return an argument of `random_words`, checked to be a number of the given bits.

    Raises:
        TypeError: if it is no integer.
        ValueError: if it is out of range.
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
        key: two uint32 arrays, of NumPy or JAX.
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
    """Return the three-multiply finaliser of int32 patterns (contract W8), in place where arrays can change.

    Source: C. Wellons, hash-prospector (2018), "triple32".
    """
    for shift, factor in _MIXING:
        x ^= xp.shift(x, shift)
        x *= factor
    x ^= xp.shift(x, 14)
    return x

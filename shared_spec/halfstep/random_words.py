"""The names of random words: numbers of leaves and roles. Contract: W5 to W7. The words are a framework's."""

import enum
import functools
import operator
from typing import Any


class Role(enum.IntEnum):
    """What is rounded: it says which word is read, and which field of it (contract W6)."""

    PARAM = 0
    MU = 1
    NU = 2
    ACCUMULATOR = 3
    STATE = 4


FIELD_SHIFTS: dict[int, int] = {Role.PARAM: 0, Role.MU: 8, Role.NU: 16}
"""The roles that share a leaf's word, and how far below the top of it their field of 16 bits begins."""

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


def in_range(name: str, value: Any, bits: int) -> int:
    """Return an argument of `random_words` that is a number of so many bits.

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

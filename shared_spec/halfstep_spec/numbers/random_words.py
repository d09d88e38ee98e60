"""Random words: one uint32 per element, a pure function of (seed, step, leaf, role, index).

Contract: section W. Vectors: random_words. Nothing is drawn and nothing is kept.
"""

import enum
import functools

import numpy as np

from halfstep_spec.numbers.seeds import seed_words


class Role(enum.IntEnum):
    """The use of a word: streams of one leaf and step that must not be shared."""

    PARAM = 0
    MU = 1
    NU = 2
    ACCUMULATOR = 3
    STATE = 4


_ROLES = {"param": Role.PARAM, "mu": Role.MU, "trace": Role.MU, "nu": Role.NU}

FIELD_SHIFTS: dict[int, int] = {Role.PARAM: 0, Role.MU: 8, Role.NU: 16}
"""The roles that share a leaf's word, and by how many bits it is turned to the left for each."""

LAST_STEP = 2**31 - 1
"""The last count: the largest int32 (contract W5)."""
_ROTATIONS = ((13, 15, 26, 6), (17, 29, 16, 24))
_PARITY = np.uint32(0x1BD11BDA)
_GOLDEN_RATIO = np.uint32(0x9E3779B9)


def threefry2x32(key, counter):
    """Encrypt `counter` under `key` with Threefry-2x32 in 20 rounds.

    Args:
        key: two uint32 words (scalars or arrays).
        counter: two uint32 words.

    Returns:
        Two uint32 words.

    Source: J. Salmon et al., "Parallel random numbers: as easy as 1, 2, 3", SC11, section 4.2; constants as
    in Random123's threefry.h.
    """
    k0, k1 = (np.atleast_1d(np.asarray(k, np.uint32)) for k in key)
    schedule = (k0, k1, k0 ^ k1 ^ _PARITY)
    x0, x1 = (np.atleast_1d(np.asarray(c, np.uint32)) for c in counter)
    x0, x1 = x0 + schedule[0], x1 + schedule[1]
    for group in range(5):
        for rotation in _ROTATIONS[group % 2]:
            x0 = x0 + x1
            x1 = ((x1 << np.uint32(rotation)) | (x1 >> np.uint32(32 - rotation))) ^ x0
        x0 = x0 + schedule[(group + 1) % 3]
        x1 = x1 + schedule[(group + 2) % 3] + np.uint32(group + 1)
    return x0, x1


def fold(key, x):
    """Derive a key from `key` and the uint32 `x`: threefry2x32 of the counter (0, x), JAX's `fold_in`."""
    return threefry2x32(key, (np.uint32(0), np.asarray(x, np.uint32)))


def leaf_id(name: str) -> int:
    """Return the 32-bit FNV-1a hash of the UTF-8 bytes of a name: of a leaf, or of a moment.

    Source: Fowler, Noll, Vo, "The FNV non-cryptographic hash algorithm", draft-eastlake-fnv, section 2.
    """
    value = 0x811C9DC5
    for byte in name.encode():
        value = ((value ^ byte) * 0x01000193) % 2**32
    return value


def role_of(moment: str) -> int:
    """Return the role of the words that round a moment: 1 for mu and trace, 2 for nu, else its `leaf_id`.

    Args:
        moment: its name in the contract.
    """
    return _ROLES.get(moment, leaf_id(moment))


def next_step(count: int) -> int:
    """Return count + 1, and the last step for ever after (contract W5)."""
    return min(count + 1, LAST_STEP)


@functools.lru_cache(4096)
def leaf_key(seed: int, step: int, leaf: int, role: int):
    """Return (k0, k1): k0, odd, is shared by all roles of a leaf and step, k1 is the role's own.

    (k, kx) = fold(fold(seed, step), leaf); k0 = k | 1; k1 = the second word of fold((k, kx), role).
    """
    k, kx = fold(fold(seed_words(seed), step), leaf)
    return k | np.uint32(1), fold((k, kx), role)[1]


def mix(x: np.ndarray) -> np.ndarray:
    """Return the three-multiply finaliser of uint32 `x`.

    Source: C. Wellons, hash-prospector (2018), "triple32".
    """
    x = (x ^ (x >> np.uint32(17))) * np.uint32(0xED5AD4BB)
    x = (x ^ (x >> np.uint32(11))) * np.uint32(0xAC4C1B51)
    x = (x ^ (x >> np.uint32(15))) * np.uint32(0x31848BAB)
    return x ^ (x >> np.uint32(14))


def random_words(seed: int, step: int, leaf: str | int, role: int, shape, offset: int = 0) -> np.ndarray:
    """Return one word per element of an array: mix(lo k0 + k1 + 0x9E3779B9 hi).

    (hi, lo) are the two halves of the 64-bit row-major index of the element in the whole array. Consumers
    take the top 16 bits. Roles 0, 1 and 2 have one word, under the key of role 0, and a field of it each:
    bits 16 to 31, 8 to 23 and 0 to 15. It is turned to the left by 0, 8 and 16 bits, which brings that to
    the top.

    Args:
        seed: in [0, 2^64).
        step: the count after its increment; 1 at the first update.
        leaf: the leaf's name, or its uint32 id.
        role: a `Role`, or `role_of` a moment.
        shape: of the array, or of the part of it that starts at `offset`.
        offset: row-major index of the first element.

    Returns:
        uint32, of `shape`.
    """
    words = mix(unmixed_words(seed, step, leaf, role, shape, offset).reshape(-1))
    turn = FIELD_SHIFTS.get(role, 0)  # NumPy shifts by 32 bits to zero
    return (words << np.uint32(turn) | words >> np.uint32(32 - turn)).reshape(shape)


def unmixed_words(seed: int, step: int, leaf: str | int, role: int, shape, offset: int = 0) -> np.ndarray:
    """Return the words before they are mixed, lo k0 + k1 + 0x9E3779B9 hi: they dither blocks (contract F15).

    Over steps, k0 and k1 are random: the top bits of any two elements' sums are then as good as independent.
    """
    leaf = leaf_id(leaf) if isinstance(leaf, str) else leaf
    k0, k1 = leaf_key(seed, step, leaf, Role.PARAM if role in FIELD_SHIFTS else role)
    index = np.arange(int(np.prod(shape)), dtype=np.uint64) + np.uint64(offset)
    lo, hi = index.astype(np.uint32), (index >> np.uint64(32)).astype(np.uint32)
    return (lo * k0 + k1 + _GOLDEN_RATIO * hi).reshape(shape)

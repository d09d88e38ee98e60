"""Random words: keys, leaf names, and words with their 64-bit index."""

import numpy as np

from halfstep_spec.numbers.random_words import Role, fold, leaf_id, leaf_key, random_words, role_of
from halfstep_spec.numbers.seeds import seed_words
from halfstep_spec.vectors import Array, Case

NOTES = {
    "LargeIndex": "row-major indices of 2^32 and more, so the high word of the index counts",
    "LargeSeed": "both words of the seed are in use",
    "Step": "the step enters the key",
    "Field": "roles 0, 1 and 2 have one word, and a field of it each, brought to the top",
}

_PI = (0x243F6A88, 0x85A308D3, 0x13198A2E, 0x03707344)


def cases() -> list[Case]:
    """Return the cases of random_words.json."""
    return [*_fold_cases(), *_leaf_id_cases(), *_key_cases(), *_word_cases()]


def _fold_cases() -> list[Case]:
    keys = [(0, 0, 0), (2**32 - 1, 2**32 - 1, 2**32 - 1), (_PI[2], _PI[3], _PI[1]), (0, 42, 7), (1, 0, 1)]
    result = []
    for k0, k1, x in keys:
        out = np.concatenate(fold((k0, k1), x))
        inputs = {"key": Array.of(np.array([k0, k1], np.uint32)), "x": Array.of(np.array([x], np.uint32))}
        comment = "JAX's fold_in of (key, x)" if x != 7 else "JAX: fold_in(key(42), 7) = 97d0552f 51bf719f"
        result.append(Case("fold", comment, {}, inputs, {"key": Array.of(out, compare="bits")}, (), ("W3",)))
    return result


def _leaf_id_cases() -> list[Case]:
    names = ["", "a", "foobar", "w", "layers/0/kernel", "encoder/attention/query/bias", "0", "größe/λ"]
    comment = "FNV-1a of the UTF-8 bytes; the first three are among the published answers"
    return [
        Case(
            "leaf_id",
            comment,
            {"leaf": n},
            {},
            {"id": Array.of(np.array([leaf_id(n)], np.uint32), compare="bits")},
            (),
            ("W7",),
        )
        for n in names
    ]


def _key_cases() -> list[Case]:
    result = []
    for seed in (0, 2**64 - 1):
        for role in Role:
            key = np.concatenate(leaf_key(seed, 3, leaf_id("w"), role))
            result.append(
                Case(
                    "leaf_key",
                    "k0 is shared by the roles of a leaf, k1 is the role's own",
                    {"leaf": "w", "role": int(role)},
                    {"seed": _seed(seed), "step": Array.of(np.int32(3))},
                    {"key": Array.of(key, compare="bits")},
                    (),
                    ("W2", "W4", "W6"),
                )
            )
    return result


def _word_cases() -> list[Case]:
    rows = [
        ("the default seed, first step", 0, 1, "w", Role.PARAM, (7,), 0, ()),
        ("nu has the same words, turned by 16 bits", 0, 1, "w", Role.NU, (7,), 0, ("Field",)),
        ("mu has the same words, turned by 8 bits", 0, 1, "w", Role.MU, (7,), 0, ("Field",)),
        ("a moment of another name: words of its own", 0, 1, "w", role_of("diff"), (7,), 0, ()),
        ("another leaf", 0, 1, "b", Role.PARAM, (7,), 0, ()),
        ("another step", 0, 2, "w", Role.PARAM, (7,), 0, ("Step",)),
        ("the last step of a 31-bit count", 0, 2**31 - 1, "w", Role.MU, (4,), 0, ("Step",)),
        ("high word of the seed", 1 << 32, 1, "w", Role.PARAM, (4,), 0, ("LargeSeed",)),
        ("all bits of the seed", 2**64 - 1, 1, "w", Role.MU, (4,), 0, ("LargeSeed",)),
        ("a matrix counts in row-major order", 5, 9, "layers/0/kernel", Role.NU, (3, 4), 0, ()),
        ("a scalar has index 0", 5, 9, "scale", Role.PARAM, (), 0, ()),
        ("an empty array has no words", 5, 9, "none", Role.PARAM, (0,), 0, ()),
        ("part of a larger array", 5, 9, "layers/0/kernel", Role.NU, (4,), 8, ()),
        ("across the carry into the high word", 7, 1, "w", Role.PARAM, (4,), 2**32 - 2, ("LargeIndex",)),
        ("far above it", 7, 1, "w", Role.STATE, (2, 2), 5 * 2**32 + 17, ("LargeIndex",)),
        ("gradient accumulator", 3, 4, "w", Role.ACCUMULATOR, (4,), 0, ()),
    ]
    return [_word_case(*row) for row in rows]


def _word_case(comment, seed, step, leaf, role, shape, offset, flags) -> Case:
    words = random_words(seed, step, leaf, role, shape, offset)
    arguments = {"leaf": leaf, "role": int(role), "shape": list(shape)}
    halves = np.array([offset >> 32, offset & 0xFFFFFFFF], np.uint32)
    inputs = {"seed": _seed(seed), "step": Array.of(np.int32(step)), "offset": Array.of(halves)}
    clauses = ("W1", "W8") + (("W2",) if "LargeSeed" in flags else ()) + (("W6",) if "Field" in flags else ())
    return Case(
        "random_words", comment, arguments, inputs, {"words": Array.of(words, compare="bits")}, flags, clauses
    )


def _seed(seed: int) -> Array:
    return Array.of(np.array(seed_words(seed), np.uint32))

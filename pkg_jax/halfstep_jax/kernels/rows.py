"""A program run on rows of elements: to trace its kernel, or to get the results of XLA for a trial."""

import jax

from halfstep.kernels.graph import ROWS, RowArray
from halfstep_jax.kernels.program import Program, Ref
from halfstep_jax.leaf_calls import Tree
from halfstep_jax.numbers.random_words import LeafKey
from halfstep_jax.storage.formats import Encoded


def shape_on_rows(row: RowArray, width: int) -> tuple[int, int]:
    """Return the shape of an array on rows of `width` elements."""
    return ROWS, width // row.shared


def run_on_rows(program: Program, given: dict[str, jax.Array], width: int, zero: Tree) -> list[jax.Array]:
    """Return the results of a program on rows.

    Args:
        program: whose calls are run.
        given: the arrays of the program by name, `number.i`, and `key.i`: the columns of keys.
        width: elements of a row.
        zero: a uint32 scalar: for XLA an opaque one.
    """
    keys, at = [], 0
    for roles in program.roles:
        k0, *k1 = (given[f"key.{at + i}"] for i in range(1 + len(roles)))
        keys.append(_Keys(roles, LeafKey(roles, k0, tuple(k1), zero)))
        at += 1 + len(roles)
    made: list[list[jax.Array]] = []

    def value(ref: Tree) -> Tree:
        if isinstance(ref, Encoded):
            shape = None if ref.shape is None else (ROWS, width)
            return Encoded(value(ref.codes), None if ref.scale is None else value(ref.scale), shape)
        return {
            "array": lambda: given[program.arrays[ref.at].name],
            "made": lambda: made[ref.of][ref.at],
            "number": lambda: given[f"number.{ref.at}"],
            "keys": lambda: keys[ref.at],
            "place": lambda: None,
            "zero": lambda: zero,
        }[ref.kind]()

    def is_operand(x: Tree) -> bool:
        return isinstance(x, Ref | Encoded)

    for function, static, shared, arrays in program.calls:
        operands = (jax.tree.map(value, part, is_leaf=is_operand) for part in (*shared, *arrays))
        made.append(jax.tree.leaves(function(static, *operands)))
    return [made[call][place] for call, place, _ in program.results]


class _Keys:
    """Stands for `LeafKeys`."""

    def __init__(self, roles: tuple[int, ...], key: LeafKey) -> None:
        self.roles, self.zero, self._key = roles, key.zero, key

    def of_leaf(self, index: None) -> LeafKey:
        """Return the key of the leaf."""
        return self._key

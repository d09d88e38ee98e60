"""The program of a leaf: the calls that wait for it, in a form that leaves of all shapes share.

waiting calls ── leaf_steps ──▶ LeafStep, with a Program ── trace ──▶ graph ──▶ kernel
"""

import dataclasses
import math
from collections.abc import Callable, Iterable, Sequence

import jax
import numpy as np

from halfstep.kernels.graph import NoGeneratedForm, RowArray
from halfstep_jax.leaf_calls import LaterArray, LeafCall, Tree, value_of
from halfstep_jax.numbers.random_words import LeafKeys
from halfstep_jax.storage.formats import Encoded

_LONGEST_BLOCK, _MOST_ELEMENTS = 1 << 12, (1 << 31) - (1 << 21)
"""Indices are int32; programs of a GPU go past the end of a leaf by less than 2^21."""
_DTYPES = frozenset(("float32", "bfloat16", "float16", "uint8", "uint16", "int8"))


@dataclasses.dataclass(frozen=True)
class Ref:
    """An operand of a program's call.

    Attributes:
        kind: "array", a row array; "made", a result of an earlier call; "number"; "keys"; "place", the index
            of the leaf; or "zero".
        at: which one.
        of: of "made", the call.
    """

    kind: str
    at: int = 0
    of: int = 0


@dataclasses.dataclass(frozen=True)
class Program:
    """The computation of a leaf, without its shape, its numbers and its keys.

    Attributes:
        calls: of each its function, its static argument, and its operands, with a `Ref` for each array.
        arrays: that are read.
        results: of each its call, its place among the results of the call, and its row array: one of `arrays`
            if the result replaces it.
        cuts: the distinct lengths of blocks, the coarsest first.
        numbers: how many.
        roles: of each stream of keys.
    """

    calls: tuple[tuple[Callable, object, Tree, Tree], ...]
    arrays: tuple[RowArray, ...]
    results: tuple[tuple[int, int, RowArray], ...]
    cuts: tuple[int, ...]
    numbers: int
    roles: tuple[tuple[int, ...], ...]


@dataclasses.dataclass
class LeafStep:
    """The step of one leaf.

    Attributes:
        calls: that wait.
        program: of the leaf.
        arrays: of the program.
        numbers: likewise.
        keys: of each stream.
        results: that are read outside.
        place: the index of the leaf in the keys.
        shape: of the leaf.
        run: elements of a run with a short last block; 0 if every block is whole.
    """

    calls: list[LeafCall]
    program: Program
    arrays: list[jax.Array]
    numbers: list[Tree]
    keys: list[LeafKeys]
    results: list[LaterArray]
    place: int
    shape: tuple[int, ...]
    run: int


def leaf_steps(calls: Sequence[LeafCall], results: Sequence[LaterArray]) -> list[LeafStep]:
    """Return the steps of the leaves for which a kernel may exist, given which results are read outside.

    Calls of other leaves get the reason as their `problem`.
    """
    made = []
    for group in _by_leaf([call for call in calls if not call.has_run]):
        reader = _Reader(group, results)
        if not reader.wanted:  # as of float32 weights that no link reads
            continue
        try:
            made.append(reader.step())
        except NoGeneratedForm as error:
            for call in group:
                call.problem = f"there is no generated form of {error}"
    return made


def _by_leaf(calls: Iterable[LeafCall]) -> list[list[LeafCall]]:
    """Return the calls of each leaf: each reads a result of another one of them."""
    groups: dict[int, list[LeafCall]] = {}
    for call in calls:
        read = [x.call for x in jax.tree.leaves(call.arrays) if _waits(x)]
        joined: list[LeafCall] = []
        for other in read:
            if groups[id(other)] is not joined:
                joined += groups[id(other)]
                for x in groups[id(other)]:
                    groups[id(x)] = joined
        joined.append(call)
        groups[id(call)] = joined
    return list({id(group): group for group in groups.values()}.values())


def _waits(x: Tree) -> bool:
    return isinstance(x, LaterArray) and x.value is None


class _Reader:
    """Reads the calls of one leaf."""

    def __init__(self, calls: list[LeafCall], results: Sequence[LaterArray]) -> None:
        self.calls = calls
        self.wanted = [x for x in results if x.call in calls and x.value is None]
        self.rows: list[RowArray] = []
        self.arrays: list[jax.Array] = []
        self.numbers: list[Tree] = []
        self.keys: list[LeafKeys] = []
        self.place = -1
        self._written: set[str] = set()
        self.shape = jax.tree.leaves(calls[0].result)[0].shape
        self._cuts: dict[int, int] = {}

    def step(self) -> LeafStep:
        """Return the step of the leaf."""
        for call in self.calls:
            self._take_cuts(call)
        cuts = self._nested()
        specs, results = [], []
        for number, call in enumerate(self.calls):
            specs.append((call.function, call.static, self._given(call.given), self._arrays(call)))
            places = jax.tree.leaves(call.result)
            for place, (x, like) in enumerate(zip(places, jax.tree.leaves(call.like), strict=True)):
                if any(x is y for y in self.wanted):
                    results.append((number, place, self._row_of(like), x))
        n = math.prod(self.shape)
        if not 0 < n < _MOST_ELEMENTS or self.place < 0 < len(self.keys):
            raise NoGeneratedForm(f"{n} elements")
        program = Program(
            tuple(specs),
            tuple(self.rows),
            tuple(result[:3] for result in results),
            cuts,
            len(self.numbers),
            tuple(keys.roles for keys in self.keys),
        )
        run = self._cuts[cuts[0]] if cuts else 0
        made = [result[3] for result in results]
        return LeafStep(
            self.calls, program, self.arrays, self.numbers, self.keys, made, self.place, self.shape, run
        )

    def _take_cuts(self, call: LeafCall) -> None:
        for block, run in call.cuts:
            if not block:
                continue
            run = run if run % block else 0
            if self._cuts.setdefault(block, run) != run or block > _LONGEST_BLOCK:
                raise NoGeneratedForm(f"blocks of {block}")

    def _nested(self) -> tuple[int, ...]:
        """Return the lengths of blocks; each coarser block is of whole finer ones."""
        cuts = tuple(sorted(self._cuts, reverse=True))
        for block in cuts[1:]:
            if cuts[0] % block or self._cuts[block] not in (0, self._cuts[cuts[0]]):
                raise NoGeneratedForm(f"blocks of {block} in blocks of {cuts[0]}")
        return cuts

    def _given(self, given: tuple) -> Tree:
        return jax.tree.map(self._shared, given, is_leaf=lambda x: isinstance(x, LeafKeys))

    def _shared(self, x: Tree) -> Ref:
        """Return the reference to a value that all elements share."""
        if isinstance(x, LeafKeys):
            return Ref("keys", _place_of(self.keys, x))
        if isinstance(x, np.ndarray) and x.ndim == 1:
            if self.place not in (-1, int(x[0])):
                raise NoGeneratedForm("keys in another order")
            self.place = int(x[0])
            return Ref("place")
        if getattr(x, "shape", None) == () and x.dtype == np.uint32:
            return Ref("zero")
        if getattr(x, "shape", None) == () and x.dtype == np.float32:
            return Ref("number", _place_of(self.numbers, x))
        raise NoGeneratedForm(f"a step that is given {x!r}")

    def _arrays(self, call: LeafCall) -> Tree:
        cuts = iter(call.cuts)

        def read(x: Tree) -> Tree:  # of an `Encoded` one with a `Ref` for each array
            if not isinstance(x, Encoded):
                return self._array(x, "element", 1)
            block, run = next(cuts)
            if x.shape is not None:
                if run % 2 and run % block:
                    raise NoGeneratedForm("packed codes of runs of odd length")
                codes: Tree = self._array(x.codes, "packed", 2)
            else:
                codes = self._array(x.codes, "element", 1)
            scale: Tree = None if x.scale is None else self._array(x.scale, "scale", block)
            return Encoded(codes, scale, None if x.shape is None else ())

        return jax.tree.map(read, call.arrays, is_leaf=lambda x: isinstance(x, Encoded))

    def _array(self, x: Tree, kind: str, shared: int) -> Ref:
        if _waits(x):
            return Ref("made", jax.tree.leaves(x.call.result).index(x), self.calls.index(x.call))
        x = value_of(x)
        if str(x.dtype) not in _DTYPES and not str(x.dtype).startswith("float8"):
            raise NoGeneratedForm(f"arrays of {x.dtype}")
        if kind == "element" and x.shape != self.shape:
            raise NoGeneratedForm(f"arrays of {x.shape} beside {self.shape}")
        at = _place_of(self.arrays, x)
        if at == len(self.rows):
            self.rows.append(RowArray(f"a{at}", str(x.dtype), kind, shared))
        elif (self.rows[at].kind, self.rows[at].shared) != (kind, shared):
            raise NoGeneratedForm("an array that is read in two ways")
        return Ref("array", at)

    def _row_of(self, like: Tree) -> RowArray:
        """Return the row array of a result: that of the array that it replaces, or a new one."""
        row = next((row for row, x in zip(self.rows, self.arrays, strict=True) if x is like), None)
        if row is not None and row.name not in self._written:
            self._written.add(row.name)
            return row
        name = f"o{len(self._written)}"
        self._written.add(name)
        return dataclasses.replace(row, name=name) if row else RowArray(name, str(like.dtype))


def _place_of(known: list, x: object) -> int:
    """Return the place of an object in a list, to which it is appended if it is new."""
    for i, y in enumerate(known):
        if x is y:
            return i
    known.append(x)
    return len(known) - 1

"""A stage of a step: rules that run as one, a pure function of tensors in eager mode and in compiled code."""

import dataclasses
import functools
import math
from collections.abc import Callable, Mapping, Sequence

import torch
from torch import Tensor

from halfstep.arrays import Array
from halfstep.random_words import word_role
from halfstep_torch.links.bound_rule import BoundRule
from halfstep_torch.numbers.norms import piece_length
from halfstep_torch.numbers.op import TorchOp
from halfstep_torch.numbers.random_words import field_on_top, whole_words, words_from
from halfstep_torch.storage.blocks import Blocks
from halfstep_torch.storage.formats import with_blocks
from halfstep_torch.storage.state_array import StateArray
from halfstep_torch.storage.stored_moment import Words
from halfstep_torch.weights.weight_rule import BoundWeights, applied, apply_updates

# A compiled kernel has the length of a block as a constant.
LONGEST_BLOCK = 1 << 16
# Elements of a row where no format asks for a length. 2^32 is a multiple: no row has two high halves of an
# index.
_WIDTH = 256

Columns = Sequence[tuple[Array, dict[int, Array]]]
"""Of each stream of random words its k0, and of each role its k1."""


@dataclasses.dataclass(frozen=True)
class Stage:
    """Rules that run as one. Equal stages share a compiled kernel: no seed and no number is part of a stage.

    Attributes:
        rules: of the stage, in the order of the chain.
        sources: of each rule's word sources, which of the plan's distinct streams it is of, its role,
            and whether they are mixed.
        roles: of each distinct stream of the plan, the roles whose keys are read.
        weights: what applies the update to the weights, or knows them best.
        wrapped: of each rule, whether it sees the weights as `weights` knows them.
        dtype: of the weights.
        negates: whether what comes in is to be negated.
        applies: whether the stage changes the weights; else it leaves an update in float32.
    """

    rules: tuple[BoundRule, ...]
    sources: tuple[tuple[tuple[int, int, bool], ...], ...]
    roles: tuple[tuple[int, ...], ...]
    weights: BoundWeights
    wrapped: tuple[bool, ...]
    dtype: torch.dtype
    negates: bool
    applies: bool

    def __hash__(self) -> int:
        return self._hash  # asked for at every step

    @functools.cached_property
    def _hash(self) -> int:
        return hash((self.rules, self.sources, self.roles, self.wrapped, self.dtype))

    @functools.cached_property
    def scope(self) -> str:
        """What the rules see, as `Rule.scope` has it; a rule of another scope than "elementwise" is alone."""
        return self.rules[0].scope if self.rules else "elementwise"

    @property
    def needs_only_update(self) -> bool:
        """Whether a rule reads only its update and keeps no state, as `Rule.needs` has it."""
        return not self.applies and any(rule.rule.needs == "update" for rule in self.rules)

    @functools.cached_property
    def arrays(self) -> dict[str, StateArray]:
        """State arrays of the rules, by name, and those that the weights are read from."""
        rules = [*self.rules, self.weights] if any(self.wrapped) else self.rules
        return {name: array for rule in rules for name, array in rule.arrays.items()}

    @functools.cached_property
    def blocks(self) -> tuple[Blocks, ...]:
        """The distinct block cuts of formats with scales, the coarsest first."""
        if self.scope != "elementwise":
            return ()
        scales = (array.scale_of for array in self.arrays.values())
        cuts = {fmt.blocks for fmt in scales if fmt and fmt.blocks}
        return tuple(sorted(cuts, key=lambda cut: cut.size, reverse=True))

    @functools.cached_property
    def padded(self) -> "Stage":
        """The stage on rows of one block of the coarsest cut; short blocks are padded.

        The stage itself where a block is cut by others, or too long to be a constant of a kernel: then a row
        holds whole runs.
        """
        if not self.blocks or not self._nested or self.blocks[0].size > LONGEST_BLOCK:
            return self
        if self.blocks[0].run is None:
            return self
        return with_blocks(self, lambda fmt: fmt.blocks and Blocks(fmt.blocks.size))

    @property
    def compiles(self) -> bool:
        """Whether the stage, of whole blocks, can be a compiled kernel."""
        return self.scope == "elementwise" and self._nested and self.width <= LONGEST_BLOCK

    @property
    def _nested(self) -> bool:
        """Whether a block of the coarsest cut is made of whole blocks of every other cut."""
        first, *others = self.blocks or (None,)
        return all(first.holds(cut) for cut in others) if first else True

    @functools.cached_property
    def width(self) -> int:
        """The number of elements in a row."""
        return math.lcm(*(blocks.unit for blocks in self.blocks)) if self.blocks else _WIDTH

    def run(
        self,
        p: Tensor,
        u: Tensor,
        state: Mapping[str, Tensor],
        numbers: Sequence,
        words: Callable,
        op: TorchOp | None = None,
    ) -> tuple[Tensor, dict[str, Tensor]]:
        """Return the new weights, or the float32 update if another stage follows, and the new state arrays.

        Args:
            p: weights, in rows of the width; for a rule of scope "parameter" a parameter in its shape.
            u: their gradient, of any dtype that float32 holds, or the update of the stage before.
            state: state arrays, in rows, scales in one; all in one row for a rule of scope "parameter".
            numbers: of each rule, by name.
            words: from what a source is to the `Words` of a rule.
            op: the operations of the rules; by default those of their scope.
        """
        u, new_state = u.to(torch.float32), {}
        p32 = p.to(torch.float32) if self._reads_float32 else p
        if self.negates:
            u = -u
        known, ops = p32, () if op is None else (op,)
        if any(self.wrapped):
            known = self.weights.join(p32, state) if self.scope == "elementwise" else self._known(p, state)
        for rule, sources, wrapped, n in zip(self.rules, self.sources, self.wrapped, numbers, strict=True):
            drawn = [words(*source) for source in sources]
            if self.applies and isinstance(rule, BoundWeights):  # the last
                q, arrays = rule.apply(u, p32, state, drawn)
                return applied(p32, q, self.dtype), {**new_state, **arrays}
            u, arrays = rule.update(u, known if wrapped else p32, state, n, drawn, *ops)
            new_state.update(arrays)
        return (apply_updates(p32, u, self.dtype) if self.applies else u), new_state

    def run_on_update(self, u: Tensor, numbers: Sequence) -> Tensor:
        """Return the outgoing update of a whole update, for a stage of `needs_only_update`."""
        u = -u if self.negates else u
        for rule, n in zip(self.rules, numbers, strict=True):
            u, _ = rule.update(u, u, {}, n, ())
        return u

    @functools.cached_property
    def _reads_float32(self) -> bool:
        """Whether the stage reads the weights in float32, which takes a copy of a whole parameter."""
        wrapped = self.scope == "elementwise" and any(self.wrapped)
        return self.applies or wrapped or any(rule.wide_weights for rule in self.rules)

    def _known(self, p: Tensor, state: Mapping[str, Tensor]) -> Tensor:
        """Return a whole parameter with its further bits, joined in pieces."""
        flat, length = p.reshape(-1), piece_length(p.device)
        known = torch.empty(flat.shape, dtype=torch.float32, device=p.device)
        arrays = {name: state[name] for name in self.weights.arrays}
        for start in range(0, flat.numel(), length):
            piece = slice(start, start + length)
            pieces = {name: x[piece] for name, x in arrays.items()}
            known[piece] = self.weights.join(flat[piece].to(torch.float32), pieces)
        return known.view(p.shape)

    def columns(self, keys: Sequence) -> Columns:
        """Return the columns of `stream_keys` by stream and role."""
        rest = iter(keys)
        return [(next(rest), {role: next(rest) for role in roles}) for roles in self.roles]

    def row_words(self, index: Callable[[], Tensor], keys: Sequence) -> Callable[..., Words]:
        """Return the words of rows: `index` makes the int32 row-major index of each element."""
        columns = self.columns(keys)
        read = {stream for sources in self.sources for stream, *_ in sources}
        at = index() if read else None
        words = {stream: words_from(at, *columns[stream]) for stream in read if at is not None}

        def words_of_rows(stream: int, role: int, mixed: bool) -> Words:
            return functools.partial(words[stream], role, mixed)

        return words_of_rows

    def array_words(self, keys: Sequence[int], device: torch.device) -> Callable[..., Words]:
        """Return the words of arrays of any shape, given the keys of their leaf."""
        columns = self.columns(keys)

        def words_of_array(stream: int, role: int, mixed: bool) -> Words:
            k0, k1 = columns[stream]
            key = k1[word_role(role)]
            if not mixed:
                return lambda shape: whole_words(k0, key, shape, device, mixed=False)
            return lambda shape: field_on_top(whole_words(k0, key, shape, device), role)

        return words_of_array

"""A stage of a step: rules that run together, as a pure function of tensors, eager or compiled."""

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
# Elements of a row if no format has a block length. It divides 2^32, so no row has two high halves of an
# index.
_WIDTH = 256

Columns = Sequence[tuple[Array, dict[int, Array]]]
"""Keys of each stream of random words, its k0 and the k1 of each role."""


@dataclasses.dataclass(frozen=True)
class Stage:
    """Rules that run together. A stage has no seeds or numbers, so equal stages share a compiled kernel.

    Attributes:
        rules: the rules of the stage, in the order of the chain.
        sources: for each word source of each rule, the index of its stream in the plan, its role, and whether
            the words are mixed.
        roles: the roles with keys to read, for each stream of the plan.
        weights: the rule that applies the update to the weights, or keeps them in float32.
        wrapped: whether each rule gets the float32 weights of `weights`.
        dtype: the dtype of the weights.
        negates: whether to negate the incoming update.
        applies: whether the stage changes the weights. Otherwise it returns an update in float32.
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
        return self._hash  # used at every step

    @functools.cached_property
    def _hash(self) -> int:
        return hash((self.rules, self.sources, self.roles, self.wrapped, self.dtype))

    @functools.cached_property
    def scope(self) -> str:
        """The scope of the rules. A rule with another scope than "elementwise" is alone in its stage."""
        return self.rules[0].scope if self.rules else "elementwise"

    @property
    def needs_only_update(self) -> bool:
        """Whether a rule reads only its update and keeps no state (`Rule.needs`)."""
        return not self.applies and any(rule.rule.needs == "update" for rule in self.rules)

    @functools.cached_property
    def arrays(self) -> dict[str, StateArray]:
        """State arrays by name, of the rules and for the weights."""
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
        """The stage on rows of one block of the coarsest cut, with short blocks padded.

        It is the stage itself if other blocks cut a block, or if a block is too long for a kernel's constant.
        Then a row holds whole runs.
        """
        if not self.blocks or not self._nested or self.blocks[0].size > LONGEST_BLOCK:
            return self
        if self.blocks[0].run is None:
            return self
        return with_blocks(self, lambda fmt: fmt.blocks and Blocks(fmt.blocks.size))

    @property
    def compiles(self) -> bool:
        """Whether the stage, with whole blocks, can be a compiled kernel."""
        return self.scope == "elementwise" and self._nested and self.width <= LONGEST_BLOCK

    @property
    def _nested(self) -> bool:
        """Whether each block of the coarsest cut consists of whole blocks in every other cut."""
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
            p: the weights in rows of the width, or in the parameter's shape for a rule of scope "parameter".
            u: their gradient, in a dtype no wider than float32, or the update of the stage before.
            state: the state arrays in rows, with scales in one. All are in one row for scope "parameter".
            numbers: the numbers of each rule, by name.
            words: a function from stream, role and mixing of a source to the `Words` of a rule.
            op: the operations of the rules, by default `STEP_OPS` of their scope.
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
        """Return the outgoing update, given a whole update, for a stage with `needs_only_update`."""
        u = -u if self.negates else u
        for rule, n in zip(self.rules, numbers, strict=True):
            u, _ = rule.update(u, u, {}, n, ())
        return u

    @functools.cached_property
    def _reads_float32(self) -> bool:
        """Whether the stage reads the weights in float32, which copies a whole parameter."""
        wrapped = self.scope == "elementwise" and any(self.wrapped)
        return self.applies or wrapped or any(rule.wide_weights for rule in self.rules)

    def _known(self, p: Tensor, state: Mapping[str, Tensor]) -> Tensor:
        """Return a whole parameter with its extra bits, joined in pieces."""
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
        """Return a function for the words of rows. `index` makes the int32 row-major indices."""
        columns = self.columns(keys)
        read = {stream for sources in self.sources for stream, *_ in sources}
        at = index() if read else None
        words = {stream: words_from(at, *columns[stream]) for stream in read if at is not None}

        def words_of_rows(stream: int, role: int, mixed: bool) -> Words:
            return functools.partial(words[stream], role, mixed)

        return words_of_rows

    def array_words(self, keys: Sequence[int], device: torch.device) -> Callable[..., Words]:
        """Return a function for the words of arrays in any shape, given the keys of their leaf."""
        columns = self.columns(keys)

        def words_of_array(stream: int, role: int, mixed: bool) -> Words:
            k0, k1 = columns[stream]
            key = k1[word_role(role)]
            if not mixed:
                return lambda shape: whole_words(k0, key, shape, device, mixed=False)
            return lambda shape: field_on_top(whole_words(k0, key, shape, device), role)

        return words_of_array

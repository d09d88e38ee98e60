"""One step on one parameter: the rules of a chain in order, then the weight as it is stored.

A `Plan` is all that is fixed before numbers are known. `Plan.run` is a pure function of flat tensors, the
same one in eager mode and under torch.compile.
"""

import dataclasses
import functools
import itertools
import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor

from halfstep_torch.bound_rule import BoundRule
from halfstep_torch.numbers.float_formats import dtype_name
from halfstep_torch.numbers.random_words import high_key, leaf_id, leaf_keys, whole_words, words_from
from halfstep_torch.rule import ParamInfo, Rule
from halfstep_torch.storage.blocks import Blocks
from halfstep_torch.storage.state_array import StateArray
from halfstep_torch.storage.stored_moment import Words
from halfstep_torch.weights.weight_rule import BoundWeights, NearestWeights, apply_updates

# A compiled kernel has the unit as a constant.
_LONGEST_UNIT = 1 << 16


@dataclasses.dataclass(frozen=True)
class Plan:
    """The step of one parameter. Equal plans share a compiled kernel: no seed and no number is part of one.

    Attributes:
        rules: in the order of the chain.
        links: of each rule, the index of its link in the chain.
        sources: of each rule's word sources, which of the plan's distinct streams it is of, and its role.
        roles: of each distinct stream, the roles that are read.
        prefixes: of each distinct stream, what stands before the name of the leaf.
        wrapped: how many rules before the last see the float32 weights that it keeps.
        dtype: of the weights.
        maximize: ascend.
        first: the rule with which this stage of the step begins.
        stop: the rule before which it ends, or None.
    """

    rules: tuple[BoundRule, ...]
    links: tuple[int, ...]
    sources: tuple[tuple[tuple[int, int], ...], ...]
    roles: tuple[tuple[int, ...], ...]
    prefixes: tuple[str, ...]
    wrapped: int
    dtype: torch.dtype
    maximize: bool
    first: int = 0
    stop: int | None = None

    @functools.cached_property
    def stages(self) -> tuple["Plan", ...]:
        """The step, cut around every rule that is not elementwise: by itself where there is none.

        A stage is run on all of a parameter before the next begins. All but the last leave an update in
        float32 and the weights alone.
        """
        alone = [i for i, rule in enumerate(self.rules) if rule.scope != "elementwise"]
        cuts = sorted({0, len(self.rules), *alone, *(i + 1 for i in alone)}) if alone else []
        return tuple(dataclasses.replace(self, first=i, stop=j) for i, j in itertools.pairwise(cuts)) or (
            self,
        )

    @property
    def scope(self) -> str:
        """What the stage's rules see, as `Rule.scope` has it."""
        return self.rules[self.first].scope if len(self.own) == 1 else "elementwise"

    @property
    def lands(self) -> bool:
        """Whether this stage is the last one, which changes the weights."""
        return self.stop is None or self.stop == len(self.rules)

    @property
    def own(self) -> range:
        """Which of the rules belong to this stage."""
        return range(len(self.rules))[self.first : self.stop]

    @functools.cached_property
    def arrays(self) -> dict[str, StateArray]:
        """State arrays of the stage's rules, by name, and those that its weights are read from."""
        rules = [self.rules[i] for i in self.own]
        if self.wrapped and not self.lands:
            rules.append(self.rules[-1])
        return {name: array for rule in rules for name, array in rule.arrays.items()}

    @property
    def blocks(self) -> frozenset[Blocks]:
        """The cuts of all formats with scales."""
        if self.scope != "elementwise":
            return frozenset()
        scales = (array.scale_of for array in self.arrays.values())
        return frozenset(fmt.blocks for fmt in scales if fmt and fmt.blocks)

    @property
    def unit(self) -> int:
        """Elements of the shortest stretch that holds whole blocks of every format."""
        return math.lcm(*(blocks.unit for blocks in self.blocks))

    @functools.cached_property
    def whole(self) -> "Plan | None":
        """The plan of the same step on memory where every block is whole, for compiled kernels.

        The plan itself where no block is short. None where formats cut blocks differently (Inductor takes
        minutes over the two cuts), or where blocks are too long to be a constant of a kernel: such plans run
        in eager mode.
        """
        if len(self.blocks) > 1 or self.unit > _LONGEST_UNIT:
            return None
        return self if all(blocks.run is None for blocks in self.blocks) else _with_whole_blocks(self)

    @property
    def weights(self) -> BoundWeights:
        """What knows the weights best."""
        last = self.rules[-1] if self.rules else None
        return (
            last
            if isinstance(last, BoundWeights)
            else BoundWeights(NearestWeights(), dtype=dtype_name(self.dtype))
        )

    def streams(self, seeds: Sequence) -> tuple[tuple[int, str, tuple[int, ...]], ...]:
        """Return the random streams that a step reads: seed, prefix of the names, and the roles read.

        Args:
            seeds: of each link of the chain.
        """
        of_stream = {}
        for rule, link, sources in zip(self.rules, self.links, self.sources, strict=True):
            for source, (stream, _) in zip(rule.sources, sources, strict=True):
                of_stream[stream] = _seed_of(seeds[link], source.seed)
        rows = enumerate(zip(self.prefixes, self.roles, strict=True))
        return tuple((of_stream[i] or 0, prefix, roles) for i, (prefix, roles) in rows)

    def master_view(self, p32: Tensor, state: Mapping[str, Tensor]) -> list[Tensor]:
        """Return the float32 weights that each of the stage's rules sees, given those of the model."""
        wrapped = range(len(self.rules) - 1 - self.wrapped, len(self.rules) - 1)
        if not any(i in wrapped for i in self.own):
            return [p32] * len(self.own)
        known = p32
        if self.scope == "parameter":  # its state arrays are in one row
            known = p32.reshape(-1)
        known = self.weights.join(known, state).view(p32.shape)
        return [known if i in wrapped else p32 for i in self.own]

    def run(
        self, p: Tensor, u: Tensor, state: Mapping[str, Tensor], numbers: Sequence, keys: Sequence
    ) -> tuple[Tensor, dict[str, Tensor]]:
        """Return the new weights, or the float32 update if another stage follows, and the new state arrays.

        Args:
            p: weights, a stretch of whole blocks: a leaf, a piece of one, or many leaves end to end; in one
                row, or in rows of the plan's unit. For a rule of scope "parameter", a leaf in its shape.
            u: their gradient, of any dtype that float32 holds, or the update of the stage before.
            state: state arrays, in the shape of `p`, scales in one row; all in one row for such a stage.
            numbers: of each of the stage's rules, by name.
            keys: the columns of `stream_keys`: int32 numbers or 0-d tensors, or tensors that broadcast with
                `p`. The first is the row-major index minus the position in `p`.
        """
        words_of = self._words(p, keys)
        u, p32, new_state = u.to(torch.float32), p.to(torch.float32), {}
        if self.maximize and self.first == 0:
            u = -u
        views = self.master_view(p32, state)
        for i, view, of_rule in zip(self.own, views, numbers, strict=True):
            words = [words_of(stream, role) for stream, role in self.sources[i]]
            u, arrays = self.rules[i].update(u, view, state, of_rule, words)
            new_state.update(arrays)
        return (apply_updates(p32, u, self.dtype) if self.lands else u), new_state

    def _words(self, p: Tensor, keys: Sequence) -> Callable[[int, int], Words]:
        """Return a function from a stream and a role of the stage to its words."""
        columns, at = {}, 1
        for stream, roles in enumerate(self.roles):
            columns[stream] = keys[at], dict(zip(roles, keys[at + 1 : at + 1 + len(roles)], strict=True))
            at += 1 + len(roles)
        if self.scope == "parameter":
            return lambda stream, role: (
                lambda shape: whole_words(columns[stream][0], columns[stream][1][role], shape, p.device)
            )
        words = {}
        if any(self.sources[i] for i in self.own):
            index = torch.arange(p.numel(), dtype=torch.int32, device=p.device).view(p.shape) + keys[0]
            for stream in {stream for i in self.own for stream, _ in self.sources[i]}:
                words[stream] = words_from(index, *columns[stream])
        return lambda stream, role: lambda shape: words[stream](role)


def _with_whole_blocks(x: Any) -> Any:
    """Return a plan, or any part of one, with no short blocks."""
    if isinstance(x, Blocks):
        return Blocks(x.size)
    if isinstance(x, tuple):
        return tuple(map(_with_whole_blocks, x))
    if not dataclasses.is_dataclass(x) or isinstance(x, type):
        return x
    fields = {field.name: _with_whole_blocks(getattr(x, field.name)) for field in dataclasses.fields(x)}
    return dataclasses.replace(x, **fields)


def _seed_of(seed: Any, which: int) -> int | None:
    """Return one seed of a link."""
    return seed[which] if isinstance(seed, (tuple, list)) else seed


def make_plan(
    rules: Sequence[BoundRule | None],
    seeds: Sequence,
    dtype: torch.dtype,
    maximize: bool,
    wrapped_links: int = 0,
) -> Plan:
    """Put the rules of one parameter together.

    Args:
        rules: of each link of the chain, None where the link does nothing.
        seeds: of each link.
        dtype: of the weights.
        maximize: ascend.
        wrapped_links: how many links before the last see the float32 weights that it keeps.
    """
    chosen = [(i, rule) for i, rule in enumerate(rules) if rule is not None]
    distinct: dict[tuple[int | None, str], list[int]] = {}
    sources = []
    for i, rule in chosen:
        read = [((_seed_of(seeds[i], seed), prefix), role) for role, seed, prefix in rule.sources]
        for stream, role in read:
            roles = distinct.setdefault(stream, [])
            roles.extend([] if role in roles else [role])
        sources.append(tuple((list(distinct).index(stream), role) for stream, role in read))
    last = len(rules) - 1
    wrapped = range(last - wrapped_links, last) if rules and rules[last] is not None else range(0)
    return Plan(
        rules=tuple(rule for _, rule in chosen),
        links=tuple(i for i, _ in chosen),
        sources=tuple(sources),
        roles=tuple(map(tuple, distinct.values())),
        prefixes=tuple(prefix for _, prefix in distinct),
        wrapped=sum(i in wrapped for i, _ in chosen),
        dtype=dtype,
        maximize=maximize,
    )


def bind_rules(
    links: Sequence[Rule], caller: str, values: Sequence[Any], info: ParamInfo
) -> list[BoundRule | None]:
    """Return of each link what it does to a parameter.

    Args:
        links: of the chain.
        caller: for messages.
        values: of each link, what `read` gave.
        info: of the parameter.
    """
    rules: list[BoundRule | None] = []
    wrapped_from = len(links)
    for i, (link, own) in reversed(list(enumerate(zip(links, values, strict=True)))):
        seen = info._replace(dtype=torch.float32) if i >= wrapped_from else info
        rules.append(link.bind(caller, own, seen))
        if link.wrapped_links and rules[-1] is not None:
            wrapped_from = min(wrapped_from, i - link.wrapped_links)
    return rules[::-1]


def stream_keys(streams: Sequence, steps: Sequence[int], names: Sequence[str]) -> np.ndarray:
    """Return the keys of leaves that read the same streams: uint32, a row each.

    Columns: row-major index of the first element (0), then of every stream k0 and each role's k1.

    Args:
        streams: what `Plan.streams` gives.
        steps: of each leaf, the count after its increment.
        names: of each leaf.
    """
    columns = [np.zeros((len(names), 1), np.uint32)]
    for seed, prefix, roles in streams:
        columns.append(leaf_keys(seed, steps, [leaf_id(prefix + name) for name in names], roles))
    return np.concatenate(columns, axis=1)


def keys_at(plan: Plan, row: np.ndarray, start: int) -> np.ndarray:
    """Return a leaf's keys for the piece of it that begins at row-major index `start`."""
    row = row.copy()
    row[0] = start & 0xFFFFFFFF
    if start >> 32:
        at = 1
        for roles in plan.roles:
            k1 = slice(at + 1, at + 1 + len(roles))
            row[k1] = high_key(row[k1], start >> 32)
            at += 1 + len(roles)
    return row

"""The step of one kind of parameter: the rules of a chain in order, then the weight storage.

A `Plan` contains everything except numbers. It is cut into stages, and each stage finishes a whole parameter
before the next begins.
"""

import dataclasses
import functools
import itertools
from collections.abc import Sequence
from typing import NamedTuple

import torch

from halfstep.hyperparameters import Values
from halfstep.random_words import word_role
from halfstep_torch.distributed.window import Window
from halfstep_torch.engine.scaling import NORMS, SCALED, may_scale
from halfstep_torch.engine.stage import Stage
from halfstep_torch.links.bound_rule import BoundRule
from halfstep_torch.links.link import Link, ParamInfo
from halfstep_torch.numbers.float_formats import dtype_name
from halfstep_torch.numbers.seeds import LinkSeed
from halfstep_torch.storage.blocks import blocks_of
from halfstep_torch.storage.formats import with_blocks
from halfstep_torch.storage.state_array import StateArray
from halfstep_torch.storage.stored_moment import StoredMoment
from halfstep_torch.weights.weight_rule import BoundWeights, NearestWeights, RoundedWeights


class Stream(NamedTuple):
    """Random words that a step reads.

    Attributes:
        seed: the seed of the words.
        prefix: the text before the leaf name.
        before: whether the words belong to the step before.
        roles: the roles with keys to read.
    """

    seed: int
    prefix: str
    before: bool
    roles: tuple[int, ...]


class ScalingStages(NamedTuple):
    """The two stages of a step in which a rule scales by norms (`scaling.py`).

    Attributes:
        place: the place of the rule in the plan.
        measure: the stage that computes the incoming update, for the norms.
        apply: the stage that changes weights and state.
    """

    place: int
    measure: Stage
    apply: Stage


@dataclasses.dataclass(frozen=True)
class Plan:
    """The step of one parameter.

    Attributes:
        rules: the rules, in the order of the chain.
        rule_indices: the index of each rule's link in the chain.
        sources: for each word source of each rule, the index of its stream, its role, and whether the words
            are mixed.
        streams: the distinct streams.
        wrapped: the number of rules before the last that get the float32 weights it keeps.
        dtype: the dtype of the weights.
        maximize: whether to ascend.
    """

    rules: tuple[BoundRule, ...]
    rule_indices: tuple[int, ...]
    sources: tuple[tuple[tuple[int, int, bool], ...], ...]
    streams: tuple[Stream, ...]
    wrapped: int
    dtype: torch.dtype
    maximize: bool

    @functools.cached_property
    def bounds(self) -> list[range]:
        """The rules of each stage, with a cut around every rule that is not elementwise."""
        alone = [i for i, rule in enumerate(self.rules) if rule.scope != "elementwise"]
        cuts = sorted({0, len(self.rules), *alone, *(i + 1 for i in alone)})
        return [range(i, j) for i, j in itertools.pairwise(cuts)] or [range(0)]

    @functools.cached_property
    def stages(self) -> tuple[Stage, ...]:
        """The stages of the step. Only the last changes the weights."""
        return tuple(self._stage(places) for places in self.bounds)

    def _stage(self, places: range) -> Stage:
        count = len(self.rules)
        return Stage(
            rules=self.rules[places.start : places.stop],
            sources=self.sources[places.start : places.stop],
            roles=tuple(stream.roles for stream in self.streams),
            weights=self.weights,
            wrapped=tuple(count - 1 - self.wrapped <= i < count - 1 for i in places),
            dtype=self.dtype,
            negates=self.maximize and places.start == 0,
            applies=places.stop == count,
        )

    @functools.cached_property
    def scaling(self) -> ScalingStages | None:
        """The stages for kernels, if the only rule that is not elementwise may scale by norms."""
        alone = [i for i, rule in enumerate(self.rules) if rule.scope != "elementwise"]
        if len(alone) != 1 or not may_scale(self.rules[alone[0]]):
            return None
        (i,), (whole, before) = alone, map(self._stage, (range(len(self.rules)), range(alone[0] + 1)))
        rules = *self.rules[:i], SCALED, *self.rules[i + 1 :]
        measure = dataclasses.replace(before, rules=(*self.rules[:i], NORMS), applies=False)
        return ScalingStages(i, measure, dataclasses.replace(whole, rules=rules))

    @functools.cached_property
    def padded_stages(self) -> tuple[Stage, ...]:
        """The stages on rows, shared by plans that differ only in short blocks."""
        return _interned(tuple(stage.padded for stage in self.stages))

    @functools.cached_property
    def shared(self) -> tuple:
        """The part of a plan shared by parameters stepped together, one object for equal parts."""
        return _interned((self.rule_indices, self.streams, self.padded_stages))

    def within(self, window: Window) -> "Plan":
        """Return the plan for a window of the parameter, which cuts no block."""
        if window.is_full:
            return self
        rules = with_blocks(self.rules, lambda fmt: blocks_of(window.whole, fmt.block_size, window.shape))
        return dataclasses.replace(self, rules=rules)

    @functools.cached_property
    def arrays(self) -> dict[str, StateArray]:
        """State arrays of all rules, by name."""
        return {name: array for rule in self.rules for name, array in rule.arrays.items()}

    @functools.cached_property
    def moments(self) -> tuple[StoredMoment, ...]:
        """The moments of all rules."""
        return tuple(moment for rule in self.rules for moment in rule.moments)

    @functools.cached_property
    def second_moments(self) -> list[tuple[StoredMoment, StoredMoment]]:
        """Pairs of a second moment and the moment stored in units of it."""
        named = [({x.name: x for x in rule.moments}, x) for rule in self.rules for x in rule.moments]
        return [(of_rule[x.second], x) for of_rule, x in named if x.second in of_rule]

    @property
    def weights(self) -> BoundWeights:
        """The rule that stores the weights."""
        last = self.rules[-1] if self.rules else None
        if isinstance(last, BoundWeights):
            return last
        rule = RoundedWeights(last.rule.name) if last is not None and last.weight_dtype else NearestWeights()
        return BoundWeights(rule, dtype=dtype_name(self.dtype))


@functools.cache
def _interned(parts: tuple) -> tuple:
    """Return the same object for all equal tuples."""
    return parts


def _seed_at(seed: LinkSeed, which: int) -> int | None:
    """Return one seed of a link."""
    return seed[which] if isinstance(seed, (tuple, list)) else seed


def make_plan(
    rules: Sequence[BoundRule | None],
    seeds: Sequence,
    dtype: torch.dtype,
    maximize: bool,
    wrapped_links: int = 0,
) -> Plan:
    """Make the plan of one kind of parameter from each link's bound rule, None for a link without effect.

    The `wrapped_links` links before the last get the float32 weights that the last keeps.
    """
    chosen = [(i, rule) for i, rule in enumerate(rules) if rule is not None]
    distinct: dict[tuple[int | None, str, bool], dict[int, None]] = {}
    sources = []
    for i, rule in chosen:
        read = [((_seed_at(seeds[i], x.seed), x.prefix, x.before), x) for x in rule.sources]
        for stream, source in read:
            distinct.setdefault(stream, {})[word_role(source.role)] = None
        sources.append(tuple((list(distinct).index(stream), x.role, x.mixed) for stream, x in read))
    last = len(rules) - 1
    wrapped = range(last - wrapped_links, last) if rules and rules[last] is not None else range(0)
    return Plan(
        rules=tuple(rule for _, rule in chosen),
        rule_indices=tuple(i for i, _ in chosen),
        sources=tuple(sources),
        streams=tuple(
            Stream(seed or 0, prefix, before, tuple(roles))
            for (seed, prefix, before), roles in distinct.items()
        ),
        wrapped=sum(i in wrapped for i, _ in chosen),
        dtype=dtype,
        maximize=maximize,
    )


def bind_rules(
    links: Sequence[Link], caller: str, values: Sequence[Values], info: ParamInfo
) -> list[BoundRule | None]:
    """Bind each link to a kind of parameter, given the values from its `read`."""
    rules: list[BoundRule | None] = []
    wrapped_from = len(links)
    for i, (link, h) in reversed(list(enumerate(zip(links, values, strict=True)))):
        seen = info._replace(dtype=torch.float32) if i >= wrapped_from else info
        rules.append(link.bind(caller, h, seen))
        if link.wrapped_links and rules[-1] is not None:
            wrapped_from = min(wrapped_from, i - link.wrapped_links)
    return rules[::-1]

"""One step on one parameter: the rules of a chain in order, then the weight as it is stored.

A `Plan` is all that is fixed before numbers are known. `Plan.run` is a pure function of flat tensors, the
same one in eager mode and under torch.compile.
"""

import dataclasses
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor

from halfstep_torch.chain import Rule
from halfstep_torch.formats import Format
from halfstep_torch.params import apply_updates
from halfstep_torch.random_words import Role, high_key, leaf_keys, words_from


@dataclasses.dataclass(frozen=True)
class Plan:
    """The step of one parameter. Equal plans share a compiled kernel: no seed and no number is part of one.

    Attributes:
        rules: in the order of the chain.
        links: of each rule, the index of its link in the chain.
        sources: of each rule, which of the plan's distinct seeds its words come from; None if it reads none.
        roles: of each distinct seed, the roles that are read.
        dtype: of the weights.
        maximize: ascend.
    """

    rules: tuple[Rule, ...]
    links: tuple[int, ...]
    sources: tuple[int | None, ...]
    roles: tuple[tuple[Role, ...], ...]
    dtype: torch.dtype
    maximize: bool

    @property
    def formats(self) -> dict[str, Format]:
        """State arrays of all rules, by name."""
        return {name: fmt for rule in self.rules for name, fmt in rule.formats.items()}

    def streams(self, seeds: Sequence[int | None]) -> tuple[tuple[int, tuple[Role, ...]], ...]:
        """Return the random streams that a step reads: each distinct seed, and the roles read from it.

        Args:
            seeds: of each link of the chain.
        """
        of_source = {source: seeds[link] for source, link in zip(self.sources, self.links, strict=True)}
        return tuple((of_source[i] or 0, roles) for i, roles in enumerate(self.roles))

    def run(
        self, p: Tensor, g: Tensor, codes: Mapping[str, Tensor], numbers: Sequence[Sequence], keys: Sequence
    ) -> tuple[Tensor, dict[str, Tensor]]:
        """Return the new weights and the new codes.

        Args:
            p: weights, 1-D; a leaf, a piece of one, or many leaves end to end.
            g: their gradient, of any dtype that float32 holds.
            codes: of the state arrays.
            numbers: of each rule.
            keys: the columns of `stream_keys`: int32 numbers or 0-d tensors, or, for many leaves, 1-D
                tensors. The first is the row-major index minus the position in `p`.
        """
        index = torch.arange(p.numel(), dtype=torch.int32, device=p.device) + keys[0]
        words, at = [], 1
        for roles in self.roles:
            k1: dict[int, Any] = dict(zip(roles, keys[at + 1 : at + 1 + len(roles)], strict=True))
            words.append(words_from(index, keys[at], k1))
            at += 1 + len(roles)
        u, p32, new_codes = g.to(torch.float32), p.to(torch.float32), {}
        if self.maximize:
            u = -u
        for rule, source, rule_numbers in zip(self.rules, self.sources, numbers, strict=True):
            rule_words = _no_words if source is None else words[source]
            u, rule_codes = rule.update(u, p32, codes, rule_numbers, rule_words)
            new_codes.update(rule_codes)
        return apply_updates(p32, u, self.dtype), new_codes


def _no_words(role: Role) -> Tensor:
    raise AssertionError(f"a rule reads words of {role!r} that it did not announce")


def make_plan(
    rules: Sequence[Rule | None], seeds: Sequence[int | None], dtype: torch.dtype, maximize: bool
) -> Plan:
    """Put the rules of one parameter together.

    Args:
        rules: of each link of the chain, None where the link does nothing.
        seeds: of each link.
        dtype: of the weights.
        maximize: ascend.
    """
    chosen = [(i, rule) for i, rule in enumerate(rules) if rule is not None]
    by_seed: dict[int | None, list[Role]] = {}
    for i, rule in chosen:
        if rule.roles:
            roles = by_seed.setdefault(seeds[i], [])
            roles.extend(role for role in rule.roles if role not in roles)
    distinct = list(by_seed)
    return Plan(
        rules=tuple(rule for _, rule in chosen),
        links=tuple(i for i, _ in chosen),
        sources=tuple(distinct.index(seeds[i]) if rule.roles else None for i, rule in chosen),
        roles=tuple(map(tuple, by_seed.values())),
        dtype=dtype,
        maximize=maximize,
    )


def stream_keys(streams: Sequence, steps: Sequence[int], leaves: Sequence[int]) -> np.ndarray:
    """Return the keys of leaves that read the same streams: uint32, a row each.

    Columns: row-major index of the first element (0), then of every stream k0 and each role's k1.

    Args:
        streams: what `Plan.streams` gives.
        steps: of each leaf, the count after its increment.
        leaves: id of each leaf.
    """
    columns = [np.zeros((len(leaves), 1), np.uint32)]
    columns.extend(leaf_keys(seed, steps, leaves, roles) for seed, roles in streams)
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

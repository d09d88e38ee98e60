"""One step on one parameter: the rules of a chain in order, then the weight as it is stored.

A `Plan` is all that is fixed before numbers are known; `Plan.run` is a pure function of flat tensors, the same one
in eager mode and under torch.compile.
"""

import dataclasses
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor

from halfstep_torch.chain import Chain, Rule
from halfstep_torch.formats import Format
from halfstep_torch.params import apply_update
from halfstep_torch.random_words import Role, as_int32, high_key, leaf_keys, words_from


@dataclasses.dataclass(frozen=True)
class Plan:
    """The step of one parameter. Equal plans share one compiled kernel: no seed and no number is part of it.

    Attributes:
        rules: in the order of the chain.
        links: of each rule, the index of its link in the chain.
        streams: of each rule, which seed its words come from, counting distinct seeds; -1 if it reads none.
        roles: of each distinct seed, the roles that are read.
        dtype: of the weights.
        maximize: ascend.
    """

    rules: tuple[Rule, ...]
    links: tuple[int, ...]
    streams: tuple[int, ...]
    roles: tuple[tuple[Role, ...], ...]
    dtype: torch.dtype
    maximize: bool

    @property
    def formats(self) -> dict[str, Format]:
        """State arrays of all rules."""
        return {key: fmt for rule in self.rules for key, fmt in rule.formats.items()}

    def run(
        self, p: Tensor, g: Tensor, codes: Mapping[str, Tensor], numbers: Sequence, keys: Sequence
    ) -> tuple[Tensor, dict[str, Tensor]]:
        """Return the new weights and the new codes.

        Args:
            p: the weights, 1-D.
            g: the gradient, 1-D, of any dtype that float32 holds.
            codes: of the state arrays, 1-D.
            numbers: of each rule.
            keys: row-major index of the first element, then k0 and each role's k1 of every distinct seed: int32.
        """
        index = torch.arange(p.numel(), dtype=torch.int32, device=p.device) + keys[0]
        words, position = [], 1
        for roles in self.roles:
            k1 = dict(zip(roles, keys[position + 1 : position + 1 + len(roles)], strict=True))
            words.append(words_from(index, keys[position], k1))
            position += 1 + len(roles)
        u, p32, new = g.to(torch.float32), p.to(torch.float32), {}
        if self.maximize:
            u = -u
        for rule, stream, rule_numbers in zip(self.rules, self.streams, numbers, strict=True):
            u, rule_codes = rule.update(u, p32, codes, rule_numbers, words[stream] if words else _no_words)
            new.update(rule_codes)
        return apply_update(p32, u, self.dtype), new


def _no_words(role: Role) -> Tensor:
    raise AssertionError(f"a rule reads words of role {role} that it did not announce")


def make_plan(
    chain: Chain, seeds: Sequence[int | None], group: Mapping[str, Any], name: str, param: Tensor
) -> Plan:
    """Resolve every link for one parameter.

    Args:
        chain: the transform.
        seeds: of each link.
        group: the parameter's group.
        name: its leaf name.
        param: the parameter.
    """
    resolved = [(i, link.rule(group, name, param)) for i, link in enumerate(chain.links)]
    rules = [(i, rule) for i, rule in resolved if rule is not None]
    by_seed: dict[int | None, list[Role]] = {}
    for i, rule in rules:
        if rule.roles:
            roles = by_seed.setdefault(seeds[i], [])
            roles.extend(role for role in rule.roles if role not in roles)
    streams = tuple(list(by_seed).index(seeds[i]) if rule.roles else -1 for i, rule in rules)
    return Plan(
        rules=tuple(rule for _, rule in rules),
        links=tuple(i for i, _ in rules),
        streams=streams,
        roles=tuple(map(tuple, by_seed.values())),
        dtype=param.dtype,
        maximize=bool(group["maximize"]),
    )


def plan_keys(
    plan: Plan, seeds: Sequence[int | None], steps: Sequence[int], leaves: Sequence[int]
) -> np.ndarray:
    """Return the key rows of many leaves that share a plan: uint32, one row a leaf, as `Plan.run` reads them."""
    columns = [np.zeros((len(leaves), 1), np.uint32)]
    for stream, roles in enumerate(plan.roles):
        seed = seeds[plan.links[plan.streams.index(stream)]]
        assert seed is not None
        columns.append(leaf_keys(seed, steps, leaves, roles))
    return np.concatenate(columns, axis=1)


def keys_from(plan: Plan, row: np.ndarray, start: int) -> np.ndarray:
    """Return a key row, as int32, for the piece of a leaf that begins at row-major index `start`."""
    row = row.copy()
    row[0] = start & 0xFFFFFFFF
    if start >> 32:
        position = 1
        for roles in plan.roles:
            k1 = slice(position + 1, position + 1 + len(roles))
            row[k1] = high_key(row[k1], start)
            position += 1 + len(roles)
    return as_int32(row)

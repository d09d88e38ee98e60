"""`store_state` of a link: its rule's moments are stored in another format.

Contract: section S.
"""

import dataclasses
from collections.abc import Callable, Mapping, Sequence

import torch
from torch import Tensor

from halfstep.hyperparameters import Values
from halfstep.random_words import Role
from halfstep.rule import Rule, declared
from halfstep_torch.leaves.group_names import Group
from halfstep_torch.links.bound_rule import BoundRule
from halfstep_torch.links.link import Link, ParamInfo
from halfstep_torch.numbers.seeds import LinkSeed
from halfstep_torch.storage.formats import Format
from halfstep_torch.storage.state_array import WordSource
from halfstep_torch.storage.stored_moment import StoredMoment, scale_key

Select = Callable[[str, Tensor], bool]

_CALLER = "store_state"
_HELD = (torch.float32, torch.bfloat16, torch.float16)


class StoreState(Link):
    """A link of the chain that `store_state` returns.

    Attributes:
        inner: the wrapped link.
        format: the format of its state arrays.
        stochastic: whether they are rounded stochastically.
        select: the function that selects arrays, or None for all.
        prefix: the prefix of their names, from the rule's index in a wrapped chain.
        seed: the seed of the wrapped rule, and the seed for rounding the arrays.
    """

    inner: Link
    format: Format
    stochastic: bool
    select: Select | None
    prefix: str
    seed: LinkSeed

    def __post_init__(self) -> None:
        """Copy the declarations of the wrapped link."""
        inner = self.inner
        said = {
            # The name in state dicts and messages, which has the format because formats must agree.
            "name": f"{_CALLER}({inner.name}, {_description(self.format)})",
            "scope": inner.scope,
            "reads_names": self.select is not None or inner.reads_names,
            "measures": inner.measures,
            "needs_finite": inner.needs_finite,
        }
        vars(self).update(said)

    @property
    def rule(self) -> Rule:
        """The rule of the wrapped link."""
        return self.inner.rule

    def measure(self, h: Values, norms: Callable[[bool], Tensor]) -> Mapping[str, Tensor]:
        """Return the measure of the wrapped rule."""
        return self.inner.measure(h, norms)

    def read(self, caller: str, group: Group) -> Values:
        """Return the values of the wrapped rule."""
        return self.inner.read(caller, group)

    def touches(self, name: str, param: Tensor) -> bool:
        """Whether the wrapped rule touches this parameter."""
        return self.inner.touches(name, param)

    def bind(self, caller: str, h: Values, info: ParamInfo) -> BoundRule | None:
        """Bind the wrapped rule, with the selected moments in the other format."""
        bound = self.inner.bind(caller, h, info)
        if bound is None:
            return None
        moments = tuple(self._stored(moment, info) for moment in bound.moments)
        return dataclasses.replace(bound, moments=moments)

    def check_choice(self, caller: str, h: Values, infos: Sequence[ParamInfo]) -> None:
        """Raise ValueError if `select` selects none of the arrays."""
        asked = []
        for info in infos if self.select is not None else ():
            bound = self.inner.bind(caller, h, info)
            for moment in bound.moments if bound is not None else ():
                if self._may_store(moment, info):
                    if self._chooses(moment, info):
                        return
                    asked.append(f"{self._name(moment)}/{info.name}")
        if asked:
            raise ValueError(
                f"{_CALLER}: select chooses none of {', '.join(map(repr, asked[:8]))}. "
                "Choose one of them, or leave select out."
            )

    def _stored(self, moment: StoredMoment, info: ParamInfo) -> StoredMoment:
        """Return the storage of a moment, which is the wrapped rule's unless the moment is selected."""
        array = moment.arrays[moment.key]
        fmt = self.format.for_shape(array.shape(info.shape))
        too_small = self.format.scaled and not fmt.scaled
        if too_small or not self._may_store(moment, info) or not self._chooses(moment, info):
            return moment
        if not self.format.signed and declared(type(self.rule)).moments[moment.name].signed:
            raise ValueError(
                f"{_CALLER}: format={self.format.dtype} has no sign, and {self._name(moment)!r} has one. "
                'Choose second moments, as by select=lambda name, array: "nu" in name.split("/").'
            )
        if fmt.scaled and scale_key(moment.key) in moment.arrays:
            raise ValueError(
                f"{_CALLER}: {self._name(moment)!r} has block scales of its own. "
                'Store it in a format without, as "bfloat16", or leave it out by select=...'
            )
        source = (
            WordSource(Role.STATE, 1, f"{self._name(moment)}/") if self.stochastic and fmt.rounds else None
        )
        outer = StoredMoment(moment.name, moment.key, fmt, source, "where_nonnegative", array.shape_of)
        return dataclasses.replace(moment, again=outer)

    def _may_store(self, moment: StoredMoment, info: ParamInfo) -> bool:
        array = moment.arrays[moment.key]
        return array.dtype in _HELD and bool(array.shape(info.shape))

    def _name(self, moment: StoredMoment) -> str:
        return f"{self.prefix}{moment.name}"

    def _chooses(self, moment: StoredMoment, info: ParamInfo) -> bool:
        if self.select is None:
            return True
        array = moment.arrays[moment.key]
        meta = torch.empty(array.shape(info.shape), dtype=array.dtype, device="meta")
        return bool(self.select(f"{self._name(moment)}/{info.name}", meta))


def _description(fmt: Format) -> str:
    return f"{fmt.dtype} in blocks of {fmt.block_size}" if fmt.scaled else fmt.dtype

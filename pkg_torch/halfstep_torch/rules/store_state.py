"""The state of any transform, kept in a format: decode it, run the transform, encode it.

Contract: section S.
"""

import dataclasses
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from halfstep.random_words import Role
from halfstep.rule import Rule, declared
from halfstep.storage.moment_formats import Rounding, check_stored_state
from halfstep_torch.links.bound_rule import BoundRule
from halfstep_torch.links.chain import Chain, chain
from halfstep_torch.links.link import Link, ParamInfo
from halfstep_torch.numbers.seeds import Seed, as_seed
from halfstep_torch.storage.formats import Format
from halfstep_torch.storage.state_array import WordSource
from halfstep_torch.storage.state_dtypes import as_format
from halfstep_torch.storage.stored_moment import StoredMoment, scale_key

Select = Callable[[str, Tensor], bool]

_CALLER = "store_state"
_HELD = (torch.float32, torch.bfloat16, torch.float16)


class StoreState(Link):
    """One link of what `store_state` returns.

    Attributes:
        inner: the wrapped link.
        format: of its arrays.
        stochastic: how they are rounded.
        select: which of them; None for all.
        prefix: of their names: the place of the rule in a wrapped chain.
        seed: of the wrapped rule, and of the arrays' words.
    """

    inner: Link
    format: Format
    stochastic: bool
    select: Select | None
    prefix: str
    seed: Any

    def __post_init__(self) -> None:
        """Say of itself what the wrapped link says."""
        inner = self.inner
        said = {
            # What state dicts and messages call it: the formats must agree.
            "name": f"{_CALLER}({inner.name}, {_description(self.format)})",
            "scope": inner.scope,
            "reads_names": self.select is not None or inner.reads_names,
            "measures": inner.measures,
            "needs_finite": inner.needs_finite,
        }
        vars(self).update(said)

    @property
    def rule(self) -> Rule:
        """That of the wrapped link."""
        return self.inner.rule

    def measure(self, h: Any, norms: Callable[[bool], Tensor]) -> Mapping[str, Any]:
        """Return what the wrapped rule measures."""
        return self.inner.measure(h, norms)

    def read(self, caller: str, group: Mapping[str, Any]) -> Any:
        """Return what the wrapped rule reads."""
        return self.inner.read(caller, group)

    def applies_to(self, name: str, param: Tensor) -> bool:
        """Whether the wrapped rule touches this parameter."""
        return self.inner.applies_to(name, param)

    def bind(self, caller: str, h: Any, info: ParamInfo) -> BoundRule | None:
        """Bind the wrapped rule, with the moments that are chosen stored once more."""
        bound = self.inner.bind(caller, h, info)
        if bound is None:
            return None
        moments = tuple(self._stored(moment, info) for moment in bound.moments)
        return dataclasses.replace(bound, moments=moments)

    def check_choice(self, caller: str, h: Any, infos: Sequence[ParamInfo]) -> None:
        """Raise ValueError if there are arrays to choose from, and `select` chooses none."""
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
        """Return how a moment of the wrapped rule is stored: as that has it, unless it is chosen."""
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


def store_state(
    inner: Chain | Rule,
    format: str | torch.dtype | Format,
    *,
    rounding: Rounding = "stochastic",
    select: Select | None = None,
    seed: Seed = 0,
) -> Chain:
    """Keep the state arrays of any transform in a format.

        s = decode(stored);  u, s <- inner(g, s);  stored <- encode(s)

    `inner` gets its arrays in the dtypes in which it makes them. Rounds each array once a step, after
    `inner`. The update is of the array before it was stored, so the bits are not those of `mu_dtype` or
    `nu_dtype`.

    Not stored: integers, state of scalar parameters, 8-bit floats, and arrays below the format's `min_size`
    (see `scaled`). All other arrays are. `select` says otherwise:

        store_state(tx, "ufloat8_e6m2", select=lambda name, array: "nu" in name.split("/"))

    Only an array's name is known. In a format with a scale, a nonzero number never becomes zero in a block
    without negative numbers. So second moments are safe in "float8_e4m3fn". Formats without a
    sign keep magnitudes: select what has no sign. Freezing is not checked.

    Group entries are those of `inner`. State: the state of `inner` under the same keys, and of `scaled`
    formats `exp_avg_scale` and the like.

    Args:
        inner: a transform, or a chain of them, without a last link that applies updates to the weights.
        format: "float32", "bfloat16", "float16", "ufloat8_e6m2", a torch dtype of these, or a format from
            `scaled` or `codebook`.
        rounding: "stochastic", or "nearest_unchecked", which freezes slow averages: see `scale_by_adam`.
        select: a function that says whether an array is stored. Its arguments are the name, such as
            "mu/encoder/weight" (in a chain "0/mu/encoder/weight"), and a meta tensor of its shape and dtype.
            None stores all. The names are those of the JAX package: `exp_avg` is "mu", `exp_avg_sq` "nu",
            `momentum_buffer` "trace".
        seed: of the random words; an integer in [0, 2^64) or two uint32 words (high, low).

    Raises:
        TypeError: if an argument is of a wrong type.
        ValueError: if there is no such format or rounding, `seed` is out of range, or `inner` applies updates
            to the weights. From `Optimizer`, if `select` chooses nothing, or if an array with negative
            numbers would get a format without a sign.

    Example:
        >>> import torch, halfstep_torch as hs
        >>> tx = hs.chain(store_state(hs.scale_by_adam(), "bfloat16"), hs.scale_by_learning_rate(1e-3))
        >>> p = torch.nn.Parameter(torch.ones(3))
        >>> p.grad = torch.ones(3)
        >>> optimizer = hs.Optimizer([p], tx)
        >>> optimizer.step()
        >>> optimizer.state[p]["exp_avg"].dtype
        torch.bfloat16

    Source: ours (contract S).
    """
    fmt = as_format(_CALLER, "format", format)
    if fmt is None:
        raise TypeError(f'{_CALLER}: format=None is not a format. Use "bfloat16", or what scaled returns.')
    check_stored_state(_CALLER, fmt, rounding, select)
    array_seed, links = as_seed(_CALLER, seed), chain(inner).links
    for link in links:
        if link.last or isinstance(link, StoreState):
            raise ValueError(
                f"{_CALLER}: {link.name} is in the wrapped chain. "
                "Wrap the transforms before it, and put it after store_state(...)."
            )
    stored = []
    for i, link in enumerate(links):
        prefix = f"{i}/" if isinstance(inner, Chain) else ""
        stored.append(
            StoreState(link, fmt, rounding == "stochastic", select, prefix, (link.seed, array_seed))
        )
    return Chain(tuple(stored))


def _description(fmt: Format) -> str:
    return f"{fmt.dtype} in blocks of {fmt.block_size}" if fmt.scaled else fmt.dtype

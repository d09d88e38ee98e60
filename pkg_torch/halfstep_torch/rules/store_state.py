"""The state of any transform, kept in a format: decode it, run the transform, encode it.

Contract: section S.
"""

import dataclasses
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from halfstep_torch.chain import (
    Chain,
    Link,
    Rule,
    State,
    StateArray,
    Stream,
    Update,
    Weights,
    Words,
    chain,
    streams_of,
)
from halfstep_torch.numbers.float_formats import dtype_name
from halfstep_torch.numbers.random_words import Role
from halfstep_torch.numbers.rounding import round_value
from halfstep_torch.numbers.seeds import Seed, as_seed
from halfstep_torch.storage.formats import Format, as_format
from halfstep_torch.storage.stored_moment import StoredMoment

Select = Callable[[str, Tensor], bool]

_FUNCTION = "store_state"
_ROUNDINGS = ("stochastic", "nearest_unchecked")
_HELD = (torch.float32, torch.bfloat16, torch.float16)
# What the contract calls torch's state arrays (S3).
_NAMES = {"exp_avg": "mu", "exp_avg_sq": "nu", "momentum_buffer": "trace"}
_SIGNED = ("exp_avg", "momentum_buffer")


class _Candidate(NamedTuple):
    """A state array that a format may hold.

    Attributes:
        key: in the state.
        name: of the array, without the parameter's.
        dtype: in which the wrapped rule keeps it.
    """

    key: str
    name: str
    dtype: torch.dtype


@dataclasses.dataclass(frozen=True)
class StoreStateRule:
    """Another rule, whose state arrays are stored.

    Attributes:
        inner: the rule.
        stored: how its arrays are stored.
        dtypes: in which it keeps them.
        names: of these arrays, in front of the parameter's.
    """

    inner: Rule
    stored: tuple[StoredMoment, ...]
    dtypes: tuple[torch.dtype, ...]
    names: tuple[str, ...]

    @property
    def arrays(self) -> Mapping[str, StateArray]:
        """The rule's own, codes in place of those that are stored."""
        arrays = dict(self.inner.arrays)
        for one in self.stored:
            arrays |= one.arrays
        return arrays

    @property
    def roles(self) -> tuple[Role, ...]:
        """Those of the rule; see `streams`."""
        return self.inner.roles

    @property
    def streams(self) -> tuple[Stream, ...]:
        """The rule's words, and those of every array that is rounded stochastically."""
        named = zip(self.stored, self.names, strict=True)
        own = tuple(Stream(1, f"{name}/", one.roles) for one, name in named if one.roles)
        return streams_of(self.inner) + own

    @property
    def number_names(self) -> tuple[str, ...]:
        """Those of the rule."""
        return self.inner.number_names

    def update(self, u: Tensor, p: Tensor, state: State, numbers: Sequence, words: Words) -> Update:
        """Decode, run the rule, encode (contract S2)."""
        inner_state = dict(state)
        for one, dtype in zip(self.stored, self.dtypes, strict=True):
            inner_state[one.key] = _as_kept(one.decode(state), dtype)
        u, new = self.inner.update(u, p, inner_state, numbers, words)
        arrays = dict(new)
        stream = len(streams_of(self.inner))
        for one in self.stored:
            x = new[one.key].to(torch.float32)
            codes, _ = one.store(x if one.format.codes.signed else x.abs(), _words_of(words, stream))
            arrays |= codes
            stream += len(one.roles)
        return u, arrays


def _as_kept(x: Tensor, dtype: torch.dtype) -> Tensor:
    """Return float32 values in the dtype of the wrapped rule: to nearest, decided on bits."""
    if dtype == torch.float32:
        return x
    return round_value(x, dtype_name(dtype), None, saturate=True).to(dtype)


def _words_of(words: Words, stream: int) -> Callable[[Role], Tensor]:
    return lambda role: words(role, stream)


@dataclasses.dataclass(frozen=True)
class StoreState(Link):
    """One link of what `store_state` returns.

    Attributes:
        inner: the wrapped link.
        format: of its arrays.
        stochastic: how they are rounded.
        select: which of them; None for all.
        prefix: of their names: the place of the link in a wrapped chain.
        seeds: of the wrapped link, and of the arrays' words.
    """

    inner: Link
    format: Format
    stochastic: bool
    select: Select | None
    prefix: str
    seed: Any

    @property
    def function(self) -> str:  # pyright: ignore[reportIncompatibleVariableOverride]
        """What state dicts and messages call it: the formats must agree."""
        return f"{_FUNCTION}({self.inner.function}, {_described(self.format)})"

    @property
    def reads_names(self) -> bool:  # pyright: ignore[reportIncompatibleVariableOverride]
        """Whether the choice depends on names."""
        return self.select is not None or self.inner.reads_names

    @property
    def entries(self) -> dict[str, Any]:
        """Those of the wrapped link."""
        return self.inner.entries

    def read(self, function: str, group: Mapping[str, Any]) -> tuple:
        """Return what the wrapped link reads."""
        return self.inner.read(function, group)

    def applies_to(self, name: str, param: Tensor) -> bool:
        """Whether the wrapped link touches this parameter."""
        return self.inner.applies_to(name, param)

    def numbers(self, function: str, values: tuple, step: int) -> tuple[float, ...]:
        """Return those of the wrapped link."""
        return self.inner.numbers(function, values, step)

    def rule(self, function: str, values: tuple, weights: Weights) -> Rule | None:
        """Wrap the rule of the wrapped link, if any of its arrays is stored."""
        inner = self.inner.rule(function, values, weights)
        fmt = self.format.for_shape(weights.shape)
        small = self.format.scaled and not fmt.scaled
        if inner is None or small:
            return inner
        chosen = [one for one in self._candidates(inner, weights) if self._chooses(one, weights)]
        for one in chosen:
            if one.key in _SIGNED and not self.format.codes.signed:
                raise ValueError(
                    f"{_FUNCTION}: format={self.format.name} has no sign, and {one.name!r} has one. "
                    'Choose second moments, as by select=lambda name, array: "nu" in name.split("/").'
                )
        if not chosen:
            return inner
        stochastic = self.stochastic and fmt.rounds
        stored = tuple(StoredMoment(one.key, fmt, stochastic, Role.STATE) for one in chosen)
        dtypes, names = (one.dtype for one in chosen), (one.name for one in chosen)
        return StoreStateRule(inner, stored, tuple(dtypes), tuple(names))

    def check_choice(self, function: str, values: tuple, all_weights: Sequence[Weights]) -> None:
        """Raise ValueError if there are arrays to choose from, and `select` chooses none."""
        asked = []
        for weights in all_weights if self.select is not None else ():
            inner = self.inner.rule(function, values, weights)
            for one in self._candidates(inner, weights) if inner is not None else ():
                if self._chooses(one, weights):
                    return
                asked.append(f"{one.name}/{weights.name}")
        if asked:
            raise ValueError(
                f"{_FUNCTION}: select chooses none of {', '.join(map(repr, asked[:8]))}. "
                "Choose one of them, or leave select out."
            )

    def _candidates(self, inner: Rule, weights: Weights) -> list[_Candidate]:
        if not weights.shape:
            return []
        return [
            _Candidate(key, f"{self.prefix}{_NAMES.get(key, key)}", array.dtype)
            for key, array in inner.arrays.items()
            if array.dtype in _HELD
        ]

    def _chooses(self, one: _Candidate, weights: Weights) -> bool:
        if self.select is None:
            return True
        array = torch.empty(weights.shape, dtype=one.dtype, device="meta")
        return bool(self.select(f"{one.name}/{weights.name}", array))


def store_state(
    inner: Chain | Link,
    format: str | torch.dtype | Format,
    *,
    rounding: str = "stochastic",
    select: Select | None = None,
    seed: Seed = 0,
) -> Chain:
    """Keep the state arrays of any transform in a format.

        s = decode(stored);  u, s <- inner(g, s);  stored <- encode(s)

    `inner` gets its arrays in the dtypes in which it makes them. Rounds each array once a step, after
    `inner`: the update is of the array before it was stored, so the bits are not those of `mu_dtype` or
    `nu_dtype`.

    Left alone are integers, state of scalar parameters, 8-bit floats, and arrays smaller than the format is
    for (see `scaled`). All other arrays are stored. `select` says otherwise:

        store_state(tx, "ufloat8_e6m2", select=lambda name, array: "nu" in name.split("/"))

    Nothing is known of an array but its name. In a format with a scale, what is not zero never becomes zero
    in a block without a negative number, so second moments are safe in "float8_e4m3fn". Formats without a
    sign keep magnitudes: select what has no sign. As no decay rate is known, nothing is refused for freezing.

    Group entries are those of `inner`. State: that of `inner` under the same keys, and of `scaled` formats
    `exp_avg_scale` and the like.

    Args:
        inner: a transform, or a chain of them, without a last link that lands on the weights.
        format: "float32", "bfloat16", "float16", "ufloat8_e6m2", a torch dtype of these, or a format from
            `scaled` or `codebook`.
        rounding: "stochastic", or "nearest_unchecked", which freezes slow averages: see `scale_by_adam`.
        select: from the name of an array, such as "mu/encoder/weight", in a chain "0/mu/encoder/weight", and
            a meta tensor of its shape and dtype to whether it is stored; None stores all. The names are those
            of the JAX package: `exp_avg` is "mu", `exp_avg_sq` "nu", `momentum_buffer` "trace".
        seed: of the random words; an integer in [0, 2^64) or two uint32 words (high, low).

    Returns:
        A chain, for `chain` and `Optimizer`.

    Raises:
        TypeError: if an argument is of a wrong type.
        ValueError: if there is no such format or rounding, `seed` is out of range, or `inner` lands on the
            weights; from `Optimizer`, if `select` chooses nothing, or a format without a sign is to hold what
            has one.

    Example:
        >>> import halfstep_torch as hs
        >>> tx = hs.chain(store_state(hs.scale_by_adam(), "bfloat16"), hs.scale_by_learning_rate(1e-3))
        >>> p = torch.nn.Parameter(torch.ones(3))
        >>> p.grad = torch.ones(3)
        >>> optimizer = hs.Optimizer([p], tx)
        >>> optimizer.step()
        >>> optimizer.state[p]["exp_avg"].dtype
        torch.bfloat16

    Source: ours (contract S).
    """
    fmt = as_format(_FUNCTION, "format", format)
    if fmt is None:
        raise TypeError(f'{_FUNCTION}: format=None is not a format. Use "bfloat16", or what scaled returns.')
    if rounding not in _ROUNDINGS:
        raise ValueError(
            f"{_FUNCTION}: rounding={rounding!r} is not a rounding of state whose decay rate is not known. "
            'Use "stochastic" or "nearest_unchecked".'
        )
    if select is not None and not callable(select):
        raise TypeError(f"{_FUNCTION}: select={select!r} is not a function. Use lambda name, array: ...")
    own, links = as_seed(_FUNCTION, seed), chain(inner).links
    for link in links:
        if link.last or isinstance(link, StoreState):
            raise ValueError(
                f"{_FUNCTION}: {link.function} stands in the wrapped chain. "
                "Wrap the transforms before it, and put it after store_state(...)."
            )
    stored = []
    for i, link in enumerate(links):
        prefix = f"{i}/" if isinstance(inner, Chain) else ""
        stored.append(StoreState(link, fmt, rounding == "stochastic", select, prefix, (link.seed, own)))
    return Chain(tuple(stored))


def _described(fmt: Format) -> str:
    return f"{fmt.name} in blocks of {fmt.block_size}" if fmt.scaled else fmt.name

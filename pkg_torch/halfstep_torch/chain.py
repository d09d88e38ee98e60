"""What a link of a chain is, and `chain`.

A transform has two halves. A `Link` lives with the optimizer: it reads its entries of a param group, checks
them and turns them into float32 numbers, once per step. A `Rule` is what remains for one parameter when all
choices are made: a pure function of tensors, hashable, so that equal rules share one compiled kernel.
"""

import dataclasses
from collections.abc import Callable, Mapping, Sequence
from typing import Any, ClassVar, NamedTuple, Protocol, runtime_checkable

import torch
from torch import Tensor

from halfstep_torch.numbers.random_words import Role
from halfstep_torch.storage.formats import Format

Words = Callable[..., Tensor]
"""From a role, and the place of a stream among those that a rule reads (0 by default), to int32 words."""
State = Mapping[str, Tensor]
Update = tuple[Tensor, State]


class Weights(NamedTuple):
    """What decides how a parameter is stepped, besides the numbers.

    Attributes:
        dtype: of the weights, as the link sees them.
        shape: of the parameter.
        name: of the parameter, where a link of the chain reads names.
    """

    dtype: torch.dtype
    shape: tuple[int, ...]
    name: str = ""


class Stream(NamedTuple):
    """Random words that a rule reads.

    Attributes:
        seed: which seed of its link, where that has several.
        prefix: of the name whose words they are; the parameter's follows.
        roles: of the words.
    """

    seed: int
    prefix: str
    roles: tuple[Role, ...]


@dataclasses.dataclass(frozen=True)
class StateArray:
    """One array of a parameter's state.

    Attributes:
        dtype: of the array.
        scale_of: the format whose scales it holds, one byte per block; None: one entry per element.
        packed_of: the format whose codes it holds, two to a byte; None where no byte is shared.
        copies_weights: it starts as the weights; else as zeros, scales as those of zeros.
    """

    dtype: torch.dtype
    scale_of: Format | None = None
    packed_of: Format | None = None
    copies_weights: bool = False

    def shape(self, shape: tuple[int, ...]) -> tuple[int, ...]:
        """Return its shape, given that of the parameter."""
        if self.packed_of:
            return self.packed_of.code_shape(shape)
        return self.scale_of.scale_shape(shape) if self.scale_of else tuple(shape)

    def size(self, elements: int) -> int:
        """Return how many of its entries belong to a stretch of whole blocks."""
        if self.packed_of and self.packed_of.blocks:
            return elements // self.packed_of.blocks.unit * self.packed_of.blocks.packed
        return self.scale_of.blocks.count(elements) if self.scale_of and self.scale_of.blocks else elements

    def new(self, param: Tensor) -> Tensor:
        """Return the array of a parameter that was never stepped; row-major, whatever the layout of that."""
        if self.copies_weights:
            return param.detach().to(self.dtype, memory_format=torch.contiguous_format, copy=True)
        start = self.scale_of.codes.bytes[0] if self.scale_of else 0
        return torch.full(self.shape(param.shape), start, dtype=self.dtype, device=param.device)


class Rule(Protocol):
    """The update of one parameter by one link: choices made, numbers not yet known."""

    @property
    def arrays(self) -> Mapping[str, StateArray]:
        """State arrays that the rule keeps, by torch's names for them."""
        ...

    @property
    def roles(self) -> tuple[Role, ...]:
        """Roles for which the rule reads random words."""
        ...

    @property
    def number_names(self) -> tuple[str, ...]:
        """What the numbers of a step are, in the order in which `Link.numbers` gives them."""
        ...

    def update(self, u: Tensor, p: Tensor, state: State, numbers: Sequence, words: Words) -> Update:
        """Return the outgoing update and the rule's new state arrays.

        Pure, and elementwise but for block maxima: called on stretches of whole blocks of a parameter, in
        eager mode and under torch.compile.

        Args:
            u: incoming update, float32.
            p: the weights, float32.
            state: state arrays of all rules; scales in one row.
            numbers: what `Link.numbers` gave: floats, or float32 0-d tensors in compiled code.
            words: from role to int32 words, one per element.
        """
        ...


def streams_of(rule: Rule) -> tuple[Stream, ...]:
    """Return what words a rule reads: those of its parameter, unless it has `streams` of its own."""
    own = getattr(rule, "streams", None)
    return own if own is not None else (Stream(0, "", rule.roles),) if rule.roles else ()


@runtime_checkable
class MeasuringRule(Rule, Protocol):
    """A rule that has to know norms of a whole parameter before it can update any stretch of it."""

    def measure(self, p_norms: Tensor, u_norms: Tensor, numbers: Sequence[float]) -> Tensor:
        """Return of each parameter the one number that `update` reads, in place of its `numbers`.

        Args:
            p_norms: of the weights, float32, an entry per parameter.
            u_norms: of the incoming updates, likewise.
            numbers: what `Link.numbers` gave.
        """
        ...


class Link:
    """One transform. Subclasses override what they need; all are frozen dataclasses.

    Attributes:
        function: the public name, for messages and state dicts.
        last: whether the link must be the last of its chain, or of what another such link wraps.
        wraps: how many links before this one see the float32 weights that it keeps.
        seed: of the words that the link's rules read, or None; a tuple where they read several (`Stream`).
        reads_names: whether its rules depend on the name of the parameter.
    """

    function: ClassVar[str]
    last: ClassVar[bool] = False
    wraps: int = 0
    seed: Any = None
    reads_names: ClassVar[bool] = False

    @property
    def entries(self) -> dict[str, Any]:
        """Param-group entries that the link owns, with their defaults; a group's own value wins."""
        return {}

    def read(self, function: str, group: Mapping[str, Any]) -> tuple:
        """Return the group's values of the entries, checked and in canonical form.

        Args:
            function: whose arguments they are, for messages.
            group: a param group.

        Raises:
            TypeError: if a value is of a wrong type.
            ValueError: if a value is out of range.
        """
        return ()

    def applies_to(self, name: str, param: Tensor) -> bool:
        """Whether the link touches this parameter at all; asked once per parameter."""
        return True

    def rule(self, function: str, values: tuple, weights: Weights) -> Rule | None:
        """Return what the link does to such parameters, or None for nothing.

        Args:
            function: for messages.
            values: what `read` gave.
            weights: their dtype and shape.

        Raises:
            ValueError: if the values do not go together for such parameters.
        """
        raise NotImplementedError

    def check_choice(self, function: str, values: tuple, all_weights: Sequence[Weights]) -> None:
        """Raise ValueError if something was to be chosen from all parameters of a group, and nothing is.

        Args:
            function: for messages.
            values: what `read` gave.
            all_weights: of the parameters that the link applies to.
        """
        return

    def numbers(self, function: str, values: tuple, step: int) -> tuple[float, ...]:
        """Return the float32 numbers of one step, in the order in which the rule reads them.

        Args:
            function: for messages.
            values: what `read` gave.
            step: the count after its increment, 1 at the first update.
        """
        return ()


@dataclasses.dataclass(frozen=True)
class Chain:
    """Links in the order in which they are applied. Made by `chain`.

    Attributes:
        links: the transforms.
    """

    links: tuple[Link, ...]

    @property
    def entries(self) -> dict[str, Any]:
        """All param-group entries with their defaults."""
        return {name: value for link in self.links for name, value in link.entries.items()}


def chain(*links: Link | Chain) -> Chain:
    """Apply transforms one after the other, as `optax.chain` does.

    The first link receives the gradient in float32, each next one what the link before it gave; the weight
    then becomes nearest(p + u). Rounds nowhere itself.

    Args:
        *links: transforms, or chains of them.

    Returns:
        The chain, for `Optimizer`.

    Raises:
        TypeError: if something else than a transform is given.
        ValueError: if two links own one param-group entry, or if `round_stochastically` is not the last.

    Example:
        >>> import halfstep_torch as hs
        >>> tx = hs.chain(hs.scale_by_adam(), hs.scale_by_learning_rate(1e-3), hs.round_stochastically())
        >>> sorted(tx.entries)
        ['betas', 'eps', 'eps_root', 'lr', 'mu_dtype', 'nu_dtype']

    Source: the form is Optax's.
    """
    flat: list[Link] = []
    for link in links:
        if isinstance(link, Chain):
            flat.extend(link.links)
        elif isinstance(link, Link):
            flat.append(link)
        else:
            raise TypeError(
                f"chain: {link!r} is not a transform. Pass scale_by_adam(), scale_by_learning_rate(1e-3), ..."
            )
    _check_owners(flat)
    for i, link in enumerate(flat[:-1]):
        if link.last and not any(j - flat[j].wraps <= i for j in range(i + 1, len(flat))):
            raise ValueError(f"chain: {link.function} lands on the weights. Make it the last link.")
    return Chain(tuple(flat))


def _check_owners(links: Sequence[Link]) -> None:
    owners: dict[str, str] = {}
    for link in links:
        for entry in link.entries:
            if entry in owners:
                raise ValueError(
                    f"chain: {owners[entry]} and {link.function} both own the group entry {entry!r}. "
                    "Keep one of them."
                )
            owners[entry] = link.function

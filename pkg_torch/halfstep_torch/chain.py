"""What a link of a chain is, and how links become one step on one parameter.

A transform has two halves. A `Link` lives with the optimizer: it owns entries of the param groups, checks them and
turns them into float32 numbers, once per step. A `Rule` is what remains for one parameter when all choices are made:
a pure function of tensors, hashable, so that equal rules share one compiled kernel.
"""

import dataclasses
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Protocol

from torch import Tensor

from halfstep_torch.formats import Format
from halfstep_torch.random_words import Role

Words = Callable[[Role], Tensor]
Codes = Mapping[str, Tensor]


class Rule(Protocol):
    """The update of one parameter by one link: choices made, numbers not yet known."""

    @property
    def formats(self) -> Mapping[str, Format]:
        """State arrays that the rule keeps, by torch's names for them."""
        ...

    @property
    def roles(self) -> tuple[Role, ...]:
        """Roles for which the rule reads random words."""
        ...

    def update(
        self, u: Tensor, p: Tensor, codes: Codes, numbers: Sequence, words: Words
    ) -> tuple[Tensor, Codes]:
        """Return the outgoing update and the new codes of every state array.

        Elementwise and pure: called on pieces of a parameter, in eager mode and under torch.compile.

        Args:
            u: incoming update, float32.
            p: the weights, float32.
            codes: of the state arrays.
            numbers: what the link's `numbers` gave: floats, or float32 0-d tensors in compiled code.
            words: from role to int32 words, one per element.
        """
        ...


@dataclasses.dataclass(frozen=True)
class Link:
    """One transform. Subclasses override what they need.

    Attributes:
        function: the public name, for messages.
    """

    @property
    def function(self) -> str:
        """The public name, for messages."""
        raise NotImplementedError

    @property
    def entries(self) -> dict[str, Any]:
        """Param-group entries that the link owns, with their defaults; a group's own value wins."""
        return {}

    @property
    def seed(self) -> int | None:
        """Seed of the words that the link's rules read."""
        return None

    def check(self, function: str, group: dict[str, Any], param_dtypes: Sequence) -> None:
        """Raise unless the group's values of the entries are valid for params of these dtypes; make names canonical."""

    def rule(self, group: Mapping[str, Any], name: str, param: Tensor) -> Rule | None:
        """Return what the link does to this parameter, or None for nothing."""
        raise NotImplementedError

    def numbers(self, group: Mapping[str, Any], step: int) -> tuple[float, ...]:
        """Return the float32 numbers of this step, `step` counted from 1, in the order that the rule reads them."""
        return ()


@dataclasses.dataclass(frozen=True)
class Chain:
    """Links in the order in which they are applied. Made by `chain`."""

    links: tuple[Link, ...]

    @property
    def entries(self) -> dict[str, Any]:
        """All param-group entries with their defaults."""
        return {name: value for link in self.links for name, value in link.entries.items()}


def chain(*links: Link | Chain) -> Chain:
    """Apply transforms one after the other, as `optax.chain` does.

    The first link receives the gradient in float32, each next one what the link before it gave; the weight then
    becomes nearest(p + u). Rounds nowhere itself.

    Args:
        links: transforms, or chains of them.

    Returns:
        The chain, for `Optimizer`.

    Raises:
        TypeError: if something else than a transform is given.
        ValueError: if two links own one param-group entry, or if `round_stochastically` is not the last.

    Example:
        >>> import halfstep_torch as hs
        >>> tx = hs.chain(hs.scale_by_adam(), hs.scale_by_learning_rate(1e-3), hs.round_stochastically(seed=0))
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
                f"chain: {link!r} is not a transform. Pass scale_by_adam(), round_stochastically(), ..."
            )
    owners: dict[str, str] = {}
    for link in flat:
        for entry in link.entries:
            if entry in owners:
                raise ValueError(
                    f"chain: {owners[entry]} and {link.function} both own the group entry {entry!r}. Keep one of them."
                )
            owners[entry] = link.function
    for link in flat[:-1]:
        if link.function == "round_stochastically":
            raise ValueError("chain: round_stochastically lands on the weights. Make it the last link.")
    return Chain(tuple(flat))

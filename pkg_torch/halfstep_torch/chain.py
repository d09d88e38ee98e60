"""What a link of a chain is, and `chain`.

A transform has two halves. A `Link` lives with the optimizer: it reads its entries of a param group, checks
them and turns them into float32 numbers, once per step. A `Rule` is what remains for one parameter when all
choices are made: a pure function of tensors, hashable, so that equal rules share one compiled kernel.
"""

import dataclasses
from collections.abc import Callable, Mapping, Sequence
from typing import Any, ClassVar, Protocol

from torch import Tensor

from halfstep_torch.formats import Format
from halfstep_torch.random_words import Role

Words = Callable[[Role], Tensor]
Codes = Mapping[str, Tensor]
Update = tuple[Tensor, Codes]


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

    @property
    def number_names(self) -> tuple[str, ...]:
        """What the numbers of a step are, in the order in which `Link.numbers` gives them."""
        ...

    def update(self, u: Tensor, p: Tensor, codes: Codes, numbers: Sequence, words: Words) -> Update:
        """Return the outgoing update and the new codes of every state array.

        Elementwise and pure: called on pieces of a parameter, in eager mode and under torch.compile.

        Args:
            u: incoming update, float32.
            p: the weights, float32.
            codes: of the state arrays.
            numbers: what `Link.numbers` gave: floats, or float32 0-d tensors in compiled code.
            words: from role to int32 words, one per element.
        """
        ...


class Link:
    """One transform. Subclasses override what they need; all are frozen dataclasses.

    Attributes:
        function: the public name, for messages and state dicts.
        last: whether the link must be the last of its chain.
        seed: of the words that the link's rules read, or None.
    """

    function: ClassVar[str]
    last: ClassVar[bool] = False
    seed: int | None = None

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

    def rule(self, function: str, values: tuple, dtype) -> Rule | None:
        """Return what the link does to parameters of `dtype`, or None for nothing.

        Args:
            function: for messages.
            values: what `read` gave.
            dtype: of the weights.

        Raises:
            ValueError: if the values do not go together for such parameters.
        """
        raise NotImplementedError

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
    for link in flat[:-1]:
        if link.last:
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

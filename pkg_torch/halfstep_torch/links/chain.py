"""`chain`: update rules one after the other."""

import dataclasses
from collections.abc import Callable, Sequence

from halfstep.checkpoint.header import SPEC_VERSION
from halfstep.hyperparameters import Arguments
from halfstep.rule import Rule
from halfstep_torch.leaves.group_names import Group
from halfstep_torch.links.link import Link, as_link
from halfstep_torch.numbers.seeds import LinkSeed

HEADER = "halfstep"
"""Key of a group's entry for its chain and seeds."""


@dataclasses.dataclass(frozen=True)
class Chain:
    """Links in the order in which they are applied, made by `chain`."""

    links: tuple[Link, ...]

    @property
    def entries(self) -> Group:
        """All param-group entries with their defaults."""
        return {name: value for link in self.links for name, value in link.entries.items()}

    def with_seeds(self, seeds: Sequence[LinkSeed]) -> "Chain":
        """Return the same chain with other random words."""
        pairs = zip(self.links, seeds, strict=True)
        return Chain(tuple(link.with_seed(seed) for link, seed in pairs))

    def header(self, names: Sequence[str] | None = None, counts: Sequence[int] = ()) -> Group:
        """Return a group's header for state dicts, of plain types that `weights_only=True` loads.

        `counts` are the distinct counts of its parameters, which are also tensors in their state. They are
        stored as a text, because LeRobot loads a list only if its length is the same as in a new optimizer.
        """
        links, seeds = ([getattr(link, key) for link in self.links] for key in ("name", "seed"))
        header = {"spec_version": SPEC_VERSION, "links": links, "seeds": seeds}
        if names is None:
            return header
        return {**header, "names": list(names), "counts": " ".join(map(str, counts))}


@dataclasses.dataclass(frozen=True)
class ChainByOptions:
    """A chain that `make` builds from options, which each param group may set."""

    make: Callable[..., Chain]
    options: Arguments


def chain(*links: Rule | Chain) -> Chain:
    """Apply transforms one after the other, as `optax.chain` does.

    The first link gets the gradient in float32, and each other link gets the result of the link before. The
    weight then becomes nearest(p + u). `chain` itself does not round.

    Args:
        *links: transforms, including your own rules, or chains of them.

    Raises:
        TypeError: if an argument is not a transform.
        ValueError: if a rule's declarations are wrong, or two links have the same param-group entry or state
            array. Also if a link that applies updates to the weights is not the last link.

    Example:
        >>> import halfstep_torch as hs
        >>> tx = hs.chain(hs.scale_by_adam(), hs.scale_by_learning_rate(1e-3), hs.round_stochastically())
        >>> sorted(tx.entries)
        ['betas', 'eps', 'eps_root', 'lr', 'mu_dtype', 'nu_dtype']

    Source: `optax.chain`.
    """
    flat: list[Link] = []
    if not links:
        raise ValueError(
            "chain: there are no links. Pass transforms, such as chain(scale_by_adam(), "
            "scale_by_learning_rate(1e-3), round_stochastically())."
        )
    for link in links:
        if isinstance(link, Chain):
            flat.extend(link.links)
        elif isinstance(link, Rule):
            flat.append(as_link(link))
        else:
            raise TypeError(
                f"chain: {link!r} is not a transform. Pass scale_by_adam(), scale_by_learning_rate(1e-3), ..."
            )
    _check_owners(flat)
    for i, link in enumerate(flat[:-1]):
        if link.last and not any(j - flat[j].wrapped_links <= i for j in range(i + 1, len(flat))):
            way_out = "Make it the last link."
            if link.name == flat[-1].name:
                way_out = "The chain has it twice: keep the last one."
            raise ValueError(f"chain: {link.name} applies updates to the weights. {way_out}")
    for link in flat[1:]:
        if link.measures:
            raise ValueError(
                f"chain: {link.name} measures the gradients, and comes after {flat[0].name}. "
                "Make it the first link."
            )
    return Chain(tuple(flat))


def _check_owners(links: Sequence[Link]) -> None:
    """Raise ValueError if two links own the same entry of param groups or the same state array."""
    owners: dict[tuple[str, str], str] = {}
    for link in links:
        owned = [("group entry", entry) for entry in link.entries]
        for kind, key in owned + [("state array", key) for key in link.state_keys]:
            if owner := owners.get((kind, key)):
                raise ValueError(
                    f"chain: {owner} and {link.name} both own the {kind} {key!r}. Keep one of them."
                )
            owners[kind, key] = link.name

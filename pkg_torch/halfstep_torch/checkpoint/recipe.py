"""The description of an optimizer's links in a state file: numbers, switches and kept arrays."""

from collections.abc import Iterator

from halfstep.checkpoint.header import Recipe, link_record, settings_of
from halfstep.checkpoint.header_form import Header
from halfstep.hyperparameters import Values
from halfstep.storage.labels import Label
from halfstep_torch.engine.plan import Plan
from halfstep_torch.links.bound_rule import BoundRule
from halfstep_torch.links.link import Link
from halfstep_torch.links.stored_state import StoreState
from halfstep_torch.numbers.float_formats import dtype_name
from halfstep_torch.numbers.seeds import LinkSeed
from halfstep_torch.storage.stored_moment import StoredMoment, scale_key
from halfstep_torch.weights.weight_rule import BoundWeights, WeightRule

# The contract's names for arrays kept beside a weight.
_WEIGHT_FIELDS = {"extra_bits": "extra"}
# torch supports few operations on uint16.
_MEANT = {"int16": "uint16"}


def recipe_of(plan: Plan, links: list[tuple[Link, Values]], count: int) -> Recipe:
    """Return the links that touch a parameter, in the form of a state file."""
    recipe: Recipe = []
    for bound, place in zip(plan.rules, plan.rule_indices, strict=True):
        link, values = links[place]
        if isinstance(link, StoreState):
            inner, outer = link.seed
            kept = {moment.name: _kept(moment) for moment in bound.moments}
            recipe.append(_link(link.inner, values, inner, count, kept))
            name = f"store_state({link.prefix}{link.inner.name})"
            stored = {moment.name: _kept(moment.again) for moment in bound.moments if moment.again}
            recipe.append(link_record(name, count, seed_words(outer), {}, {}, stored))
        elif isinstance(bound, BoundWeights):
            recipe.append(_link(link, values, link.seed, count, _beside(bound)))
        else:
            kept = {moment.name: _kept(moment) for moment in bound.moments}
            recipe.append(_link(link, values, link.seed, count, kept))
    for place in idle_places(plan, links):
        recipe.append(_link(*links[place], links[place][0].seed, count, {}) | {"idle": True})
    return recipe


def idle_places(plan: Plan, links: list[tuple[Link, Values]]) -> list[int]:
    """Return the link that would store the weights of a parameter if they were not float32, or None."""
    return [
        i for i, (link, _) in enumerate(links) if isinstance(link, WeightRule) and i not in plan.rule_indices
    ]


def arrays_of(plan: Plan) -> Iterator[tuple[str, str, Label | None]]:
    """Yield (key in the state, field in a file, label) for every state array of a parameter."""
    for bound in plan.rules:
        if isinstance(bound, BoundWeights):
            for key in bound.arrays:
                yield key, _WEIGHT_FIELDS.get(key, key), None
            continue
        for moment in bound.moments:
            fmt = (moment.again or moment).format
            label = fmt.label
            plain = label == {"dtype": dtype_name(fmt.torch_dtype)}
            yield moment.key, moment.name, None if plain else label
            if scale_key(moment.key) in moment.arrays:
                yield scale_key(moment.key), f"{moment.name}_scale", {"dtype": f"scales of {label['dtype']}"}


def seed_words(seed: LinkSeed) -> list[int] | None:
    """Return a seed as two words."""
    return None if seed is None else [seed >> 32, seed & 0xFFFFFFFF]


def _link(link: Link, values: Values, seed: LinkSeed, count: int, arrays: Header) -> Header:
    """Return the entry of one link of the chain."""
    return link_record(link.name, count, seed_words(seed), *settings_of(link.rule, values), arrays)


def _beside(bound: BoundRule) -> Header:
    """Return the entry of the array beside a weight."""
    kept = {}
    for key, array in bound.arrays.items():
        dtype = dtype_name(array.dtype)
        kept[_WEIGHT_FIELDS.get(key, key)] = {"format": {"dtype": _MEANT.get(dtype, dtype)}}
    return kept


def _kept(moment: StoredMoment) -> Header:
    """Return the format and rounding of a moment."""
    return {"format": moment.format.label, "rounding": moment.rounding}

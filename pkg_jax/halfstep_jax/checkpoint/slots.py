"""The meaning of every leaf of an optimizer's state: its link, array and weight.

Found by making the state once, on shapes alone, and listening to its links (`link_reports.py`). The rest, the
state of other transforms, goes by its path in the tree.
"""

import collections
import dataclasses
from typing import Any, Literal, NamedTuple

import jax

from halfstep.checkpoint.header import settings_of
from halfstep.checkpoint.header_form import Header
from halfstep_jax.leaf_calls import Tree
from halfstep_jax.leaves import named_leaves
from halfstep_jax.link_reports import Inside, Link, state_map
from halfstep_jax.weights.weight_rule import WeightRule, is_wide

Kind = Literal["count", "seed", "array", "tag", "nothing", "other"]


class Slot(NamedTuple):
    """One leaf of a state.

    Attributes:
        kind: "count" or "seed" of links; "array" of one; "tag" of its formats; "nothing", a placeholder;
            "other": of a transform that is not of this package.
        name: of the array in a file, or of the tag.
        entries: the indices of its entries.
        label: how the array is stored, where its dtype does not say.
    """

    kind: Kind
    name: str = ""
    entries: tuple[int, ...] = ()
    label: Header | None = None


@dataclasses.dataclass
class Entry:
    """A file's entry of one link, without count and seed.

    Attributes:
        name: of the link.
        numbers: its hyperparameters.
        options: its switches.
        arrays: of every weight that it steps: by field the format and the rounding.
        idle: the weights that it passes on as they are.
    """

    name: str
    numbers: Header
    options: Header
    arrays: dict[str, Header]
    idle: set[str] = dataclasses.field(default_factory=set)


class Slots(NamedTuple):
    """The state of a transform, leaf by leaf.

    Attributes:
        treedef: of the state.
        shapes: of its leaves, with dtypes.
        slots: their kinds.
        entries: of the links, a wrapper after the links inside it.
    """

    treedef: Any  # a PyTreeDef, which checkers take for a variable
    shapes: list[Tree]
    slots: list[Slot]
    entries: list[Entry]


def slots_of(tx, params) -> Slots:
    """Return the slots of a transform's state for given weights."""
    links, state, made = state_map(tx, params)
    finder = _Finder(links)
    shapes, treedef = jax.tree.flatten(made)
    return Slots(treedef, shapes, finder.walk(state, ""), finder.entries)


class _Finder:
    """Tells the leaves of a state apart, given its links.

    Attributes:
        entries: of the links.
    """

    def __init__(self, links: list[Link]):
        self.entries: list[Entry] = []
        self._links = {id(link.state): link for link in links}
        self._own: dict[int, int] = {}
        self._wrappers: dict[int, tuple[int, ...]] = {}
        self._names: collections.Counter[str] = collections.Counter()
        for link in links:
            self._enter(link)

    def walk(self, tree, path: str) -> list[Slot]:
        """Return the slots of a state, or of the part at a path."""
        is_link = self._links.__contains__
        slots = []
        for name, x in named_leaves(tree, lambda x: is_link(id(x))):
            where = _joined(path, name)
            slots += self._link(self._links[id(x)], where) if is_link(id(x)) else [_other(where)]
        return slots

    def _enter(self, link: Link) -> None:
        """Add the entries of a link; `store_state` adds one after each entry that it wraps."""
        if not isinstance(link.inside, Inside):
            self._own[id(link.state)] = len(self.entries)
            self.entries.append(_entry(link))
            return
        wrappers = []
        for inner in link.inside.links:
            self._links[id(inner.state)] = inner
            self._enter(inner)
            wrappers.append(len(self.entries))
            path = _path_of(link.inside.state, inner.state)
            inner_entry = self.entries[-1]
            name = f"store_state({_joined(path, inner_entry.name)})"
            self.entries.append(Entry(name, {}, {}, {leaf: {} for leaf in inner_entry.arrays}))
        self._wrappers[id(link.state)] = tuple(wrappers)

    def _link(self, link: Link, path: str) -> list[Slot]:
        """Return the slots of a link's state."""
        if isinstance(link.inside, Inside):
            return self._stored(link, link.inside, path)
        entries = (self._own[id(link.state)],)
        slots: list[Slot] = []
        for field in getattr(link.state, "_fields", ()):
            value = getattr(link.state, field)
            if field in ("count", "outer_count"):
                slots.append(Slot("count", entries=entries))
            elif field in ("seed", "outer_seed"):
                slots.append(Slot("seed", entries=entries))
            elif field == "formats":
                slots += _tag(value)
            elif field == "inner_state":
                slots += self.walk(value, _joined(path, field))
            else:
                slots += [self._array(entries, field, leaf, x) for leaf, x in named_leaves(value)]
        return slots

    def _array(self, entries: tuple[int, ...], field: str, leaf: str, x) -> Slot:
        """Return the slot of a link's array; placeholders have none."""
        moment = field.removesuffix("_scale")
        formats = self.entries[entries[0]].arrays.get(leaf, {})
        name = f"{field}/{leaf}"
        if field in formats:
            stored = formats[field]["format"]
            return self._named(name, entries, None if stored == {"dtype": x.dtype.name} else stored)
        if field != moment and moment in formats and "block_size" in formats[moment]["format"]:
            return self._named(name, entries, {"dtype": f"scales of {formats[moment]['format']['dtype']}"})
        return Slot("nothing")

    def _named(self, name: str, entries: tuple[int, ...], label: Header | None) -> Slot:
        """Return the slot of an array; a repeated name gets a number."""
        self._names[name] += 1
        field, _, leaf = name.partition("/")
        count = self._names[name]
        return Slot("array", name if count == 1 else f"{field}#{count}/{leaf}", entries, label)

    def _stored(self, link: Link, inside: Inside, path: str) -> list[Slot]:
        """Return the slots of the state of `store_state`."""
        wrappers = self._wrappers[id(link.state)]
        inner = self.walk(inside.state, _joined(path, "inner_state"))
        names = [name for name, _ in named_leaves(inside.state)]
        scales: dict[str, Slot] = {}
        for i, (name, slot, fmt) in enumerate(zip(names, inner, inside.formats, strict=True)):
            if fmt is None:
                continue
            inner[i] = slot._replace(label=fmt.label)
            field, _, leaf = slot.name.partition("/")
            if slot.kind == "array":
                rounding = "stochastic" if link.rule.stochastic else "nearest"
                stored = {"format": fmt.label, "rounding": rounding}
                self.entries[slot.entries[0] + 1].arrays[leaf][field] = stored
            if fmt.scaled:
                label = {"dtype": f"scales of {fmt.dtype}"}
                scales[name] = slot._replace(name=f"{field}_scale/{leaf}", label=label)
        if not wrappers:
            count, seed = (_other(_joined(path, field)) for field in ("outer_count", "outer_seed"))
        else:
            count, seed = Slot("count", entries=wrappers), Slot("seed", entries=wrappers)
        rest = [scales.get(name, Slot("nothing")) for name, _ in named_leaves(link.state.scale)]
        return [count, seed, *inner, *rest, *_tag(link.state.formats)]


def _entry(link: Link) -> Entry:
    """Return the file's entry of a link other than `store_state`."""
    rule, weights = link.rule, dict(named_leaves(link.params))
    # float32 weights pass through.
    passes = {leaf for leaf, p in weights.items() if isinstance(rule, WeightRule) and is_wide(p)}
    arrays: dict[str, Header] = {leaf: {} for leaf in weights}
    for name, moment in (link.inside or {}).items():
        for leaf, codes in named_leaves(getattr(link.state, name)):
            fmt, rounding = moment.storage_of(codes, weights[leaf].shape)
            arrays[leaf][name] = {"format": fmt.label, "rounding": rounding}
    if isinstance(rule, WeightRule) and rule.extra_field:
        for leaf, extra in named_leaves(getattr(link.state, rule.extra_field)):
            arrays[leaf][rule.extra_field] = {"format": {"dtype": extra.dtype.name}}
    return Entry(rule.name, *settings_of(rule, rule), arrays, passes)


def _tag(formats: Tree) -> list[Slot]:
    """Return the slot of a state's tag, if it has one."""
    return [Slot("tag", tag) for tag, _ in named_leaves(formats)]


def _other(path: str) -> Slot:
    return Slot("other", f"optax/{path}")


def _joined(*parts: str) -> str:
    return "/".join(filter(None, parts))


def _path_of(tree, part) -> str:
    """Return the path to a part of a tree: only the indices of chains."""
    return next((name for name, x in named_leaves(tree, lambda x: x is part) if x is part), "")

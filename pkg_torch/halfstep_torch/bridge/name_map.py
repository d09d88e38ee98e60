"""The mapping from leaves of a Flax or Equinox model to torch parameters, with their layouts."""

import itertools
import math
from collections.abc import Iterable, Mapping, Sequence
from typing import NamedTuple

from torch import Tensor, nn

from halfstep_jax.leaf_calls import Tree
from halfstep_jax.leaves import named_leaves
from halfstep_torch.leaves.names import leaf_names

Shape = tuple[int, ...]

Wanted = dict[str, tuple[str, tuple[int, int] | None]]
"""Parameter and rows (None for all) of each leaf."""
_CALLER = "name_map"
# The four layers of attention in Flax, and in Equinox.
_ATTENTION = (("query", "key", "value", "out"), ("query_proj", "key_proj", "value_proj", "output_proj"))


class Place(NamedTuple):
    """The place of a leaf in a torch model: leaf = parameter[rows].view(split).permute(axes).

    Attributes:
        parameters: the parameters' names, several if a leaf has stacked layers along its first axis.
        split: the parameter's shape with split axes.
        axes: the axes of `split`, in the order of the leaf.
        rows: the start and the end of the parameter's rows, or None for all.
    """

    parameters: tuple[str, ...]
    split: Shape
    axes: tuple[int, ...]
    rows: tuple[int, int] | None = None

    def view(self, tensor: Tensor) -> Tensor:
        """Return the part of a parameter, or of its gradient, in the layout of the leaf."""
        part = tensor if self.rows is None else tensor[self.rows[0] : self.rows[1]]
        return part.view(self.split).permute(self.axes)

    def __str__(self) -> str:
        said = ", ".join(self.parameters)
        said += "" if self.rows is None else f"[{self.rows[0]}:{self.rows[1]}]"
        if self.axes == tuple(range(len(self.axes))):
            return said
        return f"{said} as {'x'.join(map(str, self.split))}, axes {' '.join(map(str, self.axes))}"


class NameMap(dict[str, Place]):
    """The `Place` of every leaf, by its name, with a printed form for review."""

    def __str__(self) -> str:
        width = max(map(len, self), default=0)
        return "\n".join(f"{name:<{width}}  {place}" for name, place in self.items())


class _Unit(NamedTuple):
    """A layer of either model, with its path and its leaves or parameters."""

    path: str
    shapes: dict[str, Shape]
    module: nn.Module | None = None
    members: tuple[str, ...] = ()


def name_map(params: Tree, model: nn.Module, names: Mapping[str, str] | None = None) -> NameMap:
    """Propose a parameter for each leaf. Print and check the result before you use it.

    Supported layers of Flax (linen and nnx) are Dense, DenseGeneral, Conv, Embed, LayerNorm and other norms,
    and attention with split heads. In torch they are Linear, Conv, Embedding, norms, and MultiheadAttention
    or four Linears. Layers stacked along the first axis by `nn.scan` are supported too, and so are the same
    layers of Equinox, which have `weight` in torch's layout. Layers are paired by path, or if exactly one
    layer of each model fits the other. Their order is never used.

    Args:
        params: the tree of weights or their shapes. For Equinox, use `eqx.filter(model, eqx.is_array)`.
        model: the model in torch.
        names: a mapping from layer paths in JAX to torch module paths, such as "Dense_0" to "head", for
            layers that are not found.

    Returns:
        A dict from leaf names to places, for `SourceView`.

    Raises:
        TypeError: if a leaf is not an array.
        ValueError: if a leaf or a parameter is not paired, or fits more than one. The message lists all.

    Example:
        >>> import numpy as np
        >>> params = {"Dense_0": {"kernel": np.ones((3, 2)), "bias": np.ones(2)}}
        >>> print(name_map(params, nn.Linear(3, 2)))
        Dense_0/bias    bias
        Dense_0/kernel  weight as 2x3, axes 1 0

    Source: ours.
    """
    shapes = {name: _shape(name, x) for name, x in named_leaves(params)}
    found = {name: tuple(p.shape) for name, p in model.named_parameters()}
    result = _same_names(shapes, found)
    if len(result) < len(shapes):
        result = _paired(_source_units(shapes), _torch_units(model), dict(names or {}))
    taken = [name for place in result.values() for name in place.parameters]
    left, unused = sorted(set(shapes) - set(result)), sorted(set(found) - set(taken))
    if left or unused:
        raise ValueError(
            f"{_CALLER}: no single place was found for the leaves {', '.join(left) or '(none)'} and the "
            f"parameters {', '.join(unused) or '(none)'}. Pair their layers by names={{'Dense_0': 'head'}}."
        )
    return NameMap(sorted(result.items()))


def _shape(name: str, x: Tree) -> Shape:
    if not hasattr(x, "shape"):
        raise TypeError(
            f"{_CALLER}: the leaf '{name}' is a {type(x).__name__}, no array. "
            "Pass the weights alone: of an Equinox model, eqx.filter(model, eqx.is_array)."
        )
    return tuple(x.shape)


def _same_names(shapes: Mapping[str, Shape], found: Mapping[str, Shape]) -> dict[str, Place]:
    """Return the places of leaves with a parameter's name and its shape, axes of length 1 aside."""
    by_leaf = dict(zip(leaf_names(list(found)), found, strict=True))
    return {
        leaf: Place((by_leaf[leaf],), shape, tuple(range(len(shape))))
        for leaf, shape in shapes.items()
        if leaf in by_leaf and _squeezed(shape) == _squeezed(found[by_leaf[leaf]])
    }


def _squeezed(shape: Shape) -> list[int]:
    return [n for n in shape if n != 1]


def _source_units(shapes: Mapping[str, Shape]) -> list[_Unit]:
    """Return the layers of a model in JAX, with the four layers of attention as one."""
    layers: dict[str, dict[str, Shape]] = {}
    for name, shape in shapes.items():
        path, _, leaf = name.rpartition("/")
        layers.setdefault(path, {})[leaf] = shape
    for path, names in itertools.product(list(layers), _ATTENTION):
        parent, _, last = path.rpartition("/")
        four = [f"{parent}/{one}" if parent else one for one in names]
        if last == names[0] and all(one in layers for one in four):
            parts = {
                f"{key}/{leaf}": shape
                for key, one in zip(names, four, strict=True)
                for leaf, shape in layers[one].items()
            }
            layers[parent] = parts | layers.get(parent, {})
    return [_Unit(path, parts) for path, parts in layers.items()]


def _torch_units(model: nn.Module) -> list[_Unit]:
    """Return the layers of a torch model, and the lists of equal layers as stacks."""
    units, stacks, inside = [], {}, set()
    for path, module in model.named_modules():
        attention = isinstance(module, nn.MultiheadAttention)
        own = {name: tuple(p.shape) for name, p in module.named_parameters(recurse=attention)}
        if not own or module in inside:
            continue
        inside |= set(module.modules()) - {module} if attention else set()
        units.append(_Unit(path, own, module, (path,)))
        parts = path.split(".")
        numbers = [i for i, part in enumerate(parts) if part.isdigit()]
        for i in numbers[:1]:
            stack = ".".join(parts[:i] + parts[i + 1 :])
            stacks.setdefault(stack, []).append(units[-1])
    for path, members in stacks.items():
        if len(members) > 1 and all(unit.shapes == members[0].shapes for unit in members):
            paths = tuple(unit.path for unit in members)
            units.append(_Unit(path, members[0].shapes, members[0].module, paths))
    return units


def _paired(sources: list[_Unit], torches: list[_Unit], names: dict[str, str]) -> dict[str, Place]:
    """Return the places of the leaves in all layers that pair in exactly one way."""
    fits = {
        (i, j): places
        for i, ours in enumerate(sources)
        for j, theirs in enumerate(torches)
        if (places := _fit(ours, theirs)) is not None and names.get(ours.path, theirs.path) == theirs.path
    }
    result: dict[str, Place] = {}
    while fits:
        chosen = next((pair for pair in fits if _alike(sources[pair[0]], torches[pair[1]], names)), None)
        chosen = chosen or next((pair for pair in fits if _only(pair, fits)), None)
        if chosen is None:
            break
        result |= fits[chosen]
        leaves, members = set(fits[chosen]), set(torches[chosen[1]].members)
        fits = {
            (i, j): places
            for (i, j), places in fits.items()
            if not leaves & set(places) and not members & set(torches[j].members)
        }
    return result


def _alike(ours: _Unit, theirs: _Unit, names: Mapping[str, str]) -> bool:
    return ours.path in names or ours.path.replace("/", ".").lower() == theirs.path.lower()


def _only(pair: tuple[int, int], fits: Iterable[tuple[int, int]]) -> bool:
    """Whether two layers fit each other and no other layer."""
    return not any((i == pair[0]) != (j == pair[1]) for i, j in fits)


def _fit(ours: _Unit, theirs: _Unit) -> dict[str, Place] | None:
    """Return the places of a layer's leaves in a torch module, or None if they do not fit."""
    count, shapes = len(theirs.members), ours.shapes
    if count > 1:
        if any(not shape or shape[0] != count for shape in shapes.values()):
            return None
        shapes = {leaf: shape[1:] for leaf, shape in shapes.items()}
    wanted = _wanted(theirs.module, set(shapes))
    if wanted is None or {name for name, _ in wanted.values()} != set(theirs.shapes):
        return None
    places = {}
    for leaf, (parameter, rows) in wanted.items():
        shape = theirs.shapes[parameter]
        due = shape if rows is None else (rows[1] - rows[0], *shape[1:])
        found = _layout(leaf, shapes[leaf], due)
        if found is None:
            return None
        paths = tuple(f"{path}.{parameter}" if path else parameter for path in theirs.members)
        places[f"{ours.path}/{leaf}" if ours.path else leaf] = Place(paths, *found, rows)
    return places


def _wanted(module: nn.Module | None, leaves: set[str]) -> Wanted | None:
    """Return the torch parameter and its rows for each leaf of a layer, or None."""
    if isinstance(module, nn.MultiheadAttention):
        wanted = {} if module.in_proj_weight is None else _wanted_of_attention(module.embed_dim)
    else:
        first = "embedding" if isinstance(module, nn.Embedding) else "kernel"
        known = isinstance(module, (nn.Linear, nn.Conv1d, nn.Conv2d, nn.Conv3d, nn.Embedding))
        first = first if known else "scale"
        wanted = {name: ("weight", None) for name in (first, "weight")} | {"bias": ("bias", None)}
    return {leaf: wanted[leaf] for leaf in leaves} if leaves <= set(wanted) else None


def _wanted_of_attention(size: int) -> Wanted:
    """Return the same for torch's attention, with the names of either framework."""
    wanted: Wanted = {}
    for i, part in itertools.product(range(4), range(len(_ATTENTION))):
        name, rows = _ATTENTION[part][i], (i * size, (i + 1) * size)
        weight, bias = ("in_proj_weight", rows), ("in_proj_bias", rows)
        if i == 3:
            weight, bias = ("out_proj.weight", None), ("out_proj.bias", None)
        wanted |= {f"{name}/kernel": weight, f"{name}/weight": weight, f"{name}/bias": bias}
    return wanted


def _layout(name: str, leaf: Shape, parameter: Sequence[int]) -> tuple[Shape, tuple[int, ...]] | None:
    """Return the split and the permutation that turn a parameter's axes into a leaf's, or None."""
    n = len(leaf)
    if name == "embedding" or name.rpartition("/")[2] == "weight":
        # As in torch.
        return (leaf, tuple(range(n))) if leaf == tuple(parameter) else None
    if len(parameter) == 1:
        # A vector; the bias of split heads.
        return (leaf, tuple(range(n))) if math.prod(leaf) == parameter[0] else None
    if len(parameter) > 2:
        # Kernel axes, inputs, outputs.
        axes = (*range(2, len(parameter)), 1, 0)
        return (tuple(parameter), axes) if leaf == tuple(parameter[i] for i in axes) else None
    outputs, inputs = parameter[0], parameter[1]
    found = set()
    for k in range(1, n):
        # The first k axes are inputs.
        if math.prod(leaf[:k]) == inputs and math.prod(leaf[k:]) == outputs:
            found.add(((*leaf[k:], *leaf[:k]), (*range(n - k, n), *range(n - k))))
    return found.pop() if len(found) == 1 else None

"""What an optimizer really does to each parameter: formats, roundings, storage and bytes, and why.

A format that was asked for is not what every parameter gets: small arrays stay in float32, and float32
weights need no storage.
"""

import dataclasses
import math
from collections.abc import Sequence
from typing import Any

from torch import Tensor

from halfstep.rule import declared
from halfstep.storage.formats import Format
from halfstep.text_table import text_table
from halfstep_torch.distributed.shards import window_here
from halfstep_torch.engine.plan import Plan
from halfstep_torch.link import Link
from halfstep_torch.numbers.float_formats import dtype_name
from halfstep_torch.optimizer import Optimizer, check_optimizer
from halfstep_torch.sharded.slots import state_placements

STEP_BYTES = 8
"""The count of a parameter, an int64."""


@dataclasses.dataclass(frozen=True)
class MomentDescription:
    """How one moment of a parameter is kept.

    Attributes:
        format: of its codes.
        rounding: "stochastic", "nearest", or "exact" where nothing is rounded.
        why: it has another format than was asked for; "" where it has that.
    """

    format: str
    rounding: str
    why: str = ""


@dataclasses.dataclass(frozen=True)
class LeafDescription:
    """What is done to one parameter.

    Attributes:
        name: of the parameter: the leaf name.
        group: index of its param group.
        shape: of the parameter.
        dtype: of the weights.
        storage: how they are stored, by the name of the link that does it; "nearest" where none does.
        moments: how each is kept, by its key in the state.
        state_bytes: of all state of the parameter.
        state_bytes_here: of what this process has of it; less where the parameter is a DTensor.
        why: weights are not stored as was asked for; "" where they are.
    """

    name: str
    group: int
    shape: tuple[int, ...]
    dtype: str
    storage: str
    moments: dict[str, MomentDescription]
    state_bytes: int
    state_bytes_here: int
    why: str = ""


@dataclasses.dataclass(frozen=True)
class Description:
    """What `describe` returns; `print` shows it as a table.

    Attributes:
        leaves: a description of each parameter, in the optimizer's order.
    """

    leaves: tuple[LeafDescription, ...]

    def __str__(self) -> str:
        cut = any(leaf.state_bytes_here != leaf.state_bytes for leaf in self.leaves)
        head = ("parameter", "shape", "weight", "state bytes", *(["here"] if cut else []), "moments")
        rows: list[tuple[str, ...]] = []
        for leaf in self.leaves:
            kept = [f"{key} {moment.format}, {moment.rounding}" for key, moment in leaf.moments.items()]
            reasons = dict.fromkeys(
                filter(None, (leaf.why, *(moment.why for moment in leaf.moments.values())))
            )
            why = f" ({'; '.join(reasons)})" if reasons else ""
            weight = leaf.dtype if leaf.dtype == "float32" else f"{leaf.dtype}, {leaf.storage}"
            rows.append(
                (
                    leaf.name,
                    str(leaf.shape),
                    weight,
                    f"{leaf.state_bytes:,}",
                    *([f"{leaf.state_bytes_here:,}"] if cut else []),
                    f"{'; '.join(kept) or '-'}{why}",
                )
            )
        return text_table(head, rows, right={3, 4} if cut else {3})


def describe(optimizer: Optimizer) -> Description:
    """Return what every parameter really gets: formats, roundings, weight storage, bytes, and why.

    Nothing is changed, and the optimizer may be fresh: state is described as the next step will have it.

    Args:
        optimizer: of this package.

    Example:
        >>> import torch, halfstep_torch as hs
        >>> model = torch.nn.Linear(256, 64, dtype=torch.bfloat16)
        >>> optimizer = hs.AdamW(model.named_parameters(), nu_dtype=hs.scaled("ufloat8_e5m3"))
        >>> for leaf in describe(optimizer).leaves:
        ...     print(leaf.name, leaf.moments["exp_avg_sq"].format, leaf.moments["exp_avg_sq"].why)
        weight ufloat8_e5m3, blocks of 128
        bias float32 64 elements are fewer than min_size=4096

    Source: ours.
    """
    check_optimizer("describe", optimizer)
    links = optimizer.bound_links()
    groups = (i for i, group in enumerate(optimizer.param_groups) for _ in group["params"])
    leaves = zip(groups, optimizer.plans(), strict=True)
    return Description(tuple(_leaf(optimizer, i, links[i], *planned) for i, planned in leaves))


def state_bytes(optimizer: Optimizer, param: Any, plan: Plan) -> tuple[int, int]:
    """Return the bytes of all state of a parameter, its count included, and of that in this process.

    Of a frozen parameter 0.
    """
    if is_frozen(optimizer, param):
        return 0, 0
    shapes = {key: array.shape(tuple(param.shape)) for key, array in plan.arrays.items()}
    placed = state_placements(plan, param)
    windows = {key: window_here(shapes[key], param.device_mesh, placed[key]) for key in placed}
    here = {key: windows[key].shape if placed else shape for key, shape in shapes.items()}
    total, local = (
        STEP_BYTES + sum(math.prod(of_key[key]) * plan.arrays[key].dtype.itemsize for key in of_key)
        for of_key in (shapes, here)
    )
    return total, local


def is_frozen(optimizer: Optimizer, param: Tensor) -> bool:
    """Whether a parameter gets no gradient, and never got state."""
    return not param.requires_grad and param.grad is None and not optimizer.state.get(param)


def _leaf(
    optimizer: Optimizer,
    group: int,
    links: Sequence[tuple[Any, Any]],
    name: str,
    param: Tensor,
    plan: Plan,
) -> LeafDescription:
    shape, dtype, asked = tuple(param.shape), dtype_name(param.dtype), links[-1][0] if links else None
    storage = plan.weights.rule.name
    unused = asked.name if dtype == "float32" and asked is not None and asked.last else ""
    moments, frozen = {}, is_frozen(optimizer, param)
    total, here = state_bytes(optimizer, param, plan)
    for rule, index in () if frozen else zip(plan.rules, plan.rule_indices, strict=True):
        link, h = links[index]
        for moment in rule.moments:
            moments[moment.key] = _moment(moment, _asked_format(link, h, moment.name), shape)
    return LeafDescription(
        name=name,
        group=group,
        shape=shape,
        dtype=dtype,
        storage="nearest" if storage == "nearest_weights" else storage,
        moments=moments,
        state_bytes=total,
        state_bytes_here=here,
        why="requires_grad is False" if frozen else f"float32 weights need no {unused}" if unused else "",
    )


def _asked_format(link: Link, h: Any, name: str) -> Format | None:
    """Return the format that was asked for; None for the default."""
    asked = getattr(link, "format", None)
    if isinstance(asked, Format):
        return asked
    dtype = declared(type(link.rule)).moments[name].dtype
    return getattr(h, dtype) if dtype else None


def _moment(moment: Any, asked: Format | None, shape: tuple[int, ...]) -> MomentDescription:
    stored = moment.again or moment
    fmt: Format = stored.format
    rounding = stored.rounding if fmt.rounds else "exact"
    array = stored.arrays[stored.key]
    why = asked.too_small(array.values_shape(shape)) if asked is not None and not fmt.scaled else ""
    return MomentDescription(fmt.text, rounding, why)

"""The checks that parameters have memory, and that no two of them overlap."""

from collections.abc import Iterable
from typing import NamedTuple

import torch
from torch import Tensor

from halfstep_torch.distributed.shards import local_part


def check_memory(caller: str, named: Iterable[tuple[str, Tensor]]) -> None:
    """Raise ValueError if two weights share memory, because one update would be lost."""
    before: list[_Stretch] = []
    here = ((name, local_part(param)) for name, param in named)
    stretches = [_stretch(name, param) for name, param in here if param.numel() and has_memory(param)]
    for stretch in sorted(stretches, key=lambda x: (x.device, x.start)):
        before = [other for other in before if other.device == stretch.device and stretch.start < other.end]
        for other in before:
            if _overlap(other, stretch):
                raise ValueError(
                    f"{caller}: the weights {other.name!r} and {stretch.name!r} share memory, and one of "
                    "their updates would be lost. Pass one of them, or a clone."
                )
        before.append(stretch)


def is_other_view(grad: Tensor, param: Tensor) -> bool:
    """Whether a gradient is another view of its weight's memory, as after `p.grad = p.t()`."""
    distance = grad.data_ptr() - param.data_ptr()
    return abs(distance) < param.nbytes and bool(distance or grad.stride() != param.stride())


class _Stretch(NamedTuple):
    """The memory from the first element of a weight to its last.

    Attributes:
        device: the device of the weight.
        start: the address of its first byte.
        end: the address after its last byte.
        name: the name of the weight.
        layout: shape and strides in bytes, with an axis for the bytes of an element, or None without gaps.
    """

    device: str
    start: int
    end: int
    name: str
    layout: tuple[tuple[int, ...], tuple[int, ...]] | None


def has_memory(param: Tensor) -> bool:
    """Whether a tensor has memory, unlike on the meta device or under FakeTensorMode."""
    return param.device.type != "meta" and not hasattr(param, "fake_mode")


def _stretch(name: str, param: Tensor) -> _Stretch:
    itemsize, start = param.element_size(), param.data_ptr()
    shape, strides = (*param.shape, itemsize), (*(stride * itemsize for stride in param.stride()), 1)
    extent = 1 + sum((size - 1) * stride for size, stride in zip(shape, strides, strict=True))
    has_gaps = extent != param.numel() * itemsize
    return _Stretch(str(param.device), start, start + extent, name, (shape, strides) if has_gaps else None)


def _overlap(a: _Stretch, b: _Stretch) -> bool:
    """Whether two overlapping stretches share a byte, because strided weights may interleave."""
    if a.layout is b.layout is None:
        return True
    taken = torch.zeros(max(a.end, b.end) - a.start, dtype=torch.bool, device="cpu")
    views = [taken.as_strided(*(x.layout or ((x.end - x.start,), (1,))), x.start - a.start) for x in (a, b)]
    views[0].fill_(True)
    return bool(views[1].any())

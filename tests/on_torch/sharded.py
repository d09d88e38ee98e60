"""Parameters and steps on meshes, and the same ones in one process, whose bits they must have."""

import contextlib
import functools
import unittest.mock
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor, init_device_mesh

import halfstep_torch as hs

# Long and short rows, whole and short blocks, axes shorter than the mesh, a vector, a convolution, a number.
SHAPES = {
    "matrix": (64, 96),
    "narrow": (156, 64),
    "short": (7,),
    "wide": (5, 130),
    "few_rows": (3, 2000),
    "uneven": (19, 512),
    "convolution": (40, 16, 3, 3),
    "vector": (4500,),
    "long_rows": (64, 256),
    "number": (),
}
RECIPES: dict[str, dict[str, Any]] = {
    "default": {},
    "one_pass": dict(hs.recipes.one_pass),
    "compensated": {"param_storage": "compensated"},
    "split16": {"param_storage": "split16"},
    "split8": {"param_storage": "split8"},
    "master": {"param_storage": "master"},
    "eight_bit": dict(hs.recipes.eight_bit),
    "fed_back": {"recipe": "eight_bit", "param_storage": "feedback"},
    "four_bit": dict(hs.recipes.four_bit),
    "float8": {"mu_dtype": hs.scaled("float8_e4m3fn"), "nu_dtype": hs.scaled("ufloat8_e5m3")},
    # Each row a block, which a border along it cuts; rows of blocks of two sizes, in units of each other.
    "whole_rows": {
        "mu_dtype": hs.scaled("int8", block_size="row", min_size=0),
        "nu_dtype": hs.scaled("uroot8", block_size="row", min_size=0),
    },
    "units": {
        "mu_dtype": hs.relative("int4", 32, min_size=0),
        "nu_dtype": hs.scaled("uroot8", 128, min_size=0, min_ndim=0),
    },
    # Of four processes with 16 columns each of 64 the last one has a whole block, the others pieces of one.
    "short_ends": {"mu_dtype": hs.scaled("int8", 48, min_size=0)},
    "row": {
        "mu_dtype": hs.scaled("int8", block_size="row"),
        "nu_dtype": hs.scaled("float16", block_size=None),
    },
}
Tensors = dict[str, torch.Tensor]


def layouts() -> Iterator[tuple[str, Any, Callable[[torch.Tensor], DTensor]]]:
    """Yield (name, mesh, what makes a DTensor of a tensor) for the processes that there are."""
    count = dist.get_world_size()
    line = init_device_mesh("cpu", (count,))
    rows, columns, all_of_it = (functools.partial(_cut, axis=axis) for axis in (0, 1, None))
    yield "Shard(0)", line, functools.partial(_placed, line, [rows])
    yield "Shard(1)", line, functools.partial(_placed, line, [columns])
    yield "Replicate", line, functools.partial(_placed, line, [all_of_it])
    if count == 4:
        square = init_device_mesh("cpu", (2, 2))
        yield "2-D", square, functools.partial(_placed, square, [rows, columns])
        yield "one axis twice", square, functools.partial(_placed, square, [rows, rows])
        yield "HSDP", square, functools.partial(_placed, square, [all_of_it, rows])


def _placed(mesh: Any, cuts: Sequence[Callable[[torch.Tensor], Any]], x: torch.Tensor) -> DTensor:
    return shard(x, mesh, [cut(x) for cut in cuts])


def _cut(x: torch.Tensor, axis: int | None) -> Any:
    return Replicate() if axis is None or not x.dim() else Shard(min(axis, x.dim() - 1))


def weights(dtype: torch.dtype = torch.bfloat16) -> Tensors:
    return _normal(0, 0.05, dtype)


def gradients(step: int) -> Tensors:
    return _normal(100 + step, 1.0, torch.bfloat16)


def _normal(seed: int, scale: float, dtype: torch.dtype) -> Tensors:
    generator = torch.Generator().manual_seed(seed)
    return {
        name: (torch.randn(shape, generator=generator) * scale).to(dtype) for name, shape in SHAPES.items()
    }


def shard(x: torch.Tensor, mesh: Any, placements: Any) -> DTensor:
    """Return what every process has as a DTensor, each of its own copy, with no word exchanged."""
    return distribute_tensor(x, mesh, placements, src_data_rank=None)


class Run:
    """Some steps of an optimizer: in one process, or on a mesh."""

    def __init__(
        self,
        make: Callable[..., hs.Optimizer],
        place: Callable = lambda x: x,
        dtype: torch.dtype = torch.bfloat16,
    ):
        self._place, self._dtype = place, dtype
        self.params = {name: torch.nn.Parameter(place(x)) for name, x in weights(dtype).items()}
        self.optimizer = make(list(self.params.items()))

    def steps(self, first: int, last: int) -> "Run":
        for t in range(first, last + 1):
            for name, grad in gradients(t).items():
                self.params[name].grad = self._place(grad.to(self._dtype))
            self.optimizer.step()
        return self

    def state(self, name: str) -> Mapping[str, Any]:
        return self.optimizer.state[self.params[name]]


class Holder(torch.nn.Module):
    """The parameters of a run as a model."""

    def __init__(self, run: Run):
        super().__init__()
        for name, param in run.params.items():
            self.register_parameter(name, param)


def assert_meshes_change_no_bit(make: Callable[..., hs.Optimizer], steps: int, what: str) -> None:
    """Compare some steps on every layout with those of one process."""
    expected = Run(make).steps(1, steps)
    for layout, _, place in layouts():
        assert_same_bits(Run(make, place).steps(1, steps), expected, f"{what}, {layout}")


def assert_same_bits(run: Run, expected: Run, what: str) -> None:
    """Compare weights and every state array here with torch's own cut of those of one process."""
    for name, param in run.params.items():
        pairs = {"weight": (param.detach(), expected.params[name].detach())}
        state, wanted = run.state(name), expected.state(name)
        assert state.keys() == wanted.keys(), f"{what}: {name}"
        pairs.update({key: (state[key], wanted[key]) for key in wanted})
        for key, (x, whole) in pairs.items():
            if isinstance(x, DTensor):
                assert (x.shape, x.stride()) == (whole.shape, whole.stride()), f"{what}: {key} of {name}"
                here = shard(whole, x.device_mesh, x.placements).to_local()
                assert same_bits(x.to_local(), here), f"{what}: {key} of {name}"
            else:
                assert same_bits(x, whole), f"{what}: {key} of {name}"


def same_bits(x: torch.Tensor, y: torch.Tensor) -> bool:
    if x.dtype != y.dtype or x.shape != y.shape:
        return False
    x, y = (z.detach().contiguous().reshape(-1).view(torch.uint8) for z in (x, y))
    return torch.equal(x, y)


@contextlib.contextmanager
def counted() -> Iterator[list[str]]:
    """Note every collective of this process."""
    names, calls = ("all_reduce", "all_gather", "all_to_all_single"), []

    def noted(name: str, collective: Callable) -> Callable:
        def call(*args: Any, **kwargs: Any) -> Any:
            calls.append(name)
            return collective(*args, **kwargs)

        return call

    with contextlib.ExitStack() as stack:
        for name in names:
            collective = noted(name, getattr(torch.distributed, name))
            stack.enter_context(unittest.mock.patch.object(torch.distributed, name, collective))
        yield calls

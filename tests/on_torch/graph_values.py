"""The values of a graph, by PyTorch's own operations: what every generated kernel must compute."""

import operator

import torch
from torch import Tensor

from halfstep.kernels.graph import ROWS, Graph, Node
from halfstep_torch.engine.batches import measure
from halfstep_torch.engine.kernels.kernel import kernel_of
from halfstep_torch.engine.number_places import number_places
from halfstep_torch.engine.step_numbers import attach_numbers
from halfstep_torch.launch import Launch

_INFIX = {
    "add": operator.add, "sub": operator.sub, "mul": operator.mul, "div": operator.truediv,
    "neg": operator.neg, "abs": abs, "floor": torch.floor, "round": torch.round, "sign": torch.sign,
    "and": operator.and_,
    "or": operator.or_, "xor": operator.xor, "not": operator.invert, "shl": operator.lshift,
    "shr": operator.rshift, "eq": operator.eq, "ne": operator.ne, "lt": operator.lt, "le": operator.le,
    "gt": operator.gt, "ge": operator.ge, "where": torch.where, "take": operator.getitem,
    "sqrt": lambda x: x.double().sqrt().float(), "lsr": lambda x, by: (x >> by) & ((1 << (32 - by)) - 1),
    "minimum": lambda x, y: torch.minimum(*_tensors(x, y)),
    "maximum": lambda x, y: torch.maximum(*_tensors(x, y)),
    "pack4": lambda x: x[..., ::2] | (x[..., 1::2] << 4),
    "unpack4": lambda x: torch.stack([x & 15, x >> 4], -1).flatten(-2),
}  # fmt: skip


def _tensors(x, y) -> tuple[Tensor, Tensor]:
    like = x if isinstance(x, Tensor) else y
    x, y = (a if isinstance(a, Tensor) else torch.tensor(a, dtype=like.dtype) for a in (x, y))
    return x, y


def values(graph: Graph, inputs: dict[str, Tensor]) -> dict[str, Tensor]:
    """Return the outputs of a graph for inputs of any number of rows."""
    rows, known = len(inputs["p"]), {}

    def shape(node: Node) -> list[int]:
        return [n // ROWS * rows if i == 0 else n for i, n in enumerate(node.shape)]

    for node in graph.nodes:
        args = [known[x] if isinstance(x, Node) else x for x in node.args]
        if node.op == "input":
            name, *size = args[0].split(".")
            firsts = inputs["index"].reshape(-1, int(size[0]))[:, :1] if name == "first" else None
            result = inputs[args[0]] if firsts is None else firsts.reshape(shape(node))
        elif node.op in ("const", "table"):
            result = torch.tensor(args[0], dtype=getattr(torch, node.dtype))
        elif node.op == "cast":
            result = args[0].to(getattr(torch, node.dtype))
        elif node.op == "bitcast":
            result = args[0].view(getattr(torch, node.dtype))
        elif node.op == "view":
            result = args[0].reshape(shape(node))
        elif node.op == "expand":
            result = args[0].expand(shape(node))
        elif node.op in ("amax", "any"):
            result = getattr(args[0], node.op)(node.axes if node.op == "amax" else node.axes[0], keepdim=True)
        else:
            result = _INFIX[node.op](*args)
        known[node] = result
    return {name: known[node] for name, node in graph.outputs.items()}


def stages_of(optimizer):
    """Yield the elementwise stages of a step, the places and values of their numbers, and what comes in."""
    launch = Launch(optimizer, list(optimizer._named()))
    attach_numbers(launch.batches, measure(launch.batches), {})
    for batch in launch.batches:
        for k, stage in enumerate(batch.plan.padded_stages):
            numbers, *_ = batch.stage_numbers(k).values()
            if stage.scope == "elementwise":
                yield stage, number_places(tuple(numbers)), numbers, torch.float32 if k else batch.grad_dtype


def kernels_of(optimizer):
    """Return the kernels of a step, built."""
    made = [kernel_of(stage, places, g, torch.device("cpu")) for stage, places, _, g in stages_of(optimizer)]
    assert all(kernel.is_ready(wait=True) for kernel in made), [kernel.problem for kernel in made]
    return made

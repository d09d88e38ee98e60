"""Tracing of a stage. `Stage.run` runs once on tensors without memory, and each operation becomes a node."""

import dataclasses
from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from halfstep.hyperparameters import Values
from halfstep.kernels.graph import ROWS, SUMS, Graph, RowArray
from halfstep_torch.engine.kernels.tracer import Tracer, dtype_name
from halfstep_torch.engine.number_places import flat, unflat
from halfstep_torch.engine.scaling import SCALED, WEIGHTS
from halfstep_torch.engine.stage import Stage


def trace(stage: Stage, places: Values, grad_dtype: torch.dtype) -> Graph:
    """Return the graph of an elementwise stage, which takes 20 to 150 ms.

    Args:
        stage: a stage with whole blocks only, as from `Stage.padded`.
        places: the places of its numbers, from `number_places`.
        grad_dtype: the dtype of the gradient, or float32 for the update of an earlier stage.

    Raises:
        NoGeneratedForm: for an operation that the tracer does not support.
    """
    tracer, width = Tracer(), stage.width

    def given(name: str, shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
        x = torch.empty(shape, dtype=dtype, device="meta")
        tracer.set(x, tracer.node("input", (name,), x))
        return x

    p, g = given("p", (ROWS, width), stage.dtype), given("g", (ROWS, width), grad_dtype)
    state = {}
    for name, spec in stage.arrays.items():
        size = spec.size(width)
        state[name] = given(name, (ROWS * size,) if spec.scale_of is not None else (ROWS, size), spec.dtype)
    numbers = [given(f"number.{i}", (), torch.float32) for i in range(len(flat(places)))]
    keys = [given(f"key.{i}", (), torch.int32) for i in range(sum(1 + len(roles) for roles in stage.roles))]
    index = given("index", (ROWS, width), torch.int32)
    with tracer:
        out, new = stage.run(p, g, state, unflat(places, numbers), stage.row_words(lambda: index, keys))
        outputs = {"p" if stage.applies else "u": tracer.of(out)}
        outputs |= {
            name: tracer.cast(tracer.of(array), dtype_name(state[name].dtype) if name in state else "float32")
            for name, array in new.items()
        }
    cuts = tuple(blocks.size for blocks in stage.blocks)
    memory = _memory(stage, grad_dtype)
    second, late = _second_keys(stage.roles), _late(stage, places)
    return Graph(tracer.nodes, outputs, memory, cuts, width, len(numbers), len(keys), second, late=late)


def _late(stage: Stage, places: Values) -> range:
    """Return the places of numbers written by another kernel, for `SCALED` or a link that measures."""
    found = range(0)
    for rule, of_rule in zip(stage.rules, places, strict=False):
        if names := getattr(rule.rule, "late", ()):
            at = [getattr(of_rule, name) for name in names]
            found = range(at[0], at[-1] + 1)
            if rule is SCALED:
                break
    return found


def measured(graph: Graph, sums: str) -> Graph:
    """Return the graph of a stage that computes only sums of its update, of one kind (`SUMS`)."""
    outputs = {"norm.u": graph.outputs["u"]}
    if WEIGHTS in graph.outputs:
        outputs["norm.p"] = graph.outputs[WEIGHTS]
    p, g, _, *state = graph.memory
    memory = p, g, *(RowArray(name, "float32") for name in outputs), *state
    numbers = graph.numbers + (len(outputs) if SUMS[sums].has_units else 0)
    return dataclasses.replace(graph, outputs=outputs, memory=memory, numbers=numbers, sums=sums)


def _memory(stage: Stage, grad_dtype: torch.dtype) -> tuple[RowArray, ...]:
    """Return the arrays of a parameter, in the order of a kernel's table."""
    arrays = [RowArray("p", dtype_name(stage.dtype)), RowArray("g", dtype_name(grad_dtype))]
    if not stage.applies:
        arrays.append(RowArray("u", "float32"))
    for name, spec in stage.arrays.items():
        form = ("element", 1)
        if spec.scale_of is not None:
            form = ("scale", stage.width // spec.size(stage.width))
        elif spec.packed_of is not None:
            form = ("packed", 2)
        arrays.append(RowArray(name, dtype_name(spec.dtype), *form))
    return tuple(arrays)


def _second_keys(streams: Sequence[Sequence[int]]) -> frozenset[int]:
    """Return the columns of keys that are a k1, given the roles of each stream."""
    seconds, place = set(), 0
    for roles in streams:
        seconds |= set(range(place + 1, place + 1 + len(roles)))
        place += 1 + len(roles)
    return frozenset(seconds)


def traced(
    function: Callable[[dict[str, Tensor]], Sequence[Tensor]],
    given: dict[str, tuple[tuple[int, ...], torch.dtype]],
) -> Graph:
    """Return the graph of a function of tensors, given the shapes and dtypes of its inputs.

    Outputs are named by their place. The function reads no array of a parameter.
    """
    tracer = Tracer()
    inputs = {name: torch.empty(shape, dtype=dtype, device="meta") for name, (shape, dtype) in given.items()}
    for name, x in inputs.items():
        tracer.set(x, tracer.node("input", (name,), x))
    with tracer:
        made = function(inputs)
    outputs = {str(i): tracer.of(x) for i, x in enumerate(made)}
    return Graph(tracer.nodes, outputs, (), (), 1, 0, 0, frozenset())

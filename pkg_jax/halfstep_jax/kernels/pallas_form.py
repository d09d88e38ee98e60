"""The step of a leaf by Pallas, for NVIDIA's GPUs: XLA compiles one kernel for all leaves of one size.

The grid is the same for all leaves, and their keys are operands. So kernels are equal, and XLA compiles equal
kernels once.
"""

import functools
import importlib
import operator
from collections.abc import Callable, Sequence

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from halfstep.kernels.graph import Graph, Node
from halfstep_jax.kernels.program import Program
from halfstep_jax.leaf_calls import Traced
from halfstep_jax.numbers.roots import corrected_quotient, corrected_root

_BLOCK, PROGRAMS = 1024, 1056
"""Elements that a program steps at once, and programs: 8 for each multiprocessor of an H100."""
_DTYPES = ("bool", "int32", "float32", "bfloat16", "float16", "uint8", "uint16", "int8")


def missing_form(graph: Graph) -> str:
    """Return why Pallas has no form of a graph, or ""."""
    if graph.cuts:
        return "blocks that share a scale"
    for node in graph.nodes:
        if node.op not in (*_FUNCTIONS, "input", "const", "cast", "bitcast", "view", "expand"):
            return node.op
        if node.dtype not in _DTYPES:
            return node.dtype
    return ""


def step_leaf(
    program: Program,
    graph: Graph,
    n: int,
    zero: jax.Array,
    keys: jax.Array,
    numbers: jax.Array,
    arrays: Sequence[jax.Array],
    *,
    programs: int = PROGRAMS,
    interpret: bool = False,
) -> list[jax.Array]:
    """Return the results of a program for one leaf.

    Args:
        program: of the leaf.
        graph: of the program.
        n: elements of the leaf.
        zero: an opaque zero, uint32[1].
        keys: the keys of the leaf, uint32.
        numbers: float32.
        arrays: of the program, flat.
        programs: of the kernel.
        interpret: compute the kernel by XLA, for a test.
    """
    pallas, triton = (importlib.import_module(f"jax.experimental.{x}") for x in ("pallas", "pallas.triton"))
    places = {row.name: i for i, row in enumerate(program.arrays)}
    rows = [row for _, _, row in program.results]
    given = [jnp.full(1, n, jnp.int32), _as_int32(zero), _as_int32(keys), numbers]
    whole = pallas.BlockSpec(memory_space=pallas.ANY)
    call = pallas.pallas_call(
        functools.partial(_kernel, program, graph, programs, pallas, triton),
        out_shape=[jax.ShapeDtypeStruct((n,), row.dtype) for row in rows],
        grid=(programs,),
        in_specs=[whole] * (len(given) + len(arrays)),
        out_specs=[whole] * len(rows),
        input_output_aliases={
            len(given) + places[row.name]: i for i, row in enumerate(rows) if row.name in places
        },
        compiler_params=triton.CompilerParams(num_warps=4, num_stages=1),
        interpret=interpret,
        name="halfstep_step",
    )
    return call(*given, *arrays)


def _as_int32(x: jax.Array) -> jax.Array:
    return lax.bitcast_convert_type(x, jnp.int32)


def _kernel(
    program: Program, graph: Graph, programs: int, pallas: Traced, triton: Traced, *refs: Traced
) -> None:
    """Step the blocks of this program: first the whole ones, with wide loads, then the last one."""
    size, zero, keys, numbers, *arrays = refs
    inputs, outputs = arrays[: len(program.arrays)], arrays[len(program.arrays) :]
    n, zero = size[0], zero[0]
    shared = {f"key.{i}": keys[i] for i in range(graph.keys)}
    shared |= {f"number.{i}": numbers[i] for i in range(graph.numbers)}

    def step(block: jax.Array, *, is_whole: bool) -> jax.Array:
        start = block * _BLOCK
        index = start + jnp.arange(_BLOCK, dtype=jnp.int32)
        here, mask = pallas.ds(start, _BLOCK), None if is_whole else index < n
        read = {
            row.name: triton.load(
                ref.at[here], mask=mask, other=None if is_whole else jnp.zeros((), ref.dtype)
            )
            for row, ref in zip(program.arrays, inputs, strict=True)
        }
        made = _values(graph, shared | read | {"index": index}, zero)
        for (_, _, row), ref in zip(program.results, outputs, strict=True):
            triton.store(ref.at[here], jnp.broadcast_to(made[row.name], (_BLOCK,)), mask=mask)
        return block + programs

    whole, blocks = n // _BLOCK, (n + _BLOCK - 1) // _BLOCK
    block = lax.while_loop(
        lambda block: block < whole, functools.partial(step, is_whole=True), pallas.program_id(0)
    )
    lax.while_loop(lambda block: block < blocks, functools.partial(step, is_whole=False), block)


def _values(graph: Graph, given: dict[str, jax.Array], zero: jax.Array) -> dict[str, jax.Array]:
    """Return the outputs of a graph. A product that a sum reads is ORed with a zero, or they were fused."""
    values: dict[int, jax.Array] = {}
    sums = [node for node in graph.nodes if node.op in ("add", "sub")]
    summed = {id(x) for node in sums for x in node.operands if x.op == "mul" and x.dtype == "float32"}

    def operand(x: Node | float, dtype: str) -> jax.Array:
        return (
            values[id(x)] if isinstance(x, Node) else lax.full((), np.asarray(x).astype(dtype).item(), dtype)
        )

    for node in graph.nodes:
        first = node.operands[0] if node.operands else node
        if node.op == "input":
            value = given[node.args[0]]
        elif node.op == "const":
            value = operand(node.args[0], node.dtype)
        elif node.op in ("view", "expand"):
            value = values[id(first)]
        elif node.op == "cast":
            value = values[id(first)].astype(node.dtype)
        elif node.op == "bitcast":
            value = lax.bitcast_convert_type(values[id(first)], jnp.dtype(node.dtype))
        else:
            dtypes = (
                ["bool", node.dtype, node.dtype] if node.op == "where" else [first.dtype] * len(node.args)
            )
            operands = [operand(x, dtype) for x, dtype in zip(node.args, dtypes, strict=True)]
            shape = jnp.broadcast_shapes(*(x.shape for x in operands))
            value = _FUNCTIONS[node.op](*(jnp.broadcast_to(x, shape) for x in operands))
        if id(node) in summed:
            value = lax.bitcast_convert_type(_as_int32(value) | zero, jnp.float32)
        values[id(node)] = value
    return {name: values[id(node)] for name, node in graph.outputs.items()}


def _chosen(is_first: Callable) -> Callable:
    """Return the function of the smaller or the larger number; NaN passes through."""

    def choose(x: jax.Array, y: jax.Array) -> jax.Array:
        return jnp.where(x != x, x, jnp.where(is_first(x, y), x, y))

    return choose


_FUNCTIONS: dict[str, Callable] = {
    **{name: getattr(lax, name) for name in ("add", "sub", "mul", "neg", "abs")},
    **{name: getattr(operator, name) for name in ("eq", "ne", "lt", "le", "gt", "ge", "xor")},
    "and": operator.and_, "or": operator.or_, "not": operator.invert,
    "shl": lax.shift_left, "lsr": lax.shift_right_logical, "shr": lax.shift_right_arithmetic,
    "minimum": _chosen(operator.lt), "maximum": _chosen(operator.gt), "where": jnp.where,
    # A GPU's own are approximate.
    "sqrt": lambda x: corrected_root(x, lax.sqrt(x)),
    "div": lambda x, y: corrected_quotient(x, y, lax.div(x, y)),
}  # fmt: skip

"""The step of some leaves as one operation: a custom call on a CPU, Pallas on a GPU, or operations of XLA.

The operation is a primitive of JAX. It is lowered by platform. A derivative and a batch are computed
from the calls in its place.
"""

import functools
import importlib
from collections.abc import Callable, Sequence

import jax
import jax.numpy as jnp
import numpy as np
from jax.core import ShapedArray

from halfstep_jax.kernels.pallas_form import step_leaf
from halfstep_jax.kernels.program import LeafStep
from halfstep_jax.kernels.registered import TARGET, Kernel
from halfstep_jax.leaf_calls import (
    LaterArray,
    LeafCall,
    Traced,
    Tree,
    call_per_shape,
    value_of,
    waiting_calls,
)
from halfstep_jax.xla import exact


class _Steps:
    """The steps of leaves that share a kernel, numbers and keys, and their operands.

    Attributes:
        kernel: of all.
        operands: distinct arrays.
        results: shapes and dtypes.
    """

    def __init__(self, kernel: Kernel, steps: Sequence[LeafStep]) -> None:
        self.kernel, self.operands, self._places = kernel, [], {}
        first = steps[0]
        self._keys = [(self._place(keys.k0), self._place(keys.k1)) for keys in first.keys]
        self._numbers = [self._place(x) for x in first.numbers]
        self._columns = [step.place for step in steps]
        self._arrays = [[self._place(x) for x in step.arrays] for step in steps]
        self._shapes = [(step.shape, step.run) for step in steps]
        self._calls = [[self._call(step, call) for call in step.calls] for step in steps]
        self._read = [[_made_by(step, x) for x in step.results] for step in steps]
        self.results = [jax.ShapeDtypeStruct(x.shape, x.dtype) for step in steps for x in step.results]

    def _place(self, x: Tree) -> int:
        """Return the place of an array among the operands."""
        if id(x) not in self._places:
            self._places[id(x)] = len(self.operands)
            self.operands.append(x)
        return self._places[id(x)]

    def _call(self, step: LeafStep, call: LeafCall) -> tuple:
        """Return a call with places instead of arrays."""

        def place(x: Tree) -> Tree:
            if isinstance(x, LaterArray) and x.value is None:
                return _made_by(step, x)
            if isinstance(x, np.ndarray | np.generic):
                return x
            return _Operand(self._place(value_of(x)))

        return call.function, call.static, jax.tree.map(place, call.given), jax.tree.map(place, call.arrays)

    def by_xla(self, *operands: jax.Array) -> list[jax.Array]:
        """Return the results as XLA computes them."""
        results = []
        with waiting_calls(None):
            for calls, read in zip(self._calls, self._read, strict=True):
                made: list[list[jax.Array]] = []

                def value(x: Tree, made: list = made) -> Tree:
                    if isinstance(x, _Made):
                        return made[x.call][x.place]
                    return operands[x.place] if isinstance(x, _Operand) else x

                for function, static, given, arrays in calls:
                    given, arrays = (jax.tree.map(value, x, is_leaf=_is_reference) for x in (given, arrays))
                    made.append(jax.tree.leaves(call_per_shape(function, static, *given, *arrays)))
                results += [made[x.call][x.place] for x in read]
        return results

    def by_pallas(self, *operands: jax.Array) -> list[jax.Array]:
        """Return the results of a call of Pallas for each leaf."""
        keys, numbers = self._key_columns(operands), self._stacked_numbers(operands)
        zero, results = exact.opaque_zero(keys[0, :1]), []
        for leaf, (places, (shape, _)) in enumerate(zip(self._arrays, self._shapes, strict=True)):
            arrays = [operands[place] for place in places]
            # Leaves of one shape are one trace, so that their kernels are equal to XLA.
            results += call_per_shape(_by_pallas, (self.kernel, shape), zero, keys[:, leaf], numbers, arrays)
        return results

    def by_custom_call(self, *operands: jax.Array) -> list[jax.Array]:
        """Return the results of one custom call."""
        program = self.kernel.program
        names = {row.name: i for i, row in enumerate(program.arrays)}
        over = [names.get(row.name, -1) for _, _, row in program.results]
        results = {row.name: i for i, (_, _, row) in enumerate(program.results)}
        assert self.kernel.graph is not None
        memory = self.kernel.graph.memory
        columns = [results[row.name] if row.name in results else -1 - names[row.name] for row in memory]
        arrays = [operands[place] for leaf in self._arrays for place in leaf]
        inputs, outputs = len(program.arrays), len(over)
        aliases = {
            2 + leaf * inputs + at: leaf * outputs + i
            for leaf in range(len(self._arrays))
            for i, at in enumerate(over)
            if at >= 0
        }
        call = jax.ffi.ffi_call(TARGET, self.results, input_output_aliases=aliases)
        return call(  # pyright: ignore[reportReturnType]
            self._key_columns(operands),
            self._stacked_numbers(operands),
            *arrays,
            columns=np.array(columns, np.int64),
            aliases=np.array(over, np.int64),
            fields=np.array([_fields(*leaf) for leaf in self._shapes], np.int64).reshape(-1),
            inputs=np.int64(inputs),
            kernel=self.kernel.c_form.name,
        )

    def _stacked_numbers(self, operands: Sequence[jax.Array]) -> jax.Array:
        """Return the numbers of the step, float32."""
        return jnp.stack([jnp.asarray(operands[i]) for i in self._numbers] or [jnp.zeros((), jnp.float32)])

    def _key_columns(self, operands: Sequence[jax.Array]) -> jax.Array:
        """Return the keys of all streams, uint32: a column for each leaf."""
        rows = []
        for k0, k1 in self._keys:
            rows += [operands[k0][:1], operands[k1]]
        if not rows:
            return jnp.zeros((1, len(self._columns)), jnp.uint32)
        keys = jnp.concatenate(rows)
        whole = self._columns == list(range(keys.shape[1]))
        return keys if whole else keys[:, np.array(self._columns)]


def _by_pallas(
    static: tuple, zero: jax.Array, keys: jax.Array, numbers: jax.Array, arrays: Sequence[jax.Array]
) -> list[jax.Array]:
    """Return the results of one leaf, given its kernel and shape."""
    kernel, shape = static
    flat = [x.reshape(-1) for x in arrays]
    made = step_leaf(kernel.program, kernel.graph, int(np.prod(shape)), zero, keys, numbers, flat)
    return [x.reshape(shape) for x in made]


class _Operand:
    """Stands for an operand."""

    def __init__(self, place: int) -> None:
        self.place = place


class _Made:
    """Stands for a result of a call."""

    def __init__(self, call: int, place: int) -> None:
        self.call, self.place = call, place


def _made_by(step: LeafStep, x: LaterArray) -> _Made:
    return _Made(step.calls.index(x.call), jax.tree.leaves(x.call.result).index(x))


def _is_reference(x: Tree) -> bool:
    return isinstance(x, _Operand | _Made)


def _fields(shape: tuple[int, ...], run: int) -> tuple[int, ...]:
    """Return the fields of a leaf, `c_driver.FIELDS`."""
    n = int(np.prod(shape))
    return n, run, 0, n, 0


def run_together(kernel: Kernel, steps: Sequence[LeafStep]) -> None:
    """Compute the steps of leaves that share a kernel, numbers and keys; set their results."""
    made = _Steps(kernel, steps)
    values = iter(_primitive().bind(*made.operands, steps=made))
    for step in steps:
        for x in step.results:
            x.value = next(values)
        for call in step.calls:
            call.has_run = True


@functools.cache
def has_primitive() -> bool:
    """Whether this version of JAX has all parts of the primitive."""
    try:
        _primitive()
    except (ImportError, AttributeError, TypeError):  # of JAX, if a name is gone
        return False
    return True


@functools.cache
def _primitive() -> Traced:
    """Return the primitive."""
    primitive = importlib.import_module("jax.extend.core").Primitive("halfstep_leaves")
    names = ("ad", "batching", "mlir")
    ad, batching, mlir = (importlib.import_module(f"jax.interpreters.{name}") for name in names)
    primitive.multiple_results = True

    def types(*operands: Traced, steps: _Steps) -> list[Traced]:
        return [ShapedArray(x.shape, x.dtype) for x in steps.results]

    def run(*operands: jax.Array, steps: _Steps) -> list[jax.Array]:
        return steps.by_xla(*operands)

    def jvp(primals: Sequence, tangents: Sequence, *, steps: _Steps) -> tuple[list, list]:
        floats = [i for i, x in enumerate(primals) if jnp.issubdtype(x.dtype, jnp.floating)]

        def of_floats(*given: jax.Array) -> list[jax.Array]:
            operands = list(primals)
            for i, x in zip(floats, given, strict=True):
                operands[i] = x
            return steps.by_xla(*operands)

        moved = [ad.instantiate_zeros(tangents[i]) for i in floats]
        return jax.jvp(of_floats, [primals[i] for i in floats], moved)

    def batch(operands: Sequence, axes: Sequence, *, steps: _Steps) -> tuple[list, list]:
        made = jax.vmap(steps.by_xla, in_axes=tuple(axes))(*operands)
        return made, [0] * len(made)

    def by(form: str, function: Callable) -> Callable:
        def lowered(context: Traced, *operands: Traced, steps: _Steps) -> Traced:
            is_ready = _takes_custom_calls(mlir, context) and getattr(steps.kernel, form).is_ready()
            chosen = function if is_ready else _Steps.by_xla
            return mlir.lower_fun(functools.partial(chosen, steps), multiple_results=True)(context, *operands)

        return lowered

    def elsewhere(context: Traced, *operands: Traced, steps: _Steps) -> Traced:
        return mlir.lower_fun(steps.by_xla, multiple_results=True)(context, *operands)

    primitive.def_impl(run)
    primitive.def_abstract_eval(types)
    ad.primitive_jvps[primitive] = jvp
    batching.primitive_batchers[primitive] = batch
    mlir.register_lowering(primitive, elsewhere)
    mlir.register_lowering(primitive, by("c_form", _Steps.by_custom_call), platform="cpu")
    mlir.register_lowering(primitive, by("pallas_form", _Steps.by_pallas), platform="cuda")
    return primitive


def _takes_custom_calls(mlir: Traced, context: Traced) -> bool:
    """Whether a program is of one device, and is not exported to other processes."""
    module, kind = context.module_context, getattr(mlir, "ShardingContext", ())
    axes = getattr(module, "axis_context", None)
    if not isinstance(axes, kind) or getattr(axes, "num_devices", 0) != 1:
        return False
    return not getattr(getattr(module, "lowering_parameters", None), "for_export", True)

"""halfstep_jax as a backend whose programs are XLA's for an H100, executed by the interpreter."""

import pathlib
import tempfile
from collections.abc import Callable
from typing import Any

import compiled
import jax
import numpy as np
from jax.experimental import topologies
from jax.sharding import SingleDeviceSharding

from backends.on_jax import JaxBackend
from halfstep_spec.vectors import Array, Case
from ptx.approximations import Approximations
from ptx.xla import Program


def compile_for_h100(
    function: Callable, *arguments: Any, donate: tuple[int, ...] = (), **named: Any
) -> Program:
    """Return what XLA makes of a function for an H100.

    Args:
        function: of trees of arrays.
        arguments: trees of what has a shape and a dtype.
        donate: which arguments it may overwrite.
        named: more arguments, by name.
    """
    topology = topologies.get_topology_desc(platform="cuda", target_config=compiled.H100, topology="1x1x1")
    sharding = SingleDeviceSharding(topology.devices[0])
    shaped, named = jax.tree.map(
        lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=sharding), (arguments, named)
    )
    lowered = jax.jit(function, donate_argnums=donate, keep_unused=True).lower(*shaped, **named)
    with tempfile.TemporaryDirectory() as folder:
        options = {"xla_dump_to": folder, "xla_dump_hlo_as_text": True, "xla_dump_large_constants": True}
        lowered.compile(compiler_options=options)
        return Program(pathlib.Path(folder))


class XlaBackend(JaxBackend):
    """JAX on an H100 that is not there.

    Attributes:
        approximations: what approximate operations give, in the next runs.
        programs: of the present case, by the function and the shapes of its arguments.
    """

    def __init__(self) -> None:
        super().__init__("jit")
        self.approximations = Approximations()
        self.programs: dict[Any, Program] = {}
        self._shapes: dict[Any, Any] = {}
        self._case: Case | None = None

    def run(self, case: Case) -> dict[str, Array]:
        """Run one case; its programs are compiled once and kept until another case comes."""
        if self._case is not case:
            self.programs, self._shapes, self._case = {}, {}, case
        return super().run(case)

    def _compiled(self, function: Callable) -> Callable:
        name = getattr(function, "__qualname__", str(function))
        # Of a step, users let XLA overwrite the weights and the state.
        donate = (0, 1) if name.split(".")[-1] == "step" else ()

        def call(*arguments: Any, **named: Any) -> Any:
            leaves, tree = jax.tree.flatten((arguments, named))
            arrays = [np.asarray(x) for x in leaves]
            key = name, tree, tuple((x.shape, x.dtype) for x in arrays)
            if key not in self.programs:
                self.programs[key] = compile_for_h100(function, *arguments, donate=donate, **named)
                self._shapes[key] = jax.eval_shape(function, *arguments, **named)
            program = self.programs[key]
            program.approximations = self.approximations
            outputs, out_tree = jax.tree.flatten(self._shapes[key])
            results = zip(outputs, program.run(arrays), strict=True)
            return jax.tree.unflatten(out_tree, [y.view(x.dtype).reshape(x.shape) for x, y in results])

        return call

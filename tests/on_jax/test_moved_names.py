"""With a JAX that has moved a name we reach for, the package is imported all the same and keeps the bits.

Each name is hidden in a process of its own, before halfstep_jax is imported.
"""

import functools
import os
import subprocess
import sys

import pytest

NAMES = (
    "jax.extend.core",
    "jax.extend.core.Primitive",
    "jax.extend.core.jaxpr_as_fun",
    "jax.extend.mlir.dialects",
    "jax.extend.mlir.dialects.stablehlo",
    "jax.interpreters.ad",
    "jax.interpreters.ad.instantiate_zeros",
    "jax.interpreters.ad.primitive_jvps",
    "jax.interpreters.batching",
    "jax.interpreters.batching.primitive_batchers",
    "jax.interpreters.mlir",
    "jax.interpreters.mlir.lower_fun",
    "jax.interpreters.mlir.register_lowering",
    "jax.lax.sqrt_p",
    "jax.lax.div_p",
    "jax.core.ShapedArray.update",
)
ALL = tuple(name for name in NAMES if not any(name.startswith(f"{other}.") for other in NAMES))
HIDE = """
import importlib, sys, types
import jax, jax.extend.core, jax.extend.mlir.dialects.stablehlo, jax.interpreters.mlir
import jax.numpy as jnp, numpy as np

def hide(name):
    if name == "jax.core.ShapedArray.update":  # which JAX itself needs
        update = jax.core.ShapedArray.update

        def seen_by_jax(self):
            if sys._getframe(1).f_globals["__name__"].startswith("halfstep_jax"):
                raise AttributeError("update")
            return types.MethodType(update, self)

        jax.core.ShapedArray.update = property(seen_by_jax)
        return
    owner, _, attribute = name.rpartition(".")
    vars(importlib.import_module(owner)).pop(attribute, None)
    for module in list(sys.modules):
        if f"{module}.".startswith(f"{name}."):
            sys.modules[module] = None  # which import takes for one that is missing
"""
PROGRAM = """
from halfstep_jax.xla.exact import opaque
from halfstep_jax.xla.primitives import stablehlo
from halfstep_jax.numbers.roots import sqrt
program = jax.make_jaxpr(lambda x, zero: sqrt(opaque(x, zero)))(np.float32(2), np.uint32(0))
print(str(program).count("custom_jvp_call"), stablehlo("sqrt") is None)
"""
VECTORS = """
from backends.on_jax import JaxBackend
from halfstep_spec import SPEC_VERSION
from halfstep_spec.compare import assert_same
from halfstep_spec.vectors import load

vectors = load(SPEC_VERSION)
cases = [("jit", case) for case in vectors["no_contraction"][:FEW]] + [("eager", vectors["moments"][0])]
cases += [("jit", case) for case in vectors["relative"] if case.op != "encode"][-2:]
for mode, case in cases:
    found = JaxBackend(mode).run(case)
    for name, array in case.outputs.items():
        assert_same(found[name], array, f"{mode} {case.key} {name}")
"""
STEPS = """
import hashlib, optax
import halfstep_jax as hs

def steps(x, **formats):
    tx = hs.adamw(1e-2, **formats)
    params = {"w": x, "b": x[0]}
    state = tx.init(params)
    for _ in range(2):
        updates, state = tx.update(params, state, params)
        params = optax.apply_updates(params, updates)
    return params["w"]

x = np.linspace(-1, 1, 8192, dtype=np.float32).reshape(2, 64, 64)
mapped = jax.jit(jax.vmap(lambda x: steps(x, **hs.recipes.four_bit)))(jnp.asarray(x, jnp.bfloat16))
slope = jax.jit(jax.grad(lambda x: (steps(x) ** 2).sum()))(jnp.asarray(x[0]))
for array in (mapped, slope):
    print(hashlib.sha256(np.asarray(array).tobytes()).hexdigest(), float(abs(array).max()) > 0)
"""


@functools.cache
def said_without(*names: str, code: str) -> list[str]:
    """Return what a program prints in a process where names are hidden."""
    code = "".join([HIDE, *(f"hide({name!r})\n" for name in names), code])
    environment = os.environ | {"PYTHONPATH": os.pathsep.join(filter(None, sys.path))}
    done = subprocess.run([sys.executable, "-c", code], env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr[-3000:]
    return done.stdout.split()


def test_root_and_opaque_are_primitives_where_they_can_be():
    assert said_without(code=PROGRAM) == ["0", "False"]


@pytest.mark.slow
@pytest.mark.parametrize("name", NAMES)
def test_where_one_name_has_moved_that_alone_is_replaced_and_no_bit_changes(name):
    """Also in batches and derivatives."""
    plain, without_hlo, *bits = said_without(name, code=PROGRAM + STEPS)
    of_passes = name == "jax.extend.core.jaxpr_as_fun"
    assert (plain == "2") == (name.startswith(("jax.extend.core", "jax.interpreters")) and not of_passes)
    assert (without_hlo == "True") == name.startswith("jax.extend.mlir")
    assert bits == said_without(code=STEPS)


@pytest.mark.parametrize("few", [1, pytest.param(1000, marks=pytest.mark.slow)])
def test_vectors_pass_where_all_names_have_moved(few):
    said_without(*ALL, code=VECTORS.replace("FEW", str(few)))


@pytest.mark.slow
def test_steps_have_the_same_bits_where_all_names_have_moved():
    assert said_without(*ALL, code=STEPS) == said_without(code=STEPS)

"""What must stand before a framework is imported; in how many processes, on what device, which slow cases."""

import functools
import gc
import os
import pathlib
import sys
import threading
import zlib

import pytest
from _pytest.doctest import DoctestModule

# Eight host devices, so that sharded steps run on a machine without an accelerator. By the second flag XLA
# reads its flags whenever it compiles.
_DEVICES = "--xla_force_host_platform_device_count=8 --xla_flags_reset=true"
_FLAGS = f"{os.environ.get('XLA_FLAGS', '')} {_DEVICES}".strip()
os.environ["XLA_FLAGS"] = _FLAGS
# Tests wait for compilations most of their time, and without optimizations these take a third. Bits are the
# contract's with them and without: the files below watch what optimizations could change, as do the vectors.
_QUICK = (
    f"{_FLAGS} --xla_cpu_use_fusion_emitters=false --xla_backend_optimization_level=0"
    " --xla_llvm_disable_expensive_passes=true --xla_cpu_parallel_codegen_split_count=1"
)
_AS_USERS_DO = (
    f"{_FLAGS} --xla_cpu_use_fusion_emitters=true --xla_backend_optimization_level=3"
    " --xla_llvm_disable_expensive_passes=false --xla_cpu_parallel_codegen_split_count=32"
)
_QUICK_FOLDERS = ("on_jax", "twin", "halfstep_jax")
_OPTIMIZED = ("test_exactness", "test_hazards", "test_memory", "test_primitives", "test_roots", "test_rule")

# What one run has compiled is not what another steps by; tests of stored kernels name a folder.
os.environ.setdefault("HALFSTEP_KERNELS", "")

# More would each hold both frameworks in memory.
_PROCESSES = 4
_MANY = ("on_jax", "on_torch", "twin")
_ONE_IN = 12


def pytest_addoption(parser):
    """Add what the tests of `tests/gpu` and `tests/gpu_bits` ask for."""
    parser.addoption("--device", help='on which tests/gpu is run: "cuda", or "cpu" for its code alone')
    parser.addoption("--gpu-bits", choices=("share", "all"), help="how many programs tests/gpu_bits executes")
    parser.addoption("--gpu-bits-json", type=pathlib.Path, help="where to write what they gave")
    parser.addoption("--one-in", type=int, default=1, help="of how many golden vectors tests/gpu takes one")


@pytest.hookimpl(tryfirst=True)
def pytest_cmdline_main(config):
    """Run the whole suite in several processes, and what is asked for by name in this one, for debuggers."""
    by_name = config.args_source is pytest.Config.ArgsSource.ARGS
    here = by_name or config.getoption("usepdb") or hasattr(config, "workerinput")
    if not here and config.getoption("numprocesses", 0) is None:
        config.option.numprocesses = min(os.cpu_count() or 1, _PROCESSES)
        # Neighbours share what is compiled: each process takes a run of them, and of the last what is left.
        config.option.dist = "worksteal"


def pytest_configure(config):
    """Let JAX see the CPU alone, but where a test was asked for that needs more."""
    if config.getoption("--device") in (None, "cpu"):
        os.environ.setdefault("JAX_PLATFORMS", "cpu")
    else:
        # Both frameworks share its memory, and so do processes.
        os.environ.setdefault("XLA_PYTHON_CLIENT_PREALLOCATE", "false")
    config.pluginmanager.register(_CompilerOfJax())
    gc.disable()  # a sixth of the time in which tests are imported


def pytest_collection_finish():
    """Collect garbage again: imports make none."""
    gc.enable()


@pytest.hookimpl(wrapper=True)
def pytest_collect_file():
    """Look for examples in docstrings of the packages alone."""
    return [found for found in (yield) if not isinstance(found, DoctestModule)]


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(config, items):
    """Of the cases of slow tests CI takes one in twelve, by its name; the rest are `make test-exhaustive`."""
    for item in items:
        case = item.get_closest_marker("slow") and "[" in item.name and item.path.parent.name in _MANY
        if case and zlib.crc32(item.nodeid.encode()) % _ONE_IN:
            item.add_marker(pytest.mark.exhaustive)
    # What was optimized serves tests that ask for less, and not the other way.
    items.sort(key=lambda item: _is_quick(config, item.path))


@pytest.fixture(scope="module", autouse=True)
def _heap():
    """Leave what other files and importing made out of what optimizers without names search for modules."""
    gc.collect()
    gc.freeze()


def _is_quick(config, path):
    """Whether JAX compiles a file's programs without optimizations; for slow tests it has them all."""
    folder = any(name in path.parts for name in _QUICK_FOLDERS) and "not slow" in config.getoption("markexpr")
    return folder and path.stem not in _OPTIMIZED


class _CompilerOfJax:
    """How JAX compiles, in examples of the packages too. Other versions have other flags and insides."""

    @pytest.hookimpl(tryfirst=True)
    def pytest_runtest_setup(self, item):
        """Switch its optimizations for a file: XLA ends the process at a flag that it does not know."""
        jax = sys.modules.get("jax")
        flags = _QUICK if _is_quick(item.config, item.path) else _AS_USERS_DO
        if not jax or not jax.__version__.startswith("0.10.") or os.environ["XLA_FLAGS"] == flags:
            return
        if os.environ["XLA_FLAGS"] == _FLAGS:
            _keep_contexts()
            _keep_programs()
        if os.environ["XLA_FLAGS"] == _QUICK:
            jax.clear_caches()
        os.environ["XLA_FLAGS"] = flags


def _keep_contexts():
    """Build the programs of a thread in one context of MLIR: a new one is a fifth of a small one's time."""
    from jax._src.interpreters import mlir
    from jaxlib.mlir import ir

    kept = functools.cache(lambda thread, make=mlir.make_ir_context: make())

    def context(make=mlir.make_ir_context):
        mine = kept(threading.get_ident())
        # What is compiled while another program is built has one of its own: the other's is open.
        return make() if ir.Context.current is mine else mine

    mlir.make_ir_context = context


def _keep_programs():
    """Compile a program once, though each test has functions of its own: one in seven is asked for again."""
    from jax._src import compiler

    kept, compile_and_load = {}, compiler.backend_compile_and_load

    def compiled(backend, module, devices, options, callbacks):
        if callbacks:
            return compile_and_load(backend, module, devices, options, callbacks)
        text = module.operation.get_asm(enable_debug_info=False)
        key = os.environ["XLA_FLAGS"], str(devices), options.SerializeAsString(), hash(text), len(text)
        if key not in kept:
            kept[key] = compile_and_load(backend, module, devices, options, callbacks)
        return kept[key]

    compiler.backend_compile_and_load = compiled

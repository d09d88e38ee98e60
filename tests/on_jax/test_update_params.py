"""`update_params`: one custom call has the bits of XLA's program, and stands back where it cannot be."""

import functools
import os
import pathlib
import subprocess
import sys

import jax
import jax.export
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax.sharding import Mesh, NamedSharding, PartitionSpec

import halfstep_jax as hs
from halfstep.kernels import trusted_files
from halfstep.kernels.build import FOLDER, find_cc
from halfstep_jax.kernels import registered
from halfstep_jax.kernels import step as kernel_step
from on_jax.steps import assert_trees_same, gradients, take_step, weights

pytestmark = pytest.mark.skipif(find_cc() is None, reason="there is no C compiler")

CALL = "halfstep_step"
adamw = functools.partial(hs.adamw, 1e-2, weight_decay=0.1, seed=3)
FORMATS = {
    "fp8": {"mu_dtype": hs.scaled("float8_e4m3fn"), "nu_dtype": hs.scaled("ufloat8_e5m3")},
    "rows": {"mu_dtype": hs.scaled("int8", "row"), "nu_dtype": hs.scaled("ufloat8_e5m3", "row")},
}
MAKES = {
    "default": adamw,
    **{x: functools.partial(adamw, recipe=x) for x in ("one_pass", "eight_bit", "four_bit")},
    **{x: functools.partial(adamw, recipe=x) for x in ("near_float32", "full_precision")},
    **{x: functools.partial(adamw, param_storage=x) for x in ("feedback", "compensated", "split8", "master")},
    "nearest": functools.partial(adamw, param_storage="nearest"),
    "feedback and eight_bit": functools.partial(adamw, recipe="eight_bit", param_storage="feedback"),
    "cautious": functools.partial(adamw, cautious=True),
    "a mask": functools.partial(adamw, mask=lambda params: jax.tree.map(lambda p: p.ndim > 1, params)),
    "a schedule": lambda: hs.adamw(optax.cosine_decay_schedule(1e-2, 10)),
    **{name: functools.partial(adamw, **formats) for name, formats in FORMATS.items()},
    "sgd": lambda: hs.sgd(1e-1, momentum=0.9, nesterov=True),
    "lion": lambda: hs.lion(1e-3),
    "adan": lambda: hs.adan(1e-3),
    "ademamix": lambda: hs.ademamix(1e-3),
    "lamb": lambda: hs.lamb(1e-2),
    "muon": lambda: hs.muon(1e-2),
    "adafactor": lambda: hs.adafactor(1e-2),
    "schedule-free": lambda: hs.schedule_free_adamw(1e-2),
    "a chain behind a clip": lambda: hs.chain(optax.clip_by_global_norm(1.0), adamw(recipe="eight_bit")),
    "a chain around a clip": lambda: hs.chain(
        hs.scale_by_adam(),
        hs.clip_by_global_norm(1.0),
        hs.scale_by_learning_rate(1e-2),
        hs.round_stochastically(),
    ),
}
FAST = ("default", "eight_bit")
SPECIAL = (np.inf, -np.inf, np.nan, 0.0, -0.0, 1e-30, 1e30)


@pytest.fixture
def called(monkeypatch):
    """Return a list that gets an entry for each custom call that is traced."""
    found, run_together = [], kernel_step.run_together
    monkeypatch.setattr(kernel_step, "run_together", lambda *given: found.append(1) or run_together(*given))
    jax.clear_caches()
    return found


@pytest.fixture
def new_kernels(monkeypatch, tmp_path):
    """Return an empty folder of libraries, of which no kernel is known."""
    monkeypatch.setenv(FOLDER, str(tmp_path))
    registered.kernel_of.cache_clear()
    yield tmp_path
    registered.kernel_of.cache_clear()


def trees(shapes, dtype="bfloat16", steps=3):
    """Return weights of some shapes, and their gradients, among which are infinities and NaN."""
    params = {f"w{i}": weights(shape, dtype, seed=i) for i, shape in enumerate(shapes)}
    rows = {f"w{i}": gradients(steps, shape, "bfloat16", seed=i) for i, shape in enumerate(shapes)}
    special = jnp.resize(jnp.asarray(SPECIAL, jnp.bfloat16), shapes[0])
    rows["w0"] = rows["w0"].at[1].set(special)
    return params, rows


def first_of(rows):
    """Return the gradients of the first step."""
    return jax.tree.map(lambda x: x[0], rows)


def both(tx, params, rows, **options):
    """Return weights and state after steps by `update_params`, the same by `update`, and the first's text."""
    results, text = [], ""
    for step in (functools.partial(hs.update_params, tx), by_update(tx)):
        step, p, state = jax.jit(step, **options), params, tx.init(params)
        p, state = jax.tree.map(jnp.copy, (p, state))
        text = text or step.lower(p, state, first_of(rows)).as_text()
        for k in range(len(rows["w0"])):
            p, state = step(p, state, jax.tree.map(lambda x, k=k: x[k], rows))
        results.append((p, state))
    return *results, text


def by_update(tx):
    """Return the step of every training loop, with the arguments of `update_params`."""
    return functools.partial(take_step, tx)


@pytest.mark.parametrize("name", [x if x in FAST else pytest.param(x, marks=pytest.mark.slow) for x in MAKES])
def test_a_custom_call_has_the_bits_of_xla(name):
    shapes = [(64, 128), (17, 300)] if name in FAST else [(64, 128), (17, 300), (), (5,), (3, 4, 5, 100)]
    ours, theirs, text = both(MAKES[name](), *trees(shapes), donate_argnums=(0, 1))
    assert_trees_same(ours, theirs, name)
    assert CALL in text


@pytest.mark.slow
@pytest.mark.parametrize("dtype", ["float32", "float16"])
@pytest.mark.parametrize("name", ["default", "eight_bit", "master"])
def test_other_weights_have_the_bits_of_xla(name, dtype):
    ours, theirs, text = both(MAKES[name](), *trees([(64, 128), (9,)], dtype))
    assert_trees_same(ours, theirs)
    assert CALL in text


def test_float32_weights_that_no_link_reads_are_left_out():
    ours, theirs, text = both(hs.adam(1e-3, recipe="full_precision"), *trees([(64, 128), (9,)]))
    assert_trees_same(ours, theirs)
    assert CALL in text


def test_equal_leaves_and_leaves_of_other_shapes_are_one_call():
    params, rows = trees([(64, 128), (64, 128), (7, 5), (3,), ()])
    ours, theirs, text = both(adamw(), params, rows)
    assert_trees_same(ours, theirs)
    assert text.count(f"@{CALL}(") == 1


def test_threads_change_no_bit():
    assert_trees_same(*both(adamw(), *trees([(1 << 19,), (1000, 130)], steps=2))[:2])


def test_a_donated_step_copies_nothing_and_stores_no_updates():
    params, rows = trees([(512, 512)])
    tx = adamw()
    step = jax.jit(functools.partial(hs.update_params, tx), donate_argnums=(0, 1))
    compiled = step.lower(params, tx.init(params), first_of(rows)).compile()
    assert compiled.memory_analysis().temp_size_in_bytes < 4096


def test_steps_in_a_scan_are_steps_in_a_loop():
    tx, (params, rows) = adamw(), trees([(64, 128), (5,)])

    @jax.jit
    def scanned(params, state):
        take = lambda carry, g: (hs.update_params(tx, *carry, g), None)  # noqa: E731
        return jax.lax.scan(take, (params, state), rows)[0]

    assert_trees_same(scanned(params, tx.init(params)), both(tx, params, rows)[1])


def test_outside_jit_a_step_calls_the_kernel_too(called):
    tx, (params, rows) = adamw(), trees([(8, 16)])
    state, first = tx.init(params), first_of(rows)
    assert_trees_same(
        hs.update_params(tx, params, state, first), jax.jit(by_update(tx))(params, state, first)
    )
    assert len(called) == 1


@pytest.mark.slow
def test_outside_jit_weights_may_be_on_two_devices(called):
    tx, (params, rows) = adamw(), trees([(8, 16), (8, 16)])
    state, first = tx.init(params), first_of(rows)
    expected = jax.jit(by_update(tx))(params, state, first)
    apart = params | {"w1": jax.device_put(params["w1"], jax.devices()[1])}
    gradients_apart = first | {"w1": jax.device_put(first["w1"], jax.devices()[1])}
    assert_trees_same(hs.update_params(tx, apart, tx.init(apart), gradients_apart), expected)
    assert not called


def test_weights_on_another_device_are_stepped_there():
    tx, (params, rows) = adamw(), trees([(8, 16)])
    expected = both(tx, params, rows)[1]
    params, rows = jax.device_put((params, rows), jax.devices()[3])
    found = both(tx, params, rows)
    assert_trees_same(found[0], expected)
    assert found[0][0]["w0"].devices() == {jax.devices()[3]}
    assert CALL in found[2]


def test_an_array_that_is_read_twice_is_not_overwritten_too_early():
    tx, (params, rows) = adamw(), trees([(64, 128)])
    state = tx.init({"a": params["w0"], "b": params["w0"]})

    def step(take, w, state, g):  # leaves that share their weights and gradients; gradients that are weights
        tied = take({"a": w, "b": w}, state, {"a": g, "b": g})
        return take(*tied, tied[0])

    g = rows["w0"][0]
    ours, theirs = (
        jax.jit(functools.partial(step, take), donate_argnums=(0, 1))(
            *jax.tree.map(jnp.copy, (params["w0"], state)), g
        )
        for take in (functools.partial(hs.update_params, tx), by_update(tx))
    )
    assert_trees_same(ours, theirs)


@pytest.mark.filterwarnings("ignore:Some donated buffers were not usable")
def test_donated_buffers_that_are_used_again_are_refused():
    tx, (params, rows) = adamw(), trees([(64, 128)])
    step, state, first = (
        jax.jit(functools.partial(hs.update_params, tx), donate_argnums=(0, 1)),
        tx.init(params),
        first_of(rows),
    )
    step(params, state, first)
    with pytest.raises((RuntimeError, ValueError), match="deleted"):
        step(params, state, first)


def test_a_batch_is_computed_by_xla():
    tx, (params, rows) = adamw(), trees([(4, 8)])
    seeds = jnp.arange(3, dtype=jnp.uint32)
    states = jax.vmap(lambda seed: hs.adamw(1e-2, weight_decay=0.1, seed=seed).init(params))(seeds)
    step = jax.jit(jax.vmap(functools.partial(hs.update_params, tx), in_axes=(None, 0, 0)))
    ours = step(params, states, rows)
    assert CALL not in step.lower(params, states, rows).as_text()
    assert_trees_same(ours, jax.jit(jax.vmap(by_update(tx), in_axes=(None, 0, 0)))(params, states, rows))


def test_a_derivative_is_that_of_the_step():
    tx, (params, rows) = hs.adamw(1e-2), trees([(4, 8)], "float32")
    first = jax.tree.map(lambda x: x[0].astype(jnp.float32), rows)

    def loss(step):
        return jax.jit(jax.grad(lambda g: (step(params, tx.init(params), g)[0]["w0"] ** 2).sum()))(first)

    ours, theirs = loss(functools.partial(hs.update_params, tx)), loss(by_update(tx))
    np.testing.assert_array_equal(ours["w0"], theirs["w0"])
    assert np.asarray(ours["w0"]).any()


def test_a_step_on_several_devices_is_computed_by_xla():
    tx, (params, rows) = adamw(), trees([(64, 128)])
    place = NamedSharding(Mesh(np.array(jax.devices()[:4]), ("x",)), PartitionSpec("x"))
    params, first = jax.device_put((params, first_of(rows)), place)
    step = jax.jit(functools.partial(hs.update_params, tx))
    state = jax.jit(tx.init)(params)
    assert CALL not in step.lower(params, state, first).compile().as_text()
    assert_trees_same(step(params, state, first), jax.jit(by_update(tx))(params, state, first))


def test_an_exported_step_needs_no_kernel():
    tx, (params, rows) = adamw(), trees([(4, 8)])
    first, state = first_of(rows), tx.init(params)
    step = lambda g, p: hs.update_params(tx, p, tx.init(p), g)[0]  # noqa: E731
    exported = jax.export.export(jax.jit(step))(first, params)
    assert CALL not in exported.mlir_module()
    assert_trees_same(exported.call(first, params), jax.jit(by_update(tx))(params, state, first)[0])


def test_without_a_compiler_xla_computes_the_step(monkeypatch):
    monkeypatch.setattr(registered, "find_cc", lambda: None)
    registered._unavailable.cache_clear()
    try:
        ours, theirs, text = both(adamw(), *trees([(4, 8)]))
    finally:
        monkeypatch.undo()
        registered._unavailable.cache_clear()
    assert_trees_same(ours, theirs)
    assert CALL not in text


def test_a_jax_without_custom_calls_computes_the_step_by_xla(monkeypatch):
    monkeypatch.delattr(jax, "ffi")
    registered._unavailable.cache_clear()
    try:
        ours, theirs, text = both(adamw(), *trees([(4, 8)]))
        assert "no jax.ffi" in hs.describe(adamw(), ours[0]).step
    finally:
        monkeypatch.undo()
        registered._unavailable.cache_clear()
    assert_trees_same(ours, theirs)
    assert CALL not in text


@pytest.mark.parametrize(
    ("wrong", "why"),
    [
        pytest.param(lambda source: "this is no C", "ended with 1", marks=pytest.mark.slow),
        (
            lambda source: source.replace("a2_at[i] = ", "a2_at[i] = 1 ^ "),
            "its bits differ from those of XLA",
        ),
    ],
)
def test_a_wrong_library_leaves_the_step_to_xla(wrong, why, monkeypatch, new_kernels):
    right = registered.c_source
    monkeypatch.setattr(registered, "c_source", lambda graph: wrong(right(graph)))
    params, rows = trees([(4, 8)])
    ours, theirs, text = both(adamw(), params, rows)
    assert_trees_same(ours, theirs)
    assert CALL not in text
    assert why in hs.describe(adamw(), params).step


@pytest.mark.slow
@pytest.mark.parametrize("name", ["default", "one_pass", "feedback", "near_float32"])
def test_a_kernel_of_pallas_has_the_bits_of_xla(name, monkeypatch):
    made, kernel_of = [], kernel_step.kernel_of
    monkeypatch.setattr(kernel_step, "kernel_of", lambda program: made.append(kernel_of(program)) or made[-1])
    hs.describe(MAKES[name](), {"w": jax.ShapeDtypeStruct((64, 128), "bfloat16")})
    kernel = made[-1]
    assert not kernel.pallas_form.problem
    step = registered.step_by_pallas(kernel.program, kernel.graph, programs=2, interpret=True)
    assert registered.has_same_bits(kernel.program, kernel.graph, step)


def test_scales_have_no_form_in_pallas(monkeypatch):
    made, kernel_of = [], kernel_step.kernel_of
    monkeypatch.setattr(kernel_step, "kernel_of", lambda program: made.append(kernel_of(program)) or made[-1])
    hs.describe(MAKES["eight_bit"](), {"w": jax.ShapeDtypeStruct((64, 128), "bfloat16")})
    assert made[-1].pallas_form.problem == "Pallas has no form of blocks that share a scale"
    assert not made[-1].c_form.problem


@pytest.mark.slow
def test_a_library_is_tried_once_and_again_when_it_is_built_anew(monkeypatch, new_kernels):
    tried, right = [], registered.has_same_bits
    monkeypatch.setattr(registered, "has_same_bits", lambda *given: tried.append(1) or right(*given))
    params, rows = trees([(4, 8)])
    for times in (1, 1, 2):
        if times == 2:
            for path in new_kernels.glob("*.so"):
                content = path.read_bytes() + b"0"  # another file than the one that was tried
                trusted_files.remove(path)
                trusted_files.write(path, content)
        registered.kernel_of.cache_clear()
        assert CALL in both(adamw(), params, rows, donate_argnums=0)[2]
        assert len(tried) == times


def test_another_optimizer_takes_its_own_step():
    tx, (params, rows) = optax.adam(1e-2), trees([(4, 8)])
    ours, theirs, text = both(tx, params, rows)
    assert_trees_same(ours, theirs)
    assert CALL not in text


def test_a_state_of_another_chain_is_refused():
    tx, (params, rows) = hs.chain(optax.clip(1.0), adamw()), trees([(4, 8)])
    with pytest.raises(ValueError, match="number of updates and states"):
        hs.update_params(tx, params, tx.init(params)[:1], first_of(rows))


_PROGRAM = """
import pickle, sys
import jax, jax.numpy as jnp
from jax.experimental.serialize_executable import deserialize_and_load, serialize
import halfstep_jax as hs

tx, params = hs.adamw(1e-2), {"w": jnp.ones((64, 128), jnp.bfloat16)}
state = tx.init(params)
if sys.argv[1] == "save":
    step = jax.jit(lambda p, s, g: hs.update_params(tx, p, s, g)).lower(params, state, params).compile()
    pickle.dump(serialize(step), open(sys.argv[2], "wb"))
    print(float(step(params, state, params)[0]["w"].sum()))
else:
    deserialize_and_load(*pickle.load(open(sys.argv[2], "rb")))(params, state, params)
"""


@pytest.mark.slow
def test_a_program_of_another_process_says_that_it_has_no_kernel(tmp_path: pathlib.Path):
    script, path = tmp_path / "program.py", tmp_path / "program"
    script.write_text(_PROGRAM)
    run = functools.partial(subprocess.run, capture_output=True, text=True, check=False)
    assert run([sys.executable, script, "save", path]).returncode == 0
    other = run([sys.executable, script, "load", path])
    assert other.returncode
    assert "halfstep" in other.stderr


_CACHED = """
import sys
import jax, jax.numpy as jnp
import halfstep_jax as hs

jax.config.update("jax_compilation_cache_dir", sys.argv[1])
jax.config.update("jax_persistent_cache_min_compile_time_secs", 0)
jax.config.update("jax_persistent_cache_min_entry_size_bytes", -1)
tx, params = hs.adamw(1e-2), {"w": jnp.ones((64, 128), jnp.bfloat16)}
params, state = jax.jit(lambda p, s, g: hs.update_params(tx, p, s, g))(params, tx.init(params), params)
print(params["w"].view(jnp.uint16).sum())
"""


@pytest.mark.slow
def test_a_second_process_finds_program_and_kernel_in_their_caches(tmp_path: pathlib.Path):
    script, programs, kernels = tmp_path / "step.py", tmp_path / "programs", tmp_path / "kernels"
    script.write_text(_CACHED)
    environment = {**os.environ, "HALFSTEP_KERNELS": str(kernels)}
    results, files = [], []
    for _ in range(2):
        command = [sys.executable, str(script), str(programs)]
        run = subprocess.run(command, capture_output=True, text=True, check=True, env=environment)
        results.append(run.stdout)
        found = (x.name for folder in (programs, kernels) for x in folder.iterdir())
        files.append(sorted(name for name in found if "atime" not in name))
    assert results[0] == results[1]
    assert files[0] == files[1]
    assert sum(name.endswith(".so") for name in files[0]) == 2

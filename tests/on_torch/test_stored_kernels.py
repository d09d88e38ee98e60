"""Kernels of an earlier process: found by what their bits depend on, and held against eager mode."""

import json
import os
import pathlib
import subprocess
import sys
import types

import pytest
import torch

import halfstep_torch as hs
from halfstep_torch.engine import compiled_stage as stages
from halfstep_torch.engine import float32_copies, kernel_store, trusted_files
from halfstep_torch.engine.inductor import find_cxx
from on_torch.compiling import IMPORTS_INDUCTOR, model
from on_torch.steps import assert_same_snapshots, reals, run, snapshot, step_by_ones

ROOT = pathlib.Path(__file__).parents[2]
NAME = """
import torch, halfstep_torch as hs
from halfstep_torch.engine.kernel_store import kernel_name
p = torch.nn.Parameter(torch.ones(300, dtype=torch.bfloat16))
optimizer = hs.AdamW([("w", p)], recipe={recipe!r})
[(_, _, plan)] = optimizer.plans()
print(kernel_name(plan.padded_stages[0], 1))
"""
CALL = """
def call(self, args):
        arg0_1, arg1_1, arg2_1 = args
        args.clear()
        s5 = arg0_1
        assert_size_stride(arg1_1, (s5, 256), (256, 1), 'input')
        cpp_fused_add_0(arg2_1, arg1_1, s5)
        del arg1_1
        return ()
"""
CALLS = """
def call(self, args):
        arg0_1, arg1_1, arg2_1 = args
        args.clear()
        arg2_1_size = arg2_1.size()
        s5 = arg2_1_size[1]
        s9 = s5
        # the bytes of codes, as words
        buf0 = torch.ops.aten.view.dtype(reinterpret_tensor(arg1_1, (s9, 64), (64, 1), 0), torch.int32)
        buf1 = buf0
        assert_alignment(buf1, 16, 'torch.ops.aten.view.dtype')
        buf2 = empty_strided_cpu((4*s9, 64), (64, 1), torch.int32)
        cpp_fused_add_0(buf1, buf2, s9)
        buf3 = reinterpret_tensor(buf2, (s9, 256), (256, 1), 0); del buf2  # reuse
        buf4 = empty_strided_cpu((s9, 1), (1, s9), torch.bfloat16)
        cpp_fused_add_0(buf3, arg2_1, buf4, s5)
        return ()
"""
PLACES = [(0, 0), (1, None), (0, None)]
DOUBLES = """
def call(self, args):
        arg0_1, arg1_1 = args
        args.clear()
        s5 = arg0_1
        buf0 = empty_strided_cpu((s5, 1), (1, s5), torch.float32)
        cpp_fused_add_0(arg1_1, buf0, s5)
        return ()
"""
LIBRARY = """
extern "C" void kernel(float* x, float* doubled, long n) {
    for (long i = 0; i < n; ++i) doubled[i] = 2 * x[i];
    for (long i = 0; i < n; ++i) x[i] = doubled[i];
}
"""


@pytest.fixture
def folder(tmp_path, monkeypatch):
    """Let kernels be stored in a folder of this test, and none be known in this process."""
    monkeypatch.setenv("HALFSTEP_KERNELS", str(tmp_path / "kernels"))
    for known in (stages.compiled_stage, float32_copies._kernel):
        known.cache_clear()
    yield tmp_path / "kernels"
    for known in (stages.compiled_stage, float32_copies._kernel):
        known.cache_clear()


def name_of(recipe) -> str:
    script = NAME.format(recipe=recipe)
    return subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True).stdout


@pytest.mark.slow
def test_a_kernel_has_one_name_in_every_process_and_each_stage_its_own():
    assert name_of("one_pass") == name_of("one_pass") != name_of(None)
    assert len(name_of(None).strip()) == 32


def test_rules_of_others_have_no_name():
    class Theirs:
        pass

    assert kernel_store.kernel_name((Theirs(),)) is None
    assert kernel_store.kernel_name((1, torch.float32)) is not None


def test_a_folder_that_others_may_write_is_not_used(folder):
    assert kernel_store.folder() == folder
    folder.chmod(0o777)
    assert kernel_store.folder() is None


def test_without_a_folder_or_a_known_processor_nothing_is_stored(tmp_path, monkeypatch):
    def missing(*_):
        raise FileNotFoundError

    monkeypatch.setattr(kernel_store.tempfile, "gettempdir", missing)
    monkeypatch.setenv("HALFSTEP_KERNELS", "")
    assert kernel_store.folder() is None
    monkeypatch.delenv("HALFSTEP_KERNELS")
    assert kernel_store.folder() is None
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.setenv("HALFSTEP_KERNELS", "~/kernels")
    assert kernel_store.folder() == tmp_path / "kernels"
    monkeypatch.setattr(pathlib.Path, "read_text", missing)
    kernel_store._processor.cache_clear()
    assert kernel_store.kernel_name(1) is None
    kernel_store._processor.cache_clear()


def made(source: str, library: str = "kernel.so"):
    function = types.SimpleNamespace(__self__=types.SimpleNamespace(__file__=library))
    called = types.SimpleNamespace(__globals__={"cpp_fused_add_0": function})
    return types.SimpleNamespace(source_code=source, current_callable=types.SimpleNamespace(__func__=called))


def test_the_order_of_arguments_is_read_from_the_wrapper():
    wrapper = kernel_store._Wrapper(made(CALL), PLACES)
    assert wrapper.calls == [("kernel.so", [(0, None), (1, None), (0, 0)])]
    assert wrapper.temporaries == []


def test_temporaries_of_several_functions_are_read_from_the_wrapper():
    wrapper = kernel_store._Wrapper(made(CALLS), PLACES)
    assert wrapper.temporaries == [((0, 1), 4 * 64 * 4), ((0, 1), 2)]
    first, second = (places for _, places in wrapper.calls)
    assert first == [(1, None), (-1, None), (0, 1)]
    assert second == [(-1, None), (0, None), (-2, None), (0, 1)]


@pytest.mark.parametrize(
    "line",
    [
        "cpp_fused_add_0(buf9, s5)",
        "cpp_fused_mul_1(arg1_1, s5)",
        "buf0 = empty_strided_cpu((s5, s5), (s5, 1), torch.float32)",
        "buf0 = reinterpret_tensor(arg1_1, (s5, 8), (8, 1), 4)",
        "buf0 = torch.ops.aten.sum.default(arg1_1)",
        "arg1_1 += 1",
    ],
)
def test_a_wrapper_that_does_more_is_not_stored(folder, tmp_path, line):
    library = tmp_path / "kernel.so"
    library.write_bytes(b"a library")
    known, more = (CALL.replace("        del arg1_1", f"        {x}") for x in ("del arg1_1", line))
    kernel_store.store("known", made(known, str(library)), PLACES)
    kernel_store.store("more", made(more, str(library)), PLACES)
    assert kernel_store.is_stored("known")
    assert not kernel_store.is_stored("more")


@pytest.fixture
def doubles(folder, tmp_path) -> str:
    """The name of a stored kernel."""
    library, source = tmp_path / "kernel.so", tmp_path / "kernel.cpp"
    source.write_text(LIBRARY)
    subprocess.run([find_cxx() or "c++", "-shared", "-fPIC", "-o", library, source], check=True)
    kernel_store.store("doubles", made(DOUBLES, str(library)), [(0, 0), (0, None)])
    return "doubles"


@pytest.mark.parametrize("name", ["doubles.0.so", "doubles.json"])
def test_a_kernel_with_a_damaged_file_is_forgotten_before_it_is_loaded(name, doubles, folder, monkeypatch):
    os.truncate(folder / name, (folder / name).stat().st_size // 2)
    monkeypatch.setattr(kernel_store.ctypes, "CDLL", None)
    assert kernel_store.load(doubles) is None
    assert not kernel_store.is_stored(doubles)
    assert not (folder / name).exists()


def test_a_kernel_whose_trial_raises_is_forgotten(doubles):
    assert kernel_store.checked(doubles, lambda kernel: kernel() or True) is None
    assert not kernel_store.is_stored(doubles)


def test_temporaries_are_no_tensor_of_the_call(doubles):
    """Its last tensor is no argument where nothing is random. A temporary had its place, past its end."""
    kernel = kernel_store.load(doubles)
    assert kernel is not None
    x, last = torch.arange(5.0), torch.zeros(5)
    kernel(x, last)
    assert x.tolist() == [0, 2, 4, 6, 8]
    assert not last.any()


def test_a_library_that_does_not_load_is_none(folder):
    kernel_store.folder()
    trusted_files.write(folder / "x.json", b'{"temporaries": [], "calls": [[[0, null]]]}')
    trusted_files.write(folder / "x.0.so", b"no library")
    assert kernel_store.is_stored("x")
    assert kernel_store.load("x") is None
    assert not kernel_store.is_stored("x")


def steps_of(compile, count: int = 3, recipe=None):
    params = [("w", torch.nn.Parameter(reals((128, 128), seed=1)))] if recipe else model(40)
    optimizer = hs.AdamW(params, lr=1e-2, seed=5, compile=compile, recipe=recipe)
    run(params, optimizer, range(count))
    return optimizer


@pytest.mark.slow
def test_what_is_stored_holds_in_a_process_of_its_own():
    """In one that has compiled the same before, Inductor writes no kernel again."""
    environment = {name: value for name, value in os.environ.items() if not name.startswith("PYTEST_")}
    command = [sys.executable, "-m", "pytest", "-q", "-n", "0", "-m", "exhaustive", __file__]
    ran = subprocess.run(command, capture_output=True, text=True, env=environment, cwd=ROOT)
    assert "4 passed" in ran.stdout, ran.stdout


@pytest.mark.exhaustive
@IMPORTS_INDUCTOR
@pytest.mark.parametrize("recipe", [None, "eight_bit"])
def test_auto_steps_by_a_stored_kernel_from_the_first_step(folder, monkeypatch, recipe):
    eager = snapshot(steps_of(False, recipe=recipe))
    assert not steps_of("auto", recipe=recipe)._launches[None].batches[0].kernels
    steps_of(True, recipe=recipe)
    [stored] = folder.glob("*.json")
    stages.compiled_stage.cache_clear()
    monkeypatch.setattr(stages, "compile_rows", None)  # nothing is compiled
    optimizer = steps_of("auto", recipe=recipe)
    assert optimizer._launches[None].batches[0].kernels
    assert_same_snapshots(snapshot(optimizer), eager)
    assert stored.exists()


@pytest.mark.exhaustive
@IMPORTS_INDUCTOR
def test_a_stored_kernel_with_other_bits_is_left_out(folder):
    eager = snapshot(steps_of(False))
    steps_of(True)
    [stored] = folder.glob("*.json")
    kept = json.loads(stored.read_text())
    moments = {2: 3, 3: 2}
    calls = [[[moments.get(i, i), axis] for i, axis in places] for places in kept["calls"]]
    trusted_files.write(stored, json.dumps({**kept, "calls": calls}).encode())
    stages.compiled_stage.cache_clear()
    optimizer = steps_of(True)
    assert_same_snapshots(snapshot(optimizer), eager)
    assert json.loads(pathlib.Path(stored).read_text()) == kept


def rounded_by(compile):
    p = torch.nn.Parameter(torch.linspace(-2, 2, 3000).bfloat16())
    optimizer = hs.round_weights(torch.optim.SGD([("w", p)], lr=1e-3), compile=compile)
    step_by_ones(optimizer)
    return p.detach()


@pytest.mark.exhaustive
@IMPORTS_INDUCTOR
def test_wrapped_optimizers_round_by_a_stored_kernel_from_the_first_step(folder, monkeypatch):
    eager = rounded_by("auto")
    assert not list(folder.glob("*.json"))
    assert torch.equal(rounded_by(True), eager)
    [stored] = folder.glob("*.json")
    arguments, calls, load = stored.read_text(), [], kernel_store.load
    float32_copies._kernel.cache_clear()
    monkeypatch.setattr(kernel_store, "load", lambda name: calls.append(name) or load(name))
    assert torch.equal(rounded_by("auto"), eager)
    assert calls == [stored.stem]
    assert stored.read_text() == arguments
    # With the keys exchanged it has other bits, and is compiled anew.
    exchanged = arguments.replace("[2,", "[9,").replace("[3,", "[2,").replace("[9,", "[3,")
    trusted_files.write(stored, exchanged.encode())
    float32_copies._kernel.cache_clear()
    assert torch.equal(rounded_by("auto"), eager)
    assert stored.read_text() == arguments


def test_what_is_not_stored_is_at_hand_for_nobody(folder):
    params = model(3)
    optimizer = hs.AdamW(params, compile="auto")
    run(params, optimizer, [0])
    assert not stages.is_at_hand(optimizer._launches[None].batches[0])

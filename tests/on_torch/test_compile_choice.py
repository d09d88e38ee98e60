"""`compile=`: kernels as soon as they are built, and plain steps where a compiler is missing or fails."""

import logging
import os
import pathlib
import signal
import tempfile
import threading
import time

import pytest
import torch

import halfstep.__main__ as command
import halfstep_torch as hs
from halfstep.kernels import build, trusted_files
from halfstep_torch.engine import compile_choice
from halfstep_torch.engine.compile_choice import CompileChoice
from halfstep_torch.engine.kernels.kernel import Kernel, kernel_of
from halfstep_torch.say_once import say_once
from on_torch.graph_values import kernels_of
from on_torch.steps import assert_same_snapshots, give_gradients, parameters, run, snapshot

needs_compiler = pytest.mark.skipif(build.find_cc() is None, reason="needs a C compiler")


@pytest.fixture
def folder(tmp_path, monkeypatch, fresh):
    """An empty folder of kernels, and no kernel in this process."""
    monkeypatch.setenv(build.FOLDER, str(tmp_path / "kernels"))
    say_once.cache_clear()
    return tmp_path / "kernels"


def compiler(tmp_path, monkeypatch, script: str) -> None:
    """Put a script in the place of the compiler."""
    path = tmp_path / "cc"
    path.write_text(f"#!/bin/sh\n{script}\n")
    path.chmod(0o755)
    for cached in (build.find_cc, build.flags):
        cached.cache_clear()
    monkeypatch.setenv("CC", str(path))


@pytest.fixture(autouse=True)
def _compiler_is_found_again():
    yield
    for cached in (build.find_cc, build.flags):
        cached.cache_clear()


def bits_after(compile, steps=3):
    params = parameters()
    optimizer = hs.AdamW(params, lr=1e-2, compile=compile)
    run(params, optimizer, range(steps))
    return snapshot(optimizer)


def said(caplog) -> list[str]:
    return [record.getMessage() for record in caplog.records if record.name == "halfstep_torch"]


def test_a_value_that_is_no_choice_is_refused():
    with pytest.raises(
        ValueError, match=r'^AdamW: compile=2 is not a valid value. Use True, False or "auto".$'
    ):
        CompileChoice("AdamW", 2)


@pytest.mark.parametrize("choice", ["auto", True])
def test_without_a_compiler_auto_takes_plain_steps_and_true_raises(
    folder, tmp_path, monkeypatch, caplog, choice
):
    build.find_cc.cache_clear()
    monkeypatch.setenv("CC", str(tmp_path / "nothing"))
    if choice is True:
        with pytest.raises(
            RuntimeError, match=r"^AdamW: compile=True, but no C compiler is found. Install gcc"
        ):
            bits_after(True)
        return
    assert_same_snapshots(bits_after("auto"), bits_after(False))
    assert len(said(caplog)) == 1
    assert "no C compiler is found" in said(caplog)[0]


def test_a_compiler_that_fails_changes_nothing_under_true(folder, tmp_path, monkeypatch):
    compiler(tmp_path, monkeypatch, "echo broken >&2; exit 3")
    params = parameters()
    optimizer = hs.AdamW(params, compile=True)
    give_gradients(params, 0)
    weights = [p.detach().clone() for _, p in params]
    with pytest.raises(
        RuntimeError, match=r"^AdamW: compile=True, but .*cc ended with 3: broken. Use compile=False"
    ):
        optimizer.step()
    assert all(torch.equal(w, p) for w, (_, p) in zip(weights, params, strict=True))
    assert all(state["step"] == 0 for state in optimizer.state.values())


def test_a_compiler_that_fails_means_plain_steps_and_one_line_under_auto(
    folder, tmp_path, monkeypatch, caplog
):
    compiler(tmp_path, monkeypatch, "echo broken >&2; exit 3")
    monkeypatch.setattr(
        CompileChoice,
        "has",
        lambda self, caller, k, has=CompileChoice.has: (k.is_ready(wait=True), has(self, caller, k))[1],
    )
    assert_same_snapshots(bits_after("auto"), bits_after(False))
    assert [line for line in said(caplog) if "broken" in line] == said(caplog)
    assert len(said(caplog)) == 1


@needs_compiler
def test_no_step_waits_for_a_compiler_under_auto(folder, tmp_path, monkeypatch):
    real = build.find_cc()
    compiler(tmp_path, monkeypatch, f'[ "$1" = --version ] || sleep 60\nexec {real} "$@"')
    params = parameters()
    optimizer = hs.AdamW(params, lr=1e-2, compile="auto")
    run(params, optimizer, range(3))
    assert not any(optimizer._launches[None].batches[0].kernels)
    assert_same_snapshots(snapshot(optimizer), bits_after(False))


@needs_compiler
def test_an_interrupt_ends_the_wait_for_a_compiler_and_nothing_was_changed(folder, tmp_path, monkeypatch):
    compiler(tmp_path, monkeypatch, f'[ "$1" = --version ] || sleep 60\nexec {build.find_cc()} "$@"')
    params = parameters()
    optimizer = hs.AdamW(params, lr=1e-2, compile=True)
    give_gradients(params, 0)
    before, start = [p.detach().clone() for _, p in params], time.monotonic()
    # A shell that starts a command in the background lets it ignore interrupts.
    before_it = signal.signal(signal.SIGINT, signal.default_int_handler)
    main = threading.main_thread().ident
    threading.Timer(0.3, signal.pthread_kill, [main, signal.SIGINT]).start()
    try:
        with pytest.raises(KeyboardInterrupt):
            optimizer.step()
    finally:
        signal.signal(signal.SIGINT, before_it)
    assert time.monotonic() - start < 30
    assert all(torch.equal(w, p) for w, (_, p) in zip(before, params, strict=True))


@needs_compiler
def test_a_run_that_changes_over_to_kernels_has_the_bits_of_one_that_does_not(folder, monkeypatch):
    params = parameters()
    optimizer = hs.AdamW(params, lr=1e-2, compile="auto")
    with monkeypatch.context() as patch:
        patch.setattr(Kernel, "is_ready", lambda self, *, wait: False)
        run(params, optimizer, range(2))
    run(params, optimizer, [2])
    for kernel in kernels_of(optimizer):
        assert kernel.is_ready(wait=True)
    run(params, optimizer, [3])
    assert all(optimizer._launches[None].batches[0].kernels)
    assert_same_snapshots(snapshot(optimizer), bits_after(False, steps=4))


@needs_compiler
def test_a_library_is_built_once_and_kept_with_its_digest(folder, tmp_path, monkeypatch):
    bits_after(True)
    (library,) = folder.glob("*.so")
    assert trusted_files.read(library)
    kernel_of.cache_clear()
    compiler_calls = tmp_path / "calls"
    real = build.find_cc()
    compiler(tmp_path, monkeypatch, f'echo "$1" >> {compiler_calls}; exec {real} "$@"')
    flags = build.flags()
    monkeypatch.setattr(build, "flags", lambda: flags)
    bits_after(True)
    assert "--version" in compiler_calls.read_text()
    assert len(compiler_calls.read_text().splitlines()) == 1


@needs_compiler
@pytest.mark.parametrize("damage", ["truncated", "a bit"])
def test_a_damaged_library_is_deleted_and_built_again(folder, damage):
    expected = bits_after(True)
    (library,) = folder.glob("*.so")
    content = library.read_bytes()
    broken = (
        content[: len(content) // 2] if damage == "truncated" else content[:-1] + bytes([content[-1] ^ 1])
    )
    library.unlink()  # this process has the old file in its memory
    library.write_bytes(broken)
    kernel_of.cache_clear()
    assert_same_snapshots(bits_after(True), expected)
    assert trusted_files.read(library)
    assert library.read_bytes() != broken


@needs_compiler
def test_a_kernel_with_other_bits_is_never_used(folder, monkeypatch, caplog):
    c_source = "halfstep_torch.engine.kernels.c_kernel.c_source"
    from halfstep_torch.engine.kernels.c_kernel import c_source as generated

    monkeypatch.setattr(c_source, lambda graph: generated(graph).replace(" ^ ", " | "))
    with pytest.raises(RuntimeError, match="its bits differ from those of plain steps"):
        bits_after(True)
    monkeypatch.setattr(
        CompileChoice,
        "has",
        lambda self, caller, k, has=CompileChoice.has: (k.is_ready(wait=True), has(self, caller, k))[1],
    )
    assert_same_snapshots(bits_after("auto"), bits_after(False))
    assert "its bits differ from those of plain steps" in said(caplog)[0]


@needs_compiler
@pytest.mark.parametrize("mode", [0o777, 0o770])
def test_a_folder_that_others_may_write_is_not_used(folder, mode):
    folder.mkdir()
    folder.chmod(mode)
    bits_after(True)
    assert not list(folder.iterdir())


@needs_compiler
def test_an_empty_name_keeps_no_library(folder, monkeypatch):
    monkeypatch.setenv(build.FOLDER, "")
    bits_after(True)
    assert build.folder() is None


def test_a_device_without_kernels_takes_plain_steps_and_the_log_says_so(caplog):
    say_once.cache_clear()
    other = torch.device("xpu")
    assert not CompileChoice("AdamW", "auto").wants("AdamW", other)
    assert "there are no kernels for devices of type xpu" in said(caplog)[0]
    with pytest.raises(
        RuntimeError, match=r"^AdamW: compile=True, but there are no kernels for devices of type xpu"
    ):
        CompileChoice("AdamW", True).wants("AdamW", other)


def test_a_gpu_without_triton_takes_plain_steps_and_the_log_says_so(monkeypatch, caplog):
    say_once.cache_clear()
    monkeypatch.setattr(compile_choice, "triton_version", lambda: None)
    assert not CompileChoice("AdamW", "auto").wants("AdamW", torch.device("cuda"))
    assert "Triton is not installed. Install the package triton" in said(caplog)[0]


@needs_compiler
def test_a_rule_with_an_operation_without_a_form_takes_plain_steps_and_the_log_names_it(
    folder, monkeypatch, caplog
):
    from halfstep_torch.engine.kernels import torch_names

    monkeypatch.delitem(torch_names.SAME, "sqrt")
    caplog.set_level(logging.WARNING, "halfstep_torch")
    assert_same_snapshots(bits_after(True), bits_after(False))
    assert "there is no generated form of sqrt" in said(caplog)[0]


@needs_compiler
def test_all_compilers_are_started_before_one_is_waited_for(folder, monkeypatch):
    events = []
    for name in ("_start", "get"):
        method = getattr(build.Library, name)

        def noted(self, *args, name=name, method=method, **kwargs):
            events.append(name)
            return method(self, *args, **kwargs)

        monkeypatch.setattr(build.Library, name, noted)
    # Of vectors this recipe keeps other moments than of matrices.
    params = [(f"w{axes}", torch.nn.Parameter(torch.zeros([64] * axes).bfloat16())) for axes in (1, 2)]
    for _, p in params:
        p.grad = torch.ones_like(p)
    hs.AdamW(params, compile=True, recipe="eight_bit").step()
    assert events[:3] == ["_start", "_start", "get"]


@needs_compiler
def test_the_command_stores_the_kernels_of_matrices_and_of_vectors(folder, monkeypatch, capsys):
    assert command.main(["warm", "eight_bit"]) == 0
    assert f"cpu: kept in {folder}" in capsys.readouterr().out
    assert len(list(folder.glob("*.so"))) == 2
    kernel_of.cache_clear()
    # A compiler that was asked for now would be missed.
    monkeypatch.setattr(
        build.Library, "_start", lambda self, source, options: setattr(self, "problem", "a new kernel")
    )
    assert command.main(["warm", "eight_bit"]) == 0
    with pytest.raises(RuntimeError, match="a new kernel"):
        command.main(["warm", "four_bit"])


@needs_compiler
@pytest.mark.skipif(os.getuid() != 0, reason="becomes another user")
# JAX's, if other tests of the process have imported it; the child calls nothing of JAX.
@pytest.mark.filterwarnings("ignore:os.fork:RuntimeWarning")
def test_another_user_loads_the_library_that_root_has_stored(monkeypatch):
    with tempfile.TemporaryDirectory() as path:  # that of pytest is root's alone
        pathlib.Path(path).chmod(0o755)
        monkeypatch.setenv(build.FOLDER, f"{path}/kernels")
        source = "int answer(void) { return 42; }"
        assert build.Library(source).get(wait=True) is not None
        if not (child := os.fork()):
            os.setgid(12345)
            os.setuid(12345)
            library = build.Library(source).get(wait=False)
            os._exit(library.answer() if library is not None else 1)
        _, status = os.waitpid(child, 0)
    assert os.waitstatus_to_exitcode(status) == 42

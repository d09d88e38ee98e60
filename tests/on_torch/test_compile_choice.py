"""Whether steps are compiled: chosen when it gains, and nothing is lost where a compiler fails or lacks."""

import os
import platform
import subprocess
import sys
import time

import pytest
import torch

import halfstep_torch as hs
from halfstep_torch.engine import compile_choice, inductor
from halfstep_torch.engine.compile_choice import CompileChoice
from halfstep_torch.say_once import say_once
from on_torch.compiling import IMPORTS_INDUCTOR, graphs, model
from on_torch.steps import assert_same_snapshots, give_gradients, run, snapshot


def slowly(function, **options):
    """Return what stands for a compiled function: its first call takes a while."""

    def call(*args):
        time.sleep(0.1)
        return function(*args)

    return call


def test_a_long_compilation_is_explained_once(monkeypatch, fresh, caplog):
    inductor._say.cache_clear()
    monkeypatch.setattr(inductor, "_PATIENCE", 0.0)
    monkeypatch.setattr(torch, "compile", slowly)
    for dtype in (torch.bfloat16, torch.float32):
        params = model(2, dtype)
        give_gradients(params, 0)
        hs.AdamW(params, compile=True).step()
    ours = [record.getMessage() for record in caplog.records if record.name == "halfstep_torch"]
    assert len(ours) == 1
    assert ours[0].startswith("torch.compile is compiling the optimizer step")
    assert "compile=False" in ours[0]


def test_auto_compiles_once_eager_steps_have_cost_as_much_as_compiling(fresh, monkeypatch):
    params = model(12)
    elements = sum(p.numel() for _, p in params)
    monkeypatch.setattr(compile_choice, "_COST_OF_COMPILING", 3 * elements)
    optimizer = hs.AdamW(params)
    before = graphs()
    for step, compiled in enumerate((0, 0, 1, 1)):
        run(params, optimizer, [step])
        assert graphs() - before == compiled


def test_weights_without_a_gradient_do_not_make_auto_compile(fresh, monkeypatch):
    monkeypatch.setattr(compile_choice, "_COST_OF_COMPILING", 1000)
    frozen = torch.nn.Parameter(torch.ones(10_000, dtype=torch.bfloat16))
    live = torch.nn.Parameter(torch.ones(10, dtype=torch.bfloat16))
    live.grad = torch.ones_like(live)
    before = graphs()
    hs.AdamW([("frozen", frozen), ("live", live)]).step()
    assert graphs() == before


def test_without_a_compiler_auto_is_eager_and_true_says_so(monkeypatch, at_once):
    monkeypatch.setenv("CXX", "/nowhere/g++")
    p = torch.nn.Parameter(torch.ones(1_000_000, dtype=torch.bfloat16))
    p.grad = torch.ones_like(p)
    before = graphs()
    hs.AdamW([p]).step()
    assert graphs() == before
    with pytest.raises(RuntimeError) as error:
        hs.AdamW([p], compile=True)
    assert str(error.value) == (
        "AdamW: compile=True, but no C++ compiler is found. "
        "Install g++ (or name one in CXX), or use compile=False: the bits are the same."
    )


def failing(*args, **kwargs):
    raise RuntimeError("no luck")


def test_a_failing_compiler_leaves_everything_unchanged_under_true(monkeypatch, fresh):
    params = model(8)
    optimizer = hs.AdamW(params, compile=True)
    give_gradients(params, 0)
    monkeypatch.setattr(torch, "compile", lambda *args, **kwargs: failing)
    weights = [p.detach().clone() for _, p in params]
    with pytest.raises(
        RuntimeError, match=r"^AdamW: torch.compile failed \(RuntimeError\). Use compile=False"
    ):
        optimizer.step()
    assert all(torch.equal(w, p) for w, (_, p) in zip(weights, params, strict=True))
    assert all(state["step"] == 0 for state in optimizer.state.values())


def test_a_failing_compiler_means_eager_steps_and_one_warning_under_auto(monkeypatch, fresh, at_once):
    p = torch.nn.Parameter(torch.ones(1_000_000, dtype=torch.bfloat16))
    p.grad = torch.ones_like(p)
    optimizer = hs.AdamW([p])
    monkeypatch.setattr(torch, "compile", lambda *args, **kwargs: failing)
    with pytest.warns(RuntimeWarning, match="AdamW: torch.compile failed, steps run in eager mode"):
        optimizer.step()
    optimizer.step()
    assert optimizer.state[p]["step"] == 2


@pytest.mark.slow
def test_global_settings_of_torch_stay_as_they_are():
    from torch._dynamo import config as dynamo_config
    from torch._inductor import config as inductor_config

    before = dynamo_config.get_config_copy(), inductor_config.get_config_copy(), torch.is_grad_enabled()
    params = model(5)
    give_gradients(params, 0)
    hs.AdamW(params, compile=True).step()
    assert before == (
        dynamo_config.get_config_copy(),
        inductor_config.get_config_copy(),
        torch.is_grad_enabled(),
    )


@pytest.mark.slow
def test_steps_run_where_torch_compile_is_switched_off():
    code = (
        "import torch, halfstep_torch as hs\n"
        "p = torch.nn.Parameter(torch.ones(5000, dtype=torch.bfloat16)); p.grad = torch.ones_like(p)\n"
        "o = hs.AdamW([p], compile=True); o.step(); print(p.float().sum().item())\n"
    )
    outputs = set()
    for disable in ("0", "1"):
        environment = {**os.environ, "TORCHDYNAMO_DISABLE": disable}
        done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, env=environment)
        assert done.returncode == 0, done.stderr
        outputs.add(done.stdout)
    assert len(outputs) == 1


def test_the_default_setting_is_the_one_of_the_class():
    p = torch.nn.Parameter(torch.ones(3, dtype=torch.bfloat16))
    p.grad = torch.ones_like(p)
    optimizer = hs.AdamW([p])
    optimizer.step()
    assert optimizer.state[p]["exp_avg"].dtype == torch.bfloat16
    assert optimizer.state[p]["exp_avg_sq"].dtype == torch.bfloat16


def test_a_device_that_was_never_proved_is_stepped_eagerly_unless_told_and_then_says_so():
    other, made = torch.device("xpu"), []
    assert not CompileChoice("AdamW", "auto").prepare("AdamW", other, 10**9, lambda: made.append(1))
    assert not made
    with pytest.warns(RuntimeWarning, match="compile=True on xpu.*not promised"):
        assert CompileChoice("AdamW", True).prepare("AdamW", other, 10, lambda: made.append(1))
    assert made


@pytest.mark.parametrize("choice", [True, "auto"])
def test_a_torch_without_an_option_for_exact_gpu_code_says_so_and_auto_steps_eagerly(monkeypatch, choice):
    has = inductor._has
    monkeypatch.setattr(
        inductor, "_has", lambda config, name: name != "eager_numerics.disable_ftz" and has(config, name)
    )
    made, ours = [], CompileChoice("AdamW", choice)
    with pytest.warns(RuntimeWarning, match="has no option eager_numerics.disable_ftz of Inductor"):
        compiled = ours.prepare("AdamW", torch.device("cuda"), 10, lambda: made.append(1))
    assert compiled == bool(made) == (choice is True)
    if choice == "auto":
        assert not ours.prepare(
            "AdamW", torch.device("cuda"), 10, lambda: made.append(1)
        )  # without a warning


def test_a_cpu_on_which_no_vector_was_compiled_is_told_so_once_in_the_log(monkeypatch, caplog):
    say_once.cache_clear()
    for machine, lines in (("x86_64", 0), ("aarch64", 1), ("aarch64", 1)):
        monkeypatch.setattr("platform.machine", lambda machine=machine: machine)
        assert CompileChoice("AdamW", True).prepare("AdamW", torch.device("cpu"), 10, lambda: None)
        told = [record for record in caplog.records if "never on linux and aarch64" in record.getMessage()]
        assert len(told) == lines


# What a user may have set for other code, and what decides bits on a CPU.
SETTINGS = {
    "cpp.enable_floating_point_contract_flag": "fast",
    "cpp.enable_unsafe_math_opt_flag": True,
    "cpu_backend": "halide",
}


@pytest.mark.slow
@IMPORTS_INDUCTOR
@pytest.mark.parametrize("name", SETTINGS)
def test_a_setting_of_inductor_changes_no_bit(fresh, name):
    from torch._inductor import config

    runs = []
    for compile in (False, True):
        p = torch.nn.Parameter(torch.linspace(-1, 1, 1 << 15))
        optimizer = hs.AdamW([("w", p)], lr=1e-2, weight_decay=0.1, compile=compile, **hs.recipes.one_pass)
        with config.patch({name: SETTINGS[name]}):
            run([("w", p)], optimizer, range(3))
        runs.append(snapshot(optimizer))
    assert_same_snapshots(*runs)


@pytest.mark.skipif(
    sys.platform != "linux" or platform.machine() != "x86_64", reason="flags of g++ on x86-64"
)
def test_a_flag_that_the_compiler_does_not_know_is_left_out(monkeypatch):
    monkeypatch.setattr(inductor, "_QUICKER", ("-O2", "-mno-such-flag"))
    march = inductor.compile_options(torch.device("cpu"))["cpp.march"]
    assert march.split()[-1] == "-O2"

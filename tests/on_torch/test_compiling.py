"""Compilation: one graph for every shape and number, chosen when it pays, and nothing lost when it fails."""

import collections
import contextlib
import cProfile
import itertools
import os
import subprocess
import sys
import time

import pytest
import torch
from torch._dynamo.utils import counters
from torch._inductor.utils import run_and_get_code

import halfstep_torch as hs
from halfstep_torch.engine import batches, compile_choice, compiled_stage, groups, inductor
from halfstep_torch.engine.compile_choice import CompileChoice
from halfstep_torch.say_once import say_once
from on_torch.steps import DEFAULT, GRID, assert_same_snapshots, snapshot

# Inductor's modules warn, as they are imported, of what torch itself has deprecated.
IMPORTS_INDUCTOR = pytest.mark.filterwarnings(
    "ignore:`torch.jit.script_method` is deprecated:DeprecationWarning"
)


@pytest.fixture
def fresh():
    """Forget compiled kernels before and after."""
    compiled_stage.compiled_stage.cache_clear()
    yield
    compiled_stage.compiled_stage.cache_clear()


@pytest.fixture
def at_once(monkeypatch):
    """Let "auto" compile in the first step."""
    monkeypatch.setattr(compile_choice, "_COST_OF_COMPILING", 1)


def graphs() -> int:
    return counters["stats"]["unique_graphs"]


def shapes() -> list[tuple[int, ...]]:
    """Return 30 distinct shapes of ranks 0 to 4."""
    lengths = [(), (1,), (2,), (7,), (64,), (1000,)]
    grids = [(a, b) for a, b in itertools.product((1, 3, 64, 130), (1, 5, 64))]
    kernels = [(8, c, k, k) for c, k in itertools.product((1, 3, 8), (1, 3))]
    return [*lengths, *grids, *kernels, (2, 3, 4), (5, 1, 7), (1, 1, 1), (16, 4, 4), (4, 4, 16), (70000,)]


def model(count: int, dtype=torch.bfloat16) -> list[tuple[str, torch.nn.Parameter]]:
    generator = torch.Generator().manual_seed(0)
    cycle = itertools.cycle(shapes())
    return [
        (f"layer.{i}", torch.nn.Parameter(torch.randn(next(cycle), generator=generator).to(dtype)))
        for i in range(count)
    ]


def give_gradients(params, seed: int) -> None:
    generator = torch.Generator().manual_seed(seed)
    for _, p in params:
        p.grad = torch.randn(p.shape, generator=generator).to(p.dtype)


def take_steps(optimizer, params, count: int) -> None:
    """Step `count` times with the gradients of seeds 0, 1, ..."""
    for step in range(count):
        give_gradients(params, step)
        optimizer.step()


def test_two_hundred_parameters_of_thirty_shapes_are_one_graph(fresh):
    assert len(set(shapes())) == 30
    params = model(200)
    optimizer = hs.AdamW(params, compile=True)
    before, start = graphs(), time.process_time()
    for step in range(4):
        give_gradients(params, step)
        # Schedulers write the groups; none of this may compile again.
        optimizer.param_groups[0].update(lr=1e-3 * (step + 1), betas=(0.9 - step / 100, 0.999), eps=1e-7)
        optimizer.step()
        if step == 0:
            assert time.process_time() - start < 60
        assert graphs() - before == 1


def test_other_seeds_rates_and_optimizers_share_the_graph(fresh):
    before = graphs()
    for seed, lr in ((0, 1e-3), (2**50, 1e-2)):
        params = model(4)
        optimizer = hs.AdamW(params, lr=lr, seed=seed, weight_decay=0.1 + lr, compile=True)
        give_gradients(params, seed)
        optimizer.step()
    assert graphs() - before == 1


def test_a_step_without_random_words_is_one_graph_however_many_arrays(fresh):
    before = graphs()
    for count in (1, 3):
        params = model(count, torch.float32)
        optimizer = hs.AdamW(params, compile=True)
        give_gradients(params, 0)
        optimizer.step()
    assert graphs() - before == 1


def test_steps_pass_dynamo_when_they_compile_and_never_again(fresh, monkeypatch):
    passed = []
    compile = torch.compile

    def watched(function, **options):
        through_dynamo = compile(function, **options)
        return lambda *args: passed.append(len(args)) or through_dynamo(*args)

    monkeypatch.setattr(torch, "compile", watched)
    params = model(12)
    optimizer = hs.AdamW(params, compile=True)
    take_steps(optimizer, params, 3)
    assert len(passed) == 2  # of two lengths


def test_a_kernel_whose_arguments_are_not_recognised_is_called_through_dynamo(fresh, monkeypatch):
    runs = []
    for places in (inductor._places, lambda argument, tensors: []):
        compiled_stage.compiled_stage.cache_clear()
        monkeypatch.setattr(inductor, "_places", places)
        params = model(12)
        optimizer = hs.AdamW(params, compile=True)
        take_steps(optimizer, params, 2)
        runs.append(snapshot(optimizer))
    assert_same_snapshots(*runs)


def short_and_long() -> list[tuple[str, torch.nn.Parameter]]:
    """Return weights shorter than a row, of whole rows, with a rest, in many pieces, and of no element."""
    lengths = (1, 255, 256, 257, 0, 1000, 16_384, 2 * 16_384 + 3)
    generator = torch.Generator().manual_seed(0)
    params = [torch.nn.Parameter(torch.randn(n, generator=generator).bfloat16()) for n in lengths]
    return [(f"w{n}", p) for n, p in zip(lengths, params, strict=True)]


def after_two_steps(make, **options) -> dict:
    params = short_and_long()
    optimizer = make(params, lr=1e-2, **options)
    for step in range(2):
        give_gradients(params, step)
        before = [p.grad.clone() for _, p in params]
        optimizer.step()
        assert all(torch.equal(p.grad, g) for (_, p), g in zip(params, before, strict=True))
    return snapshot(optimizer)


@pytest.mark.parametrize("make", [hs.AdamW, pytest.param(hs.Lamb, marks=pytest.mark.slow)])
def test_packed_arrays_have_the_bits_of_eager_steps_and_gradients_stay(make):
    assert_same_snapshots(after_two_steps(make, compile=True), after_two_steps(make, compile=False))


@pytest.mark.slow
@pytest.mark.parametrize("choice", [True, "auto"])
def test_a_profiler_changes_nothing_about_compiling(fresh, at_once, choice):
    runs = []
    for profiler in (contextlib.nullcontext(), cProfile.Profile()):
        compiled_stage.compiled_stage.cache_clear()
        p = torch.nn.Parameter(torch.linspace(-1, 1, 10_000).bfloat16())
        p.grad = torch.ones_like(p)
        optimizer = hs.AdamW([p], compile=choice)
        before = graphs()
        with profiler:
            optimizer.step()
        assert graphs() - before == 1
        runs.append(snapshot(optimizer))
    assert_same_snapshots(*runs)


def test_another_number_of_threads_is_another_kernel(monkeypatch):
    asked = []
    monkeypatch.setattr(
        compiled_stage,
        "compiled_stage",
        lambda *arguments: asked.append(arguments) or (lambda *tensors: None),
    )
    for threads in (1, 2):
        monkeypatch.setattr(torch, "get_num_threads", lambda threads=threads: threads)
        params = model(1)
        give_gradients(params, 0)
        hs.AdamW(params, compile=True).step()
    assert asked[0][:-1] == asked[-1][:-1]
    assert asked[0] != asked[-1]


@pytest.mark.slow
def test_rows_of_one_parameter_have_the_bits_of_rows_of_many(fresh, monkeypatch):
    """On a GPU they have a kernel of their own; so they have here. Of over 2^15 elements one is alone."""
    monkeypatch.setattr(compiled_stage, "kinds", lambda stage, device: (False, True))
    shapes = [(40, 1024), (37, 911), (5, 7), (11,)]
    ours, theirs = [
        [(f"layer.{i}", torch.nn.Parameter(torch.ones(shape, dtype=torch.bfloat16))) for i, shape in rows]
        for rows in (list(enumerate(shapes)),) * 2
    ]
    optimizers = [hs.AdamW(ours, compile=True), hs.AdamW(theirs, compile=False)]
    for optimizer, params in zip(optimizers, (ours, theirs), strict=True):
        take_steps(optimizer, params, 3)
    for (_, p), (_, q) in zip(ours, theirs, strict=True):
        assert torch.equal(p.view(torch.int16), q.view(torch.int16))


def test_plans_and_rows_are_made_once_whatever_the_rate(monkeypatch):
    made = []
    for where, name in ((groups, "make_plan"), (batches, "RowPlan")):
        make = getattr(where, name)
        monkeypatch.setattr(where, name, lambda *args, make=make, name=name: made.append(name) or make(*args))
    params = model(8)
    optimizer = hs.AdamW(params)
    for step in range(3):
        give_gradients(params, step)
        optimizer.param_groups[0]["lr"] = 1e-3 / (step + 1)
        optimizer.step()
    assert collections.Counter(made) == {"make_plan": 8, "RowPlan": 1}
    params[1][1].data = params[1][1].detach().clone()  # elsewhere in memory
    params[2][1].grad = None
    optimizer.step()
    assert collections.Counter(made) == {"make_plan": 8, "RowPlan": 2}
    optimizer.param_groups[0]["weight_decay"] = 0.0
    optimizer.step()
    assert collections.Counter(made) == {"make_plan": 15, "RowPlan": 3}


def test_a_long_compilation_is_explained_once(monkeypatch, fresh, caplog):
    inductor._say.cache_clear()
    monkeypatch.setattr(inductor, "_PATIENCE", 0.0)
    for dtype in (torch.bfloat16, torch.float32):
        params = model(2, dtype)
        give_gradients(params, 0)
        hs.AdamW(params, compile=True).step()
    ours = [record.getMessage() for record in caplog.records if record.name == "halfstep_torch"]
    assert len(ours) == 1
    assert ours[0].startswith("torch.compile is compiling the optimizer step")
    assert "compile=False" in ours[0]


@pytest.mark.slow
def test_more_plans_than_dynamo_allows_graphs_of_one_function_all_compile(fresh):
    before = graphs()
    settings = [s for s in GRID if (s.param, s.storage) == ("float32", "nearest")][:10]
    for setting in settings:
        p = torch.nn.Parameter(torch.ones(100))
        optimizer = setting.optimizer([p], compile=True)
        p.grad = torch.ones(100)
        optimizer.step()
    assert graphs() - before == 10


@pytest.mark.slow
@pytest.mark.parametrize("storage", ["stochastic", "nearest", "compensated"])
def test_weights_are_stepped_in_the_loop_of_their_moments(fresh, storage):
    # A second loop would read the moments again. Inductor makes one of weights that draw no words, if it may.
    p = torch.nn.Parameter(torch.ones(4096, dtype=torch.bfloat16))
    p.grad = torch.ones_like(p)
    optimizer = hs.AdamW([p], param_storage=storage, compile=True)
    _, (code,) = run_and_get_code(optimizer.step)
    assert code.count("for(int64_t x0=") == 1


def test_eager_and_compiled_steps_of_a_whole_model_have_the_same_bits():
    runs = []
    for compile in (False, True):
        params = model(60)
        optimizer = hs.AdamW(params, weight_decay=0.1, compile=compile)
        take_steps(optimizer, params, 3)
        runs.append(snapshot(optimizer))
    assert_same_snapshots(*runs)


def test_auto_compiles_once_eager_steps_have_cost_as_much_as_compiling(fresh, monkeypatch):
    params = model(12)
    elements = sum(p.numel() for _, p in params)
    monkeypatch.setattr(compile_choice, "_COST_OF_COMPILING", 3 * elements)
    optimizer = hs.AdamW(params)
    before = graphs()
    for step, compiled in enumerate((0, 0, 1, 1)):
        give_gradients(params, step)
        optimizer.step()
        assert graphs() - before == compiled


def test_a_run_that_changes_over_to_compiled_steps_has_the_bits_of_one_that_does_not(fresh, monkeypatch):
    params, runs = model(12), []
    for cost in (2 * sum(p.numel() for _, p in params), 10**12):
        monkeypatch.setattr(compile_choice, "_COST_OF_COMPILING", cost)
        params = model(12)
        optimizer = hs.AdamW(params, weight_decay=0.1)
        take_steps(optimizer, params, 4)
        runs.append(snapshot(optimizer))
    assert_same_snapshots(*runs)


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


@IMPORTS_INDUCTOR
@pytest.mark.parametrize("compile", [False, True])
def test_a_step_inside_a_compiled_function_has_the_bits_of_one_outside(compile):
    runs = []
    for decorate in (lambda function: function, torch.compile):
        params = model(10)
        optimizer = hs.AdamW(params, compile=compile)

        @decorate
        def train(x, optimizer=optimizer):
            y = x * 2
            optimizer.step()
            return y + 1

        give_gradients(params, 0)
        assert torch.equal(train(torch.ones(3)), torch.full((3,), 3.0))
        runs.append(snapshot(optimizer))
    assert_same_snapshots(*runs)


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
    assert optimizer.state[p]["exp_avg"].dtype == getattr(torch, DEFAULT.mu)
    assert optimizer.state[p]["exp_avg_sq"].dtype == getattr(torch, DEFAULT.nu)


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
            take_steps(optimizer, [("w", p)], 3)
        runs.append(snapshot(optimizer))
    assert_same_snapshots(*runs)

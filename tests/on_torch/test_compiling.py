"""Compilation: one graph for every shape and number, and the bits of eager steps."""

import collections
import contextlib
import cProfile
import itertools
import sys
import time
import types

import pytest
import torch
from torch._inductor.utils import run_and_get_code

import halfstep_torch as hs
from halfstep_torch.engine import batches, compile_choice, compiled_stage, groups, inductor
from on_torch.compiling import IMPORTS_INDUCTOR, graphs, model, shapes
from on_torch.steps import assert_same_snapshots, give_gradients, run, snapshot, step_by_ones

DTYPES = (torch.float32, torch.bfloat16)


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
        run(params, optimizer, [seed])
    assert graphs() - before == 1


def test_a_step_without_random_words_is_one_graph_however_many_arrays(fresh):
    before = graphs()
    for count in (1, 3):
        params = model(count, torch.float32)
        optimizer = hs.AdamW(params, compile=True)
        run(params, optimizer, [0])
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
    run(params, optimizer, range(3))
    assert len(passed) == 2  # of two lengths


def test_a_kernel_whose_arguments_are_not_recognised_is_called_through_dynamo(fresh, monkeypatch):
    runs = []
    for places in (inductor._places, lambda argument, tensors: []):
        compiled_stage.compiled_stage.cache_clear()
        monkeypatch.setattr(inductor, "_places", places)
        params = model(12)
        optimizer = hs.AdamW(params, compile=True)
        run(params, optimizer, range(2))
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
        optimizer = hs.AdamW([("w", p)], compile=choice)
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
        run(params, optimizer, range(3))
    for (_, p), (_, q) in zip(ours, theirs, strict=True):
        assert torch.equal(p.view(torch.int16), q.view(torch.int16))


def test_plans_and_rows_are_made_once_whatever_the_rate(monkeypatch):
    made = []
    for where, name in ((groups, "make_plan"), (batches, "make_rows")):
        make = getattr(where, name)
        monkeypatch.setattr(where, name, lambda *args, make=make, name=name: made.append(name) or make(*args))
    params = model(8)
    optimizer = hs.AdamW(params)
    for step in range(3):
        give_gradients(params, step)
        optimizer.param_groups[0]["lr"] = 1e-3 / (step + 1)
        optimizer.step()
    assert collections.Counter(made) == {"make_plan": 8, "make_rows": 1}
    params[1][1].data = params[1][1].detach().clone()  # elsewhere in memory
    params[2][1].grad = None
    optimizer.step()
    assert collections.Counter(made) == {"make_plan": 8, "make_rows": 2}
    optimizer.param_groups[0]["weight_decay"] = 0.0
    optimizer.step()
    assert collections.Counter(made) == {"make_plan": 15, "make_rows": 3}
    alike = hs.AdamW([(f"{i}", torch.nn.Parameter(torch.ones(3))) for i in range(9)])
    assert len({id(plan) for _, _, plan in alike.plans()}) == 1


def test_rows_of_parameters_that_are_stepped_as_before_stay(monkeypatch):
    """As a mixture of experts needs it, whose skipped experts have no gradient."""
    made, make = [], batches.make_rows
    monkeypatch.setattr(
        batches, "make_rows", lambda slots, *args: made.append(len(slots)) or make(slots, *args)
    )
    params = [(f"w{i}", torch.nn.Parameter(torch.ones(9, dtype=dtype))) for i in range(3) for dtype in DTYPES]
    params = [(f"{name}.{param.dtype}", param) for name, param in params]
    optimizer = hs.AdamW(params, compile=False)
    for skipped in (None, None, 1, 1):
        give_gradients(params, 0)
        if skipped:
            params[skipped][1].grad = None
        optimizer.step()
    assert made == [3, 3, 2]


@pytest.mark.slow
def test_more_plans_than_dynamo_allows_graphs_of_one_function_all_compile(fresh):
    before = graphs()
    roundings = "stochastic", "nearest_unchecked"
    nus = ("bfloat16", roundings[0]), ("bfloat16", roundings[1]), ("float32", roundings[0])
    for mu, mu_rounding, (nu, nu_rounding) in [*itertools.product(("bfloat16", "float16"), roundings, nus)][
        :10
    ]:
        p = torch.nn.Parameter(torch.ones(100))
        formats = {"mu_dtype": mu, "mu_rounding": mu_rounding, "nu_dtype": nu, "nu_rounding": nu_rounding}
        optimizer = hs.AdamW([p], **formats, compile=True)
        step_by_ones(optimizer)
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
        run(params, optimizer, range(3))
        runs.append(snapshot(optimizer))
    assert_same_snapshots(*runs)


def test_a_run_that_changes_over_to_compiled_steps_has_the_bits_of_one_that_does_not(fresh, monkeypatch):
    params, runs = model(12), []
    for cost in (2 * sum(p.numel() for _, p in params), 10**12):
        monkeypatch.setattr(compile_choice, "_COST_OF_COMPILING", cost)
        params = model(12)
        optimizer = hs.AdamW(params, weight_decay=0.1)
        run(params, optimizer, range(4))
        runs.append(snapshot(optimizer))
    assert_same_snapshots(*runs)


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


def test_a_machine_without_a_cuda_toolkit_compiles_where_warnings_are_errors(monkeypatch):
    """torch then says that powers may have other bits. On a device that ended the first compiled step."""
    tasks = pytest.importorskip("torch._inductor.runtime.compile_tasks")
    choose = getattr(tasks, "_set_triton_libdevice_path_impl", None) or pytest.skip("this torch chooses none")
    knobs = types.SimpleNamespace(nvidia=types.SimpleNamespace(libdevice_path=None))
    monkeypatch.setitem(sys.modules, "triton", types.SimpleNamespace(knobs=knobs))
    monkeypatch.setattr(torch.version, "cuda", "13.0")
    monkeypatch.setattr("torch.utils.cpp_extension.CUDA_HOME", None)
    monkeypatch.delenv("TRITON_LIBDEVICE_PATH", raising=False)
    with pytest.raises(UserWarning, match="CUDA_HOME not set"):
        choose()
    with inductor.compiling():
        choose()

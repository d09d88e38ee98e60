"""Generated kernels: the traced graph and the C library have the bits of plain steps."""

import re
import subprocess
import sys

import numpy as np
import pytest
import torch

import halfstep_torch as hs
from halfstep.kernels import build
from halfstep.kernels.c_source import c_source
from halfstep.kernels.graph import NoGeneratedForm
from halfstep.kernels.simplify import simplified
from halfstep_torch.distributed.window import Window
from halfstep_torch.engine.kernels.tables import row_of
from halfstep_torch.engine.kernels.trace import trace
from halfstep_torch.engine.number_places import flat
from halfstep_torch.engine.plain import step_pieces
from on_torch.graph_values import kernels_of, stages_of, values
from on_torch.kernel_steps import MAKES, adamw, after_steps, chain, give, needs_compiler, parameters
from on_torch.steps import assert_same_but_for_nan, assert_same_snapshots


@pytest.mark.filterwarnings("ignore:.*holds 18 binades")
@pytest.mark.parametrize("name", MAKES)
def test_a_traced_graph_has_the_values_of_its_stage(name):
    assert_graphs_have_the_values_of_stages(MAKES[name])


def assert_graphs_have_the_values_of_stages(make):
    params = [("w", torch.nn.Parameter(torch.zeros(64, 1024, dtype=torch.bfloat16)))]
    params[0][1].grad = torch.zeros_like(params[0][1])
    generator = torch.Generator().manual_seed(1)
    for stage, places, numbers, incoming in stages_of(make(params, compile=False)):
        graph, rows, width = simplified(trace(stage, places, incoming)), 24, stage.width
        p = torch.randn(rows, width, generator=generator).to(stage.dtype)
        g = torch.randn(rows, width, generator=generator).mul(1e-3).to(incoming)
        g.view(-1)[::97], g.view(-1)[5] = 0, float("inf")
        state = {}
        for key, spec in stage.arrays.items():
            shape = (rows * spec.size(width),) if spec.scale_of is not None else (rows, spec.size(width))
            state[key] = torch.full(shape, spec.start, dtype=torch.float32).to(spec.dtype)
        index = torch.arange(rows * width, dtype=torch.int32).view(rows, width) + 1000
        keys = [torch.tensor(3 + 2 * i, dtype=torch.int32) for i in range(graph.keys)]
        given = {f"key.{i}": x for i, x in enumerate(keys)} | {"p": p, "g": g, "index": index, **state}
        given |= {f"number.{i}": torch.tensor(float(x)) for i, x in enumerate(flat(numbers))}
        out, new = stage.run(p, g, state, numbers, stage.row_words(lambda index=index: index, keys))
        expected = {"p" if stage.applies else "u": out, **new}
        found = values(graph, given)
        assert found.keys() == expected.keys()
        for key, x in found.items():
            y = expected[key].reshape(x.shape).to(x.dtype)
            nan = x.float().isnan() & y.float().isnan()
            x, y = (torch.where(nan, torch.zeros((), dtype=x.dtype), z).view(torch.uint8) for z in (x, y))
            assert torch.equal(x, y), key


FUNCTIONS = {
    "reversed": lambda x: (2 - x) + 1 / x + 3.0 / x + 2 * x + (1 + x),
    "in place": lambda x: x.clone().add_(x).mul_(0.5).clamp_(-1, 1).neg_(),
    "assigned": lambda x: add_to(x.clone()),
    "powers": lambda x: x**2 + x.pow(2) + torch.square(x) + x.reciprocal(),
    "extrema": lambda x: torch.max(x, -x) + torch.min(x, x * 2) + x.maximum(-x) + torch.minimum(x, x * x),
    "choices": lambda x: x.where(x > 0, -x) + torch.where(x > 0, 1.0, x) + torch.where(x > 0, 1, 0),
    "bounds": lambda x: x.clamp(min=-1) + torch.clip(x, max=1) + x.clamp_max(1) + torch.clamp_min(x, -2),
    "options": lambda x: torch.add(x, other=x) + torch.sub(x, 1, alpha=1),
    "casts": lambda x: x.bfloat16().float() + x.type(torch.float16).type_as(x) + x.to(dtype=torch.float16),
    "bits": lambda x: (x.view(torch.int32) & 0x7FFFFFFF | 1 ^ 3).bitwise_and(-2).view(dtype=torch.float32),
    "truth": lambda x: torch.logical_and(x > 0, ~(x < 1)).float() + (x != 0).float() + x.isfinite().float(),
    "filled": lambda x: x + torch.full_like(x, 3.0) + torch.ones_like(x) + torch.zeros_like(x).fill_(2),
    "constants": lambda x: x * torch.tensor(2.0, device=x.device) + torch.arange(3)[2] * x,
    "indices": lambda x: x[None, ..., :].squeeze(0) + x.unsqueeze(-1)[..., 0] + x.flatten().view(x.shape),
    "tables": lambda x: torch.tensor([1.0, 4.0])[(x > 0).long()],
}


def add_to(x):
    x += 1
    x *= 3
    x -= 0.5
    x /= 7
    return x


@pytest.mark.parametrize("name", FUNCTIONS)
def test_functions_that_a_rule_calls_have_their_values_in_a_graph(name):
    class ByFunctions(hs.Rule):
        def update(self, g, p, n, m, op):
            return op.apply(FUNCTIONS[name], g)

    assert_graphs_have_the_values_of_stages(chain(ByFunctions(), hs.scale_by_learning_rate(1e-2)))


def assert_has_kernels(make, dtype=torch.bfloat16) -> None:
    """An operation without a generated form would take plain steps, which have the bits of plain steps."""
    params = parameters(dtype)
    give(params, 0, special=False)
    assert kernels_of(make(params, compile=False))


@needs_compiler
@pytest.mark.filterwarnings("ignore:.*holds 18 binades")
@pytest.mark.parametrize("name", MAKES)
def test_kernels_have_the_bits_of_plain_steps(name):
    assert_has_kernels(MAKES[name])
    ours, theirs = (after_steps(MAKES[name], compile) for compile in (True, False))
    assert_same_but_for_nan(ours, theirs)


@needs_compiler
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
@pytest.mark.parametrize("name", ["default", "eight_bit", "SGD"])
def test_kernels_of_other_weights_have_the_bits_of_plain_steps(name, dtype):
    assert_has_kernels(MAKES[name], dtype)
    ours, theirs = (
        after_steps(MAKES[name], compile, dtype=dtype, special=False) for compile in (True, False)
    )
    assert_same_snapshots(ours, theirs)


@needs_compiler
@pytest.mark.parametrize(
    "name", ["default", "feedback", "compensated", "split8", "split16", "master", "nearest"]
)
def test_kernels_of_float16_weights_have_the_bits_of_plain_steps(name):
    def make(params, compile):
        with torch.no_grad():
            for _, p in params:
                p.view(-1)[::3] *= 2.0**-16  # subnormal numbers, which updates of 1e-6 leave subnormal
        optimizer = MAKES[name](params, compile=compile)
        optimizer.param_groups[0]["lr"] = 1e-6
        return optimizer

    assert_has_kernels(make, torch.float16)
    ours, theirs = (after_steps(make, compile, dtype=torch.float16) for compile in (True, False))
    assert_same_but_for_nan(ours, theirs)


@needs_compiler
@pytest.mark.parametrize("name", ["default", "four_bit"])
def test_the_number_of_threads_changes_no_bit_of_kernels(name):
    threads, runs = torch.get_num_threads(), []
    try:
        for count in (1, 2, 3):
            torch.set_num_threads(count)
            runs.append(after_steps(MAKES[name], True, special=False))
    finally:
        torch.set_num_threads(threads)
    assert_same_snapshots(runs[0], runs[1])
    assert_same_snapshots(runs[0], runs[2])


class ScaleByChange(hs.Rule):
    """The change of the gradient, in blocks with scales, and the gradient itself."""

    change_dtype: object = hs.scaled("float8_e4m3fn")
    change_rounding: str = "stochastic"
    seed: int = 0
    change = hs.moment()
    last = hs.moment()

    def update(self, g, p, n, m, op):
        change = m.change.round(g - m.last.value)
        m.last.round(g)
        return g + change


@needs_compiler
def test_an_array_is_replaced_after_the_last_loop_that_reads_it():
    # Codes need the largest magnitude of a block, so g - last is computed in two loops.
    make = chain(ScaleByChange(), hs.scale_by_learning_rate(1e-2), hs.round_stochastically())
    ours, theirs = (after_steps(make, compile, special=False) for compile in (True, False))
    assert_same_snapshots(ours, theirs)


def vectorized(source: str, tmp_path) -> tuple[int, int]:
    """Return how many loops over elements the compiler vectorizes, and how many there are."""
    text, report = tmp_path / "kernel.c", tmp_path / "report"
    text.write_text(source)
    command = [
        build.find_cc(),
        *build.flags(),
        f"-fopt-info-vec={report}",
        str(text),
        "-o",
        str(tmp_path / "k.so"),
    ]
    subprocess.run(command, check=True)
    lines = source.splitlines()
    loops = {i for i, line in enumerate(lines, 1) if lines[i - 2].strip() == "#pragma GCC ivdep"}
    found = {
        int(x) for x in re.findall(r"kernel\.c:(\d+):\d+: optimized: +loop vectorized", report.read_text())
    }
    return len(loops & found), len(loops)


def test_generating_source_takes_time_in_proportion_to_the_graph():
    params = [("w", torch.nn.Parameter(torch.zeros(64, 1024, dtype=torch.bfloat16)))]
    params[0][1].grad = torch.zeros_like(params[0][1])
    ((stage, places, _, incoming),) = stages_of(MAKES["split16 and four_bit"](params, compile=False))
    graph, calls = simplified(trace(stage, places, incoming)), 0

    def profile(frame, event, _):
        nonlocal calls
        calls += event == "call"

    sys.setprofile(profile)
    try:
        c_source(graph)
    finally:
        sys.setprofile(None)
    assert calls < 1000 * len(graph.nodes)


QUICK = ("default", "one_pass", "eight_bit", "four_bit", "float16", "tables")


@needs_compiler
@pytest.mark.filterwarnings("ignore:.*holds 18 binades")
@pytest.mark.parametrize(
    "name", [pytest.param(x, marks=() if x in QUICK else pytest.mark.slow) for x in MAKES]
)
def test_the_compiler_vectorizes_every_loop_over_elements(name, tmp_path):
    if "gcc" not in subprocess.run([build.find_cc(), "--version"], capture_output=True, text=True).stdout:
        pytest.skip("reads the reports of gcc")
    params = [("w", torch.nn.Parameter(torch.zeros(64, 1024, dtype=torch.bfloat16)))]
    params[0][1].grad = torch.zeros_like(params[0][1])
    for stage, places, _, incoming in stages_of(MAKES[name](params, compile=False)):
        found, loops = vectorized(c_source(simplified(trace(stage, places, incoming))), tmp_path)
        assert found == loops > 0


def test_an_operation_without_a_generated_form_is_named():
    params = [("w", torch.nn.Parameter(torch.zeros(64, dtype=torch.bfloat16)))]
    params[0][1].grad = torch.zeros_like(params[0][1])
    (stage, places, _, incoming), *_ = stages_of(adamw(params, compile=False))
    run = type(stage).run

    class WithSine(type(stage)):
        def run(self, p, u, *rest):
            return run(self, p, torch.sin(u.float()), *rest)

    fields = {name: getattr(stage, name) for name in stage.__dataclass_fields__}
    with pytest.raises(NoGeneratedForm, match=r"^sin$"):
        trace(WithSine(**fields), places, incoming)


@needs_compiler
@pytest.mark.parametrize("recipe", [None, "eight_bit"])
@pytest.mark.parametrize(
    "window",
    [
        Window((64, 1024), (8, 0), (16, 1024)),
        Window((64, 1024), (0, 256), (64, 128)),
        Window((1 << 32, 1024), ((1 << 22) - 3, 0), (8, 1024)),
        Window((1 << 34, 4, 256), (1 << 32, 2, 0), (4, 2, 256)),
    ],
    ids=["rows", "columns", "across 2^32", "past 2^32"],
)
def test_a_kernel_steps_a_window_with_the_words_of_the_whole_array(window, recipe):
    p = torch.nn.Parameter(torch.linspace(-1, 1, 64 * 1024).view(64, 1024).bfloat16())
    p.grad = torch.ones_like(p)
    optimizer = hs.AdamW([("w", p)], lr=1e-2, **({"recipe": recipe} if recipe else {}))
    (kernel,), ((stage, _, numbers, _),) = kernels_of(optimizer), stages_of(optimizer)
    n = int(np.prod(window.shape))
    keys = np.arange(1, 2 * sum(1 + len(roles) for roles in stage.roles), 2, dtype=np.uint32)[:, None].copy()
    g = torch.linspace(-1e-3, 1e-2, n).bfloat16()
    runs = []
    for use_kernel in (True, False):
        x = torch.linspace(-1, 1, n).bfloat16()
        state = {
            name: torch.full((spec.size(n),), spec.start, dtype=torch.float32).to(spec.dtype)
            for name, spec in stage.arrays.items()
        }
        if use_kernel:
            table = np.array([row_of(stage, window, [x, g, *state.values()])], np.int64)
            kernel(table, keys, np.array([flat(numbers)], np.float32), None)
        else:
            of_leaf = keys[:, 0].view(np.int32).tolist()
            step_pieces(
                stage, x, g, None, state, numbers, of_leaf, lambda i, j: window.indices(torch.arange(i, j))
            )
        runs.append([x, *state.values()])
    for ours, theirs in zip(*runs, strict=True):
        assert torch.equal(ours.view(torch.uint8), theirs.view(torch.uint8))

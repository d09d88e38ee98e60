"""Kernels that add up squares: trust ratios and clipping keep no update, and have the bits of plain steps."""

import functools

import pytest
import torch

import halfstep_torch as hs
from halfstep.kernels import build
from halfstep_torch.engine.kernels.kernel import Kernel
from halfstep_torch.engine.kernels.norm_kernel import NormKernel
from halfstep_torch.engine.scaling import NotScaling, asked_norms, scale_of
from halfstep_torch.engine.step_numbers import attach_numbers
from halfstep_torch.launch import Launch
from on_torch.steps import assert_same_snapshots, snapshot
from on_torch.test_temporaries import peak_bytes

pytestmark = pytest.mark.skipif(build.find_cc() is None, reason="needs a C compiler")


def chain(*links):
    return lambda params, compile: hs.Optimizer(params, hs.chain(*links), compile=compile)


MAKES = {
    "Lamb16": functools.partial(hs.Lamb16, lr=1e-2, weight_decay=0.1),
    "Lamb16 and split16": functools.partial(hs.Lamb16, lr=1e-2, param_storage="split16", maximize=True),
    "Lamb and master": functools.partial(hs.Lamb, lr=1e-2, param_storage="master"),
    "Lamb in 4 bits": functools.partial(hs.Lamb, lr=1e-2, recipe="four_bit"),
    "exact Lamb in 8 bits": functools.partial(hs.Lamb, lr=1e-2, recipe="eight_bit", exact=True),
    "exact Lamb16": functools.partial(hs.Lamb16, lr=1e-2, exact=True),
    "ratio of the gradient": chain(hs.scale_by_trust_ratio(), hs.scale_by_learning_rate(0.5)),
    "clipping": chain(hs.clip_by_global_norm(1e-3), hs.scale_by_learning_rate(0.5)),
    "exact clipping": chain(hs.clip_by_global_norm(1e-3, exact=True), hs.scale_by_learning_rate(0.5)),
}
# Blocks that a border of a stretch or of a thread cuts, short ones, and many stretches.
SHAPES = [(300, 300), (70_001,), (9, 1000), (5,), (), (0, 4), (64, 2048)]


def parameters(dtype=torch.bfloat16, size=1.0):
    generator, made = torch.Generator().manual_seed(0), []
    for i, shape in enumerate(SHAPES):
        p = torch.nn.Parameter(torch.randn(shape, generator=generator).to(dtype))
        g = torch.randn(shape, generator=generator) * size * 10.0**-i
        g.view(-1)[:50] *= 1e-25  # the square of a sum in its units would be past the largest number
        p.grad = g.to(dtype)
        made.append((f"w{i}", p))
    return made


def after_steps(make, compile, *, threads=1, dtype=torch.bfloat16, size=1.0):
    params, before = parameters(dtype, size), torch.get_num_threads()
    torch.set_num_threads(threads)
    try:
        optimizer = make(params, compile=compile)
        for step in range(3):
            if step == 1:  # from here on counts differ
                params[1][1].grad, kept = None, params[1][1].grad
            optimizer.step()
            if step == 1:
                params[1][1].grad = kept
    finally:
        torch.set_num_threads(before)
    return snapshot(optimizer)


@pytest.mark.parametrize("name", MAKES)
def test_norms_by_any_number_of_threads_have_the_bits_of_plain_steps(name):
    plain = after_steps(MAKES[name], False)
    for threads in (1, 3):
        assert_same_snapshots(after_steps(MAKES[name], True, threads=threads), plain)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
@pytest.mark.parametrize(
    "name", ["Lamb16", "exact Lamb16", "ratio of the gradient", "clipping", "exact clipping"]
)
def test_norms_of_other_weights_have_the_bits_of_plain_steps(name, dtype):
    # In float32 norms are past the largest number, and updates are taken 2^-64 times.
    size = 1e36 if dtype == torch.float32 else 1.0
    ours, theirs = (after_steps(MAKES[name], compile, dtype=dtype, size=size) for compile in (True, False))
    assert_same_snapshots(ours, theirs)


@pytest.fixture
def calls(monkeypatch):
    """The classes of kernels in the order of their calls."""
    made, call = [], Kernel.__call__

    def counted(self, *args, **kwargs):
        made.append(type(self))
        return call(self, *args, **kwargs)

    monkeypatch.setattr(Kernel, "__call__", counted)  # those of norms are called likewise
    return made


@pytest.mark.parametrize("name", ["Lamb and master", "clipping", "exact Lamb in 8 bits", "exact clipping"])
def test_a_step_calls_each_of_its_kernels_once(name, calls):
    params = parameters()
    optimizer = MAKES[name](params, compile=True)
    optimizer.step()
    params[1][1].grad = None
    optimizer.step()
    params[1][1].grad = torch.ones_like(params[1][1])
    calls.clear()
    optimizer.step()
    of_batch = [NormKernel] * (2 if name.startswith("exact") else 1) + [Kernel]
    assert calls == of_batch * (2 if name == "exact Lamb in 8 bits" else 1)  # with and without blocks


def test_muon_calls_one_kernel_before_the_factors_of_all_matrices_and_one_after(calls):
    params = [(f"layers/{i}/weight", torch.nn.Parameter(torch.ones(64, 96).bfloat16())) for i in range(5)]
    for _, p in params:
        p.grad = torch.ones_like(p)
    optimizer = hs.Muon(params, lr=1e-2, compile=True)
    optimizer.step()
    calls.clear()
    optimizer.step()
    assert calls == [Kernel, Kernel]


@pytest.mark.parametrize("name", ["Lamb16", "Lamb and master", "clipping", "exact Lamb16", "exact clipping"])
def test_a_compiled_step_keeps_no_update(name):
    params = [("w", torch.nn.Parameter(torch.ones(1 << 10, 1 << 10, dtype=torch.bfloat16)))]
    params[0][1].grad = torch.ones_like(params[0][1])
    optimizer = MAKES[name](params, compile=True)
    optimizer.step()
    # 8 bytes for 1024 elements, twice, and numbers of parameters.
    assert 0 < peak_bytes(optimizer.step) < 0.02 * params[0][1].numel()


def scaling_rule(make):
    """Return the rule of an optimizer that is not elementwise, and its numbers."""
    params = [("w", torch.nn.Parameter(torch.ones(8, dtype=torch.bfloat16)))]
    params[0][1].grad = torch.ones_like(params[0][1])
    optimizer = make(params, compile=False)
    (batch,) = (launch := Launch(optimizer, list(optimizer._named()))).batches
    attach_numbers(launch.batches, {}, {})
    (place,) = (i for i, rule in enumerate(batch.plan.rules) if rule.scope == "parameter")
    return batch.plan.rules[place], batch.numbers[1][place]


OTHERS = {
    "quotient": lambda g, p, op: g / op.norm(g),
    "other array": lambda g, p, op: op.scaled(p, op.norm(g)),
    "norm of another array": lambda g, p, op: op.scaled(g, op.norm(g * g)),
    "mean": lambda g, p, op: op.scaled(g, op.mean(p)),
    "nothing": lambda g, p, op: g,
}


@pytest.mark.parametrize("name", OTHERS)
def test_a_rule_that_does_more_than_scale_has_no_pair_of_kernels(name):
    class Other(hs.Rule):
        name, scope, needs = "other", "parameter", "norms"

        def update(self, g, p, n, m, op):
            return OTHERS[name](g, p, op)

    rule, numbers = scaling_rule(
        lambda params, compile: hs.Optimizer(params, hs.chain(Other()), compile=compile)
    )
    with pytest.raises(NotScaling):
        asked_norms(rule, numbers)


def test_powers_are_those_of_each_parameter_alone():
    rule, numbers = scaling_rule(hs.Lamb16)
    drawn = torch.rand(2, 37, generator=torch.Generator().manual_seed(0))

    def ratios(at):
        norms = {True: drawn[:1], False: drawn[1:]}
        return scale_of(
            rule, numbers, lambda of: norms[of.of_update][:, at].expand(2, -1), drawn.device
        ).ratio

    together = ratios(slice(None))
    assert len(together.unique()) > 30
    assert torch.equal(together, torch.cat([ratios(slice(i, i + 1)) for i in range(37)]))


@pytest.mark.parametrize("make", [hs.Muon, hs.Adafactor, hs.Lamb, hs.AdamW])
def test_a_report_has_the_temporaries_of_a_step(make):
    model = torch.nn.Sequential(*[torch.nn.Linear(512, 512, bias=False).bfloat16() for _ in range(2)])
    for p in model.parameters():
        p.grad = torch.ones_like(p)
    optimizer = make(model.named_parameters(), compile=True)
    report = hs.memory_report(model, optimizer)
    optimizer.step()
    assert abs(peak_bytes(optimizer.step) - report.temporaries) < 0.02 * 4 * report.size
    assert ("temporaries of a step" in str(report)) == (make in (hs.Muon, hs.Adafactor))

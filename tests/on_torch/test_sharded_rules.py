"""Rules that see more of a sharded parameter than is here, and norms of all: the bits of one process."""

import functools
import itertools
import unittest.mock
from collections.abc import Callable

import pytest
import torch
import torch.distributed as dist
from torch.distributed.tensor import Shard, init_device_mesh

import halfstep_torch as hs
from halfstep.kernels import build
from halfstep_torch.rules import muon
from on_torch.processes import in_processes
from on_torch.sharded import (
    RECIPES,
    Run,
    assert_meshes_change_no_bit,
    assert_same_bits,
    counted,
    gradients,
    layouts,
    same_bits,
    shard,
    weights,
)

STEPS = 2


def stored_again(params, **options) -> hs.Optimizer:
    links = hs.store_state(hs.scale_by_adan(), "bfloat16"), hs.scale_by_learning_rate(1e-2)
    return hs.Optimizer(params, hs.chain(*links, hs.round_stochastically()), **options)


def averaged(params, **options) -> hs.Optimizer:
    links = hs.scale_by_ademamix(), hs.scale_by_learning_rate(1e-2)
    return hs.Optimizer(params, hs.chain(*links, hs.round_stochastically()), **options)


OTHERS: dict[str, Callable[..., hs.Optimizer]] = {
    "Lion": functools.partial(hs.Lion, recipe="eight_bit"),
    "SGD": functools.partial(hs.SGD, lr=1e-2, momentum=0.9, nesterov=True, recipe="eight_bit"),
    "Adan, stored again": stored_again,
    "AdEMAMix": averaged,
    "Adafactor": hs.Adafactor,
    "schedule-free": hs.AdamWScheduleFree,
}


def other_rules_have_the_bits_of_one_process(rank: int) -> None:
    for name, make in OTHERS.items():
        assert_meshes_change_no_bit(functools.partial(make, compile=False), STEPS, name)


def clipped(params, exact: bool, **options) -> hs.Optimizer:
    links = hs.clip_by_global_norm(5.0, exact=exact), hs.scale_by_learning_rate(1e-2)
    return hs.Optimizer(params, hs.chain(*links, hs.round_stochastically()), **options)


def gradients_are_clipped_by_the_norm_of_one_process(rank: int) -> None:
    """Exactly, by two collectives for all leaves along a mesh, or within a bound by one."""
    expected = Run(functools.partial(clipped, exact=True)).steps(1, STEPS)
    whole = list(gradients(1).values())
    for layout, mesh, place in layouts():
        run = Run(functools.partial(clipped, exact=True), place)
        assert_same_bits(run.steps(1, STEPS), expected, f"clipped, {layout}")
        # The norm of the larger ones is above float32's largest number, as is that of a process.
        for exact, size in ((True, 1.0), (False, 1.0), (True, 2.0**125), (False, 2.0**125)):
            alone, params = (
                [torch.nn.Parameter(cut(x).clone()) for x in whole] for cut in (lambda x: x, place)
            )
            for p in (*alone, *params):
                p.grad = p.detach() * size
            wanted = hs.clip_grad_norm_(alone, 5.0, exact=exact)
            with counted() as calls:
                norm = hs.clip_grad_norm_(params, 5.0, exact=exact)
            assert len(calls) == (2 if exact else 1) * mesh.ndim
            if exact:
                assert torch.equal(norm, wanted)
                for p, q in zip(params, alone, strict=True):
                    grad = place(q.grad)
                    assert same_bits(p.grad.to_local(), grad.to_local())
            # Each of the two norms of norms is within n + 2 units, for the sums that it adds up at once.
            bound = 2 * 24 * 2.0**-23
            assert norm.isinf() if size > 1 else (norm - wanted).abs() <= bound * wanted
            clipped_norm = hs.clip_grad_norm_(params, 5.0, exact=exact)
            # Elements in bfloat16 are rounded by up to 2^-9 of each.
            assert (clipped_norm / 5 - 1).abs() <= bound + 2.0**-8


LAMBS: dict[str, Callable[..., hs.Optimizer]] = {
    "Lamb": functools.partial(hs.Lamb, lr=1e-2, weight_decay=0.1, exact=True, compile=False),
    "Lamb, blocks": functools.partial(
        hs.Lamb, exact=True, compile=False, param_storage="split16", **RECIPES["whole_rows"]
    ),
    "Lamb16": functools.partial(hs.Lamb16, exact=True, compile=False),
    "Lamb by kernels": functools.partial(
        hs.Lamb, lr=1e-2, exact=True, compile=build.find_cc() is not None, **RECIPES["whole_rows"]
    ),
}


def trust_ratios_are_those_of_one_process(rank: int, names=tuple(LAMBS)) -> None:
    """With `exact`; each of ten leaves has two norms, and all take two collectives, beside two to agree."""
    for name in names:
        make = LAMBS[name]
        expected = Run(make).steps(1, STEPS)
        for layout, mesh, place in layouts():
            run = Run(make, place).steps(1, STEPS - 1)
            with counted() as calls:
                run.steps(STEPS, STEPS)
            assert_same_bits(run, expected, f"{name}, {layout}")
            if name == "Lamb":
                count = 0 if layout == "Replicate" else 4 * mesh.ndim
                assert calls == ["all_reduce"] * count, f"{name}, {layout}: {calls}"


def trust_ratios_lie_within_the_bound_of_those_of_one_process(rank: int) -> None:
    """Without `exact`, in one collective: two sums of up to n numbers are n + 2 units apart."""
    tx = hs.chain(hs.scale_by_trust_ratio(), hs.scale_by_learning_rate(1.0))
    makes = [functools.partial(hs.Optimizer, tx=tx, compile=x) for x in {False, build.find_cc() is not None}]
    for make, (layout, mesh, place) in itertools.product(makes, layouts()):
        expected = Run(make, torch.Tensor.float).steps(1, 1)
        run = Run(make, lambda x, place=place: place(x.float()))
        with counted() as calls:
            run.steps(1, 1)
        assert calls.count("all_gather") == (0 if layout == "Replicate" else mesh.ndim)
        for name, p in run.params.items():
            whole = expected.params[name].detach()
            here = shard(whole, mesh, p.placements).to_local()
            # The ratio is a quotient of two norms. The step is the difference of weights before and after.
            bound = 2 * (whole.numel() + 3) * 2.0**-23
            steps = (here - place(weights()[name].float()).to_local()).abs()
            assert ((p.to_local() - here).abs() <= bound * steps + 2.0**-23 * here.abs()).all(), name


MUONS = {
    "momentum of 16 bits": {},
    "fine int8, master": {"mu_dtype": hs.scaled("int8", 32, scale="fine"), "param_storage": "master"},
}


def factors_are_those_of_one_process_and_computed_once(rank: int, names=tuple(MUONS)) -> None:
    """But matrices whose blocks a border cuts are gathered: three with two processes, four with four."""
    for name in names:
        make = functools.partial(hs.Muon, lr=1e-2, compile=False, **MUONS[name])
        expected = Run(make).steps(1, STEPS)
        for layout, _, place in layouts():
            run = Run(make, place)
            with unittest.mock.patch.object(muon, "newton_schulz", wraps=muon.newton_schulz) as factor:
                run.steps(1, STEPS)
            assert_same_bits(run, expected, f"Muon, {name}, {layout}")
            computed = torch.tensor(factor.call_count // STEPS)
            dist.all_reduce(computed)
            count = dist.get_world_size()
            most = 6 * count if layout == "Replicate" else 6 + min(count + 1, 4) * (count - 1)
            assert computed <= most, f"{name}, {layout}: {computed}"


def rows_and_columns_are_those_of_one_process(rank: int) -> None:
    make = functools.partial(hs.Adafactor, weight_decay=0.1, compile=False)
    expected = Run(make).steps(1, STEPS)
    for layout, _, place in layouts():
        assert_same_bits(Run(make, place).steps(1, STEPS), expected, f"Adafactor, {layout}")


def rows_of_the_factor_are_those_of_one_process(rank: int) -> None:
    make = functools.partial(hs.Muon, lr=1e-2, normalize="rows", compile=False)
    expected = Run(make).steps(1, STEPS)
    for layout, _, place in layouts():
        assert_same_bits(Run(make, place).steps(1, STEPS), expected, f"NorMuon, {layout}")


def a_gradient_that_is_not_finite_in_one_process_changes_nothing_in_any(rank: int) -> None:
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    param = torch.nn.Parameter(shard(torch.ones(8, 8, dtype=torch.bfloat16), mesh, [Shard(0)]))
    optimizer = hs.Muon([("hidden.weight", param)])
    for step in range(2):
        grad = torch.ones(8, 8, dtype=torch.bfloat16)
        grad[0] = torch.inf if step else 1.0
        param.grad, before = shard(grad, mesh, [Shard(0)]), param.to_local().clone()
        if not step:
            optimizer.step()
            continue
        error = (ValueError, "hidden") if rank == 0 else (RuntimeError, "another process of the mesh")
        with pytest.raises(error[0], match=error[1]):
            optimizer.step()
        assert torch.equal(param.to_local(), before)


def test_two_processes_have_the_bits_of_one():
    in_processes(
        2,
        other_rules_have_the_bits_of_one_process,
        gradients_are_clipped_by_the_norm_of_one_process,
        trust_ratios_are_those_of_one_process,
        trust_ratios_lie_within_the_bound_of_those_of_one_process,
        factors_are_those_of_one_process_and_computed_once,
        rows_and_columns_are_those_of_one_process,
        rows_of_the_factor_are_those_of_one_process,
        a_gradient_that_is_not_finite_in_one_process_changes_nothing_in_any,
    )


@pytest.mark.slow
def test_four_processes_have_the_bits_of_one():
    lamb = functools.partial(trust_ratios_are_those_of_one_process, names=("Lamb, blocks",))
    name, *_ = MUONS
    factors = functools.partial(factors_are_those_of_one_process_and_computed_once, names=(name,))
    in_processes(4, lamb, factors)

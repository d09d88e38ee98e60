"""What a step asks of torch: the operations of its formula, one kernel each, and no other."""

import collections

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

import halfstep_torch as hs
from on_torch.steps import step_by_ones

ARITHMETIC = ("add", "sub", "rsub", "mul", "div", "sqrt", "rsqrt", "neg", "reciprocal", "sign", "pow")


class Recorder(TorchDispatchMode):
    """Counts the arithmetic that reaches torch's kernels."""

    def __init__(self):
        super().__init__()
        self.counts = collections.Counter()

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        name = function.overloadpacket.__name__
        if name in ARITHMETIC:
            self.counts[name] += 1
        return function(*args, **(kwargs or {}))


def step_counts(*links):
    """Return the arithmetic of the second step of one float32 parameter, that of random words left out."""
    p = torch.nn.Parameter(torch.randn(300, generator=torch.Generator().manual_seed(0)))
    optimizer = hs.Optimizer([("w", p)], hs.chain(*links), compile=False)
    step_by_ones(optimizer)
    with Recorder() as recorder:
        optimizer.step()
    return recorder.counts


# mu and nu: two products and a sum each, and g g; both corrections, sqrt(nu r2 + eps_root) + eps, a quotient.
# The root is NumPy's.
ADAM = {"mul": 2 + 3 + 2, "add": 2 + 2, "div": 1}
FORMULAS = {
    "sgd": ([], {}),
    "adam": ([hs.scale_by_adam()], ADAM),
    "adamw": ([hs.scale_by_adam(), hs.add_decayed_weights(0.1)], ADAM | {"mul": 8, "add": 5}),
    "nesterov": ([hs.scale_by_adam(nesterov=True)], ADAM | {"mul": 10, "add": 5}),
    "momentum": ([hs.trace(0.9)], {"mul": 1, "add": 1}),
    # n.later (g - grad), g + b2 d and its square, three averages, three corrections and b2 of one of them.
    "adan": ([hs.scale_by_adan()], {"mul": 1 + 2 + 6 + 4, "add": 1 + 3 + 2, "sub": 1, "div": 1}),
    # A sign is the difference of two comparisons.
    "lion": ([hs.scale_by_lion()], {"mul": 4, "add": 2, "sub": 1}),
    "decay": ([hs.add_decayed_weights(0.1, absolute=True)], {"mul": 1, "sub": 1}),
}


@pytest.mark.parametrize(("links", "formula"), FORMULAS.values(), ids=FORMULAS)
def test_a_step_has_no_operation_more_than_its_formula(links, formula):
    rate_and_apply = collections.Counter({"mul": 1, "add": 1})
    assert step_counts(*links, hs.scale_by_learning_rate(0.1)) == rate_and_apply + collections.Counter(
        formula
    )

"""Whether a rule has the same bits op by op, in plain steps, in a generated kernel, and in NumPy."""

import numpy as np
import torch

from halfstep import rule_check
from halfstep.kernels.build import find_cc
from halfstep.rule import Rule
from halfstep.rule_check import Answer, Question
from halfstep_torch.links.chain import chain
from halfstep_torch.links.dry_run import bare_update
from halfstep_torch.links.link import ParamInfo, as_link
from halfstep_torch.numbers.op import GuardedOp, tensor_numbers
from halfstep_torch.optimizer import Optimizer

_CPU = torch.device("cpu")


class _RecordedOp(rule_check.Recorded, GuardedOp):
    """Operations of torch that record their results."""


def check_rule(rule: Rule, *, seed: int = 0, compile: bool = True) -> None:
    """Raise an error unless plain steps, a generated kernel and NumPy give a rule's update the same bits.

    It runs on the CPU, on the numbers described in `docs/new-rule.md`. A rule of scope "parameter" has no
    kernel.

    Args:
        rule: an instance of a rule, such as `Damped()`.
        seed: seed of the numbers.
        compile: whether to generate and compare a kernel. False needs no C compiler.

    Raises:
        ValueError: if a line of `update` differs. The message has the line and its results.
        RuntimeError: if `compile` is True and there is no C compiler.

    Example:
        >>> from halfstep_torch import Rule, number
        >>> class Damped(Rule):
        ...     eps: float = number(1e-3)
        ...
        ...     def update(self, g, p, n, m, op):
        ...         return g * g / (op.abs(g) + n.eps)
        >>> check_rule(Damped(), compile=False)

    Source: ours.
    """
    link = as_link(rule)
    h = link.read(rule.name, link.entries)
    asked = Question.of(rule, seed)
    bound = link.bind(rule.name, h, ParamInfo(torch.float32, asked.g.shape))
    if bound is None:
        return
    numbers = link.step_numbers(h, rule_check.COUNT)
    tensors = tensor_numbers(numbers, _CPU)
    p = asked.g[::-1].copy() if asked.p is None else asked.p  # in torch the weights are always there
    question = Question(
        torch.from_numpy(asked.g),
        torch.from_numpy(p),
        {name: torch.from_numpy(x) for name, x in asked.moments.items()},
    )
    eager = rule_check.answer(bound.rule, question, tensors, _RecordedOp(rule.name))
    outputs = bare_update(bound, numbers, *question)
    answers = {"on the bare tensors of a step": Answer(outputs, [], [], [])}
    rule_check.compared(bound.rule, asked._replace(p=p), tensors, eager, answers)
    if compile and bound.scope == "elementwise":
        _check_kernel(rule, asked, p)


def _check_kernel(rule: Rule, asked: Question, p: np.ndarray) -> None:
    """Raise ValueError unless a generated kernel has the bits of plain steps."""
    if find_cc() is None:
        raise RuntimeError(
            "check_rule: no C compiler is found. Install gcc or clang, name one in CC, or use compile=False."
        )
    runs = []
    for compile in (False, True):
        param = torch.nn.Parameter(torch.from_numpy(p.copy()))
        optimizer = Optimizer([("w", param)], chain(rule), compile=compile)
        for sign in (1, -1):
            param.grad = torch.from_numpy(sign * asked.g)
            optimizer.step()
        state = {name: x for name, x in optimizer.state[param].items() if name != "step"}
        runs.append({"weights": param.detach(), **state})
    for name, plain in runs[0].items():
        same = plain.view(torch.uint8) == runs[1][name].view(torch.uint8)
        nan = plain.isnan() & runs[1][name].isnan() if plain.is_floating_point() else torch.tensor(False)
        if not (same.view(*plain.shape, -1).all(-1) | nan).all():
            raise ValueError(
                f"{rule.name}: in a generated kernel {name} has other bits than in plain steps. "
                "Please report the rule: steps of an optimizer compare both, and take plain steps."
            )

"""Whether a rule has the same bits op by op, in eager and in compiled steps, and in NumPy."""

from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from halfstep import rule_check
from halfstep.hyperparameters import Values
from halfstep.moments import Moments, StepMoment
from halfstep.numbers import Number, Origin
from halfstep.rule import Rule
from halfstep.rule_check import Answer, Question
from halfstep_torch.engine.inductor import compile_options, compiling, find_cxx, own_code
from halfstep_torch.engine.step_numbers import flat, number_places, unflat
from halfstep_torch.links.bound_rule import BoundRule
from halfstep_torch.links.dry_run import bare_update
from halfstep_torch.links.link import ParamInfo, as_link
from halfstep_torch.numbers.op import GuardedOp, tensor_numbers

_CPU = torch.device("cpu")


class _RecordedOp(rule_check.Recorded, GuardedOp):
    """Operations of torch that record their results."""


class _TracedOp(GuardedOp):
    """The same for Dynamo, which cannot look for the lines of `update`."""

    def __init__(self, rule: str) -> None:
        super().__init__(rule)
        self.results: list[Tensor] = []

    def wrap(self, x: Tensor, made: Origin = Origin.ARRAY) -> Number:
        """Return a Number, and keep the tensor."""
        self.results.append(x)
        return super().wrap(x, made)


def check_rule(rule: Rule, *, seed: int = 0, compile: bool = True) -> None:
    """Raise an error unless eager code, compiled code and NumPy give a rule's update the same bits.

    On the CPU, on numbers that `docs/new-rule.md` describes. A rule of scope "parameter" is never compiled.

    Args:
        rule: an object, such as `Damped()`.
        seed: of the numbers.
        compile: False where there is no C++ compiler, or no time: it takes half a minute.

    Raises:
        ValueError: with the line of `update` that differs, and what it gives.
        RuntimeError: if `compile` is True, and there is no C++ compiler.

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
    if compile and bound.scope == "elementwise":
        answers["under torch.compile"] = _compiled(bound, numbers, question)
    rule_check.compared(bound.rule, asked._replace(p=p), tensors, eager, answers)


def _compiled(bound: BoundRule, numbers: Values, question: Question) -> Answer:
    """Return the results of compiled code for a step and for each of its operations."""
    if find_cxx() is None:
        raise RuntimeError(
            "check_rule: no C++ compiler is found. Install g++ (or name one in CXX), or use compile=False."
        )
    slots, names = number_places(numbers), list(question.moments)

    def asked(g: Tensor, p: Tensor, *moments: Tensor) -> Question:
        return Question(g, p, dict(zip(names, moments, strict=True)))

    def outputs(vector: Tensor, *arrays: Tensor) -> tuple[Tensor, ...]:
        return bare_update(bound, unflat(slots, vector.unbind()), *asked(*arrays))

    def results(vector: Tensor, *arrays: Tensor) -> tuple[Tensor, ...]:
        return _operations(bound, type(numbers)(*vector.unbind()), asked(*arrays))

    arrays = [question.g, question.p, *question.moments.values()]
    tensors = torch.stack(tensor_numbers(numbers, _CPU)) if numbers else torch.zeros(0)
    given = _run(outputs, [torch.tensor(flat(numbers), dtype=torch.float32), *arrays])
    return Answer(given, list(_run(results, [tensors, *arrays])), [], [])


def _run(function: Callable, tensors: Sequence[Tensor]) -> tuple[Tensor, ...]:
    """Return the result of a function that is compiled as a step is."""
    with compiling():
        made = torch.compile(own_code(function), fullgraph=True, options=compile_options(_CPU))
        return made(*tensors)


def _operations(bound: BoundRule, numbers: Values, question: Question) -> tuple[Tensor, ...]:
    """Return the result of every operation of a step."""
    op = _TracedOp(bound.rule.name)
    n = type(numbers)(*(op.wrap(x, Origin.NUMBER) for x in numbers))
    moments = {name: StepMoment(name, x, op) for name, x in question.moments.items()}
    g, p = op.wrap(question.g), op.wrap(question.p)
    op.results.clear()
    bound.rule.update(g, p, n, Moments(bound.rule.name, moments), op)
    return tuple(op.results)

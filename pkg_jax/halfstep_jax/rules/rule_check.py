"""Whether a rule has the same bits op by op, under `jax.jit` and in NumPy."""

import jax
import jax.numpy as jnp

from halfstep import rule_check
from halfstep.rule import Rule
from halfstep.rule_check import Answer, Question
from halfstep_jax.numbers.op import JaxOp
from halfstep_jax.rule import checked, numbers_at, static_form
from halfstep_jax.xla.exact import opaque_zero


class _RecordedOp(rule_check.Recorded, JaxOp):
    """Operations of JAX that record their results."""


def check_rule(rule: Rule, *, seed: int = 0) -> None:
    """Raise an error unless a rule has the same bits op by op, under `jax.jit` and in NumPy.

    On numbers that `docs/new-rule.md` describes.

    Args:
        rule: an instance of a class that derives from `Rule`.
        seed: of the numbers.

    Raises:
        ValueError: naming the line of `update` with a different result, and two numbers that differ.

    Example:
        >>> from halfstep.rules.lion import ScaleByLion
        >>> check_rule(ScaleByLion())

    Source: ours.
    """
    canonical = checked(rule)
    form, question = static_form(canonical), Question.of(canonical, seed)
    question = jax.tree.map(jnp.asarray, question)
    step = jnp.int32(rule_check.COUNT)
    numbers = numbers_at(canonical, step - 1, step)

    def taken(question: Question, step: jax.Array) -> Answer:
        op = _RecordedOp(rule.name, opaque_zero(), getattr(canonical, "axis_names", None))
        return rule_check.answer(form, question, numbers_at(canonical, step - 1, step), op)

    eager = taken(question, step)
    outputs = Answer(jax.jit(lambda *asked: taken(*asked).outputs)(question, step), [], [], [])
    results = jax.jit(lambda *asked: taken(*asked).results)(question, step)
    compiled = {"under jax.jit": outputs._replace(results=results)}
    rule_check.compared(form, jax.device_get(question), numbers, eager, compiled)

"""A case of whole steps, of any update rule: what its op is asked, and what a checkpoint would hold.

The op is the rule's, such as "adam_step". The rule's numbers are inputs, as float32 patterns; its formats,
roundings and switches are arguments.
"""

import dataclasses

import numpy as np

from halfstep_spec.numbers.random_words import seed_words
from halfstep_spec.numbers.rounding import decode, round_to
from halfstep_spec.rule import UpdateRule
from halfstep_spec.rules.adam import ScaleByAdam
from halfstep_spec.rules.lion import ScaleByLion
from halfstep_spec.rules.store_state import StoreState
from halfstep_spec.rules.trace import Trace
from halfstep_spec.steps import Step, StepState
from halfstep_spec.storage.formats import Format
from halfstep_spec.storage.tables import TABLES
from halfstep_spec.vectors import Array, Case

RULES: dict[str, type[UpdateRule]] = {
    "adam_step": ScaleByAdam,
    "lion_step": ScaleByLion,
    "trace_step": Trace,
    "lamb_step": ScaleByAdam,
}
"""By op: the update rule whose step it is."""

STORE_STATE = "store_state_step"
"""The op of a rule inside of `store_state`; its argument `inner` is the rule's own op."""

LEAF = "layers/0/kernel"


def step_case(step: Step, comment, p, g, state: StepState | None, lr, flags, clauses) -> Case:
    """Return a case of one step per row of `g`, from `state` (None: zeros).

    Args:
        step: what is asked.
        comment: why.
        p: patterns of the weights.
        g: float32 gradients, (steps, *shape); they reach the step in the weights' dtype.
        state: moments and count to start from.
        lr: the learning rate of every step.
        flags: of the case.
        clauses: of the contract.
    """
    state = state or step.init(p)
    gradients = round_to(g, step.param_dtype)
    op, numbers, arguments = _question(step.rule)
    inputs = {
        "g": Array.of(gradients, step.param_dtype),
        "count": Array.of(np.int32(state.rule.count)),
        "seed": Array.of(np.array(seed_words(step.rule.seed))),
        "learning_rate": Array.of(np.float32(lr)),
        "weight_decay": Array.of(np.float32(step.weight_decay)),
    }
    inputs |= {name: Array.of(np.float32(value)) for name, value in numbers.items()}
    inputs |= stored_arrays(step, p, state)
    rows = []
    with np.errstate(invalid="ignore", over="ignore"):
        for gradient in decode(gradients, step.param_dtype):
            p, state = step.step(p, gradient, state, LEAF, lr)
            rows.append(stored_arrays(step, p, state))
    outputs = {
        name: Array.of(np.stack([row[name].bits for row in rows]), array.dtype, "bits")
        for name, array in rows[0].items()
    }
    arguments |= {"leaf": LEAF, "decay": step.decay, "param_storage": step.param_storage}
    return Case(op, comment, arguments, inputs, outputs, flags, clauses)


def stored_arrays(step: Step, p: np.ndarray, state: StepState) -> dict[str, Array]:
    """Return everything that a checkpoint of one leaf holds, but the count."""
    arrays = {"p": Array.of(p, step.param_dtype)}
    for name, moment in step.rule.moments.items():
        stored = state.rule.moments[name]
        arrays[name] = Array.of(stored.codes, moment.format(p.shape).code_dtype)
        if stored.scale is not None:
            arrays[f"{name}_scale"] = Array.of(stored.scale)
    if state.extra is not None:
        dtypes = {"compensated": "bfloat16", "master": "float32"}
        extra = state.extra.view(np.uint32) if step.param_storage == "master" else state.extra
        arrays["extra"] = Array.of(extra, dtypes.get(step.param_storage))
    return arrays


def describe(rule: UpdateRule) -> str:
    """Return how a rule's moments are stored, for comments."""
    words = []
    for name, moment in rule.moments.items():
        fmt = moment.dtype
        words.append(
            f"{name} {fmt if isinstance(fmt, str) else f'{fmt.dtype}/{fmt.block_size}'} {moment.rounding}"
        )
    return ", ".join(words)


def _question(rule: UpdateRule) -> tuple[str, dict[str, float], dict[str, object]]:
    """Return a rule's op, its numbers, and its other arguments as plain data."""
    if isinstance(rule, StoreState):
        inner, numbers, arguments = _question(rule.rule)
        arguments |= {"inner": inner, "state_format": _plain(rule.dtype), "state_rounding": rule.rounding}
        return STORE_STATE, numbers, arguments | {"select": rule.select and list(rule.select)}
    op = next(op for op, kind in RULES.items() if type(rule) is kind)
    values = {
        field.name: getattr(rule, field.name)
        for field in dataclasses.fields(rule)  # pyright: ignore
        # What came after vectors were published is not named where it is as it was.
        if not field.metadata.get("later") or getattr(rule, field.name) != field.default
    }
    del values["seed"]
    numbers = {name: value for name, value in values.items() if isinstance(value, float)}
    return op, numbers, {name: _plain(value) for name, value in values.items() if name not in numbers}


def _plain(value: object) -> object:
    """Return a format as the arguments of `scaled` or `codebook`, and anything else as it is."""
    if not isinstance(value, Format):
        return value
    names = ("block_size", "min_size", "min_ndim")
    kind = "table" if value.dtype in TABLES else "dtype"
    return {kind: value.dtype} | {name: getattr(value, name) for name in names}

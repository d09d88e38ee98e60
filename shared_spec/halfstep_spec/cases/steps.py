"""A case of whole steps with any update rule: the inputs of its op, and the content of a checkpoint.

The op is named after the file of the rule, such as "adam_step", or of an optimizer made from it, such as
"lamb_step". Numbers are inputs, as float32 patterns; formats, roundings and switches are arguments.
"""

import dataclasses

import numpy as np

from halfstep_spec.numbers.rounding import decode, round_to
from halfstep_spec.numbers.seeds import seed_words
from halfstep_spec.rule import Rule
from halfstep_spec.rules.step import Step, StepState
from halfstep_spec.rules.store_state import StoreState
from halfstep_spec.storage.codes import CODEBOOK_CODES
from halfstep_spec.storage.formats import Format
from halfstep_spec.vectors import Array, Case

LEAF = "layers/0/kernel"
_STORAGE_CLAUSES = {"nearest": ("P1",), "stochastic": ("P1", "P2", "P3"), "compensated": ("P1", "P4")}
_STORAGE_CLAUSES |= dict.fromkeys(("split8", "split16", "master"), ("P1", "P5"))


def step_case(step: Step, comment, p, g, state: StepState | None, lr, flags, clauses) -> Case:
    """Return a case of one step per row of `g`, from `state` (None: zeros).

    `p` are patterns of the weights; the float32 gradients reach the step in the weights' dtype.
    """
    state = state or step.init(p)
    gradients = round_to(g, step.param_dtype)
    inputs = {
        "g": Array.of(gradients, step.param_dtype),
        "count": Array.of(np.int32(state.rule.count)),
        "seed": Array.of(np.array(seed_words(step.rule.seed))),
        "learning_rate": Array.of(np.float32(lr)),
    }
    inputs |= {name: Array.of(np.float32(value)) for name, value in _numbers(step).items()}
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
    arguments = {"leaf": LEAF, "decay": step.decay, "param_storage": step.param_storage} | _switched(step)
    return Case(step_op(step), comment, _arguments(step.rule) | arguments, inputs, outputs, flags, clauses)


def stored_arrays(step: Step, p: np.ndarray, state: StepState) -> dict[str, Array]:
    """Return everything that a checkpoint of one leaf holds, but the count."""
    arrays = {"p": Array.of(p, step.param_dtype)}
    for name, moment in step.rule.moments.items():
        stored = state.rule.moments[name]
        arrays[name] = Array.of(stored.codes, moment.format(moment.shape(p.shape)).codes.dtype)
        if stored.scale is not None:
            arrays[f"{name}_scale"] = Array.of(stored.scale)
    if state.extra is not None:
        arrays["extra"] = Array.of(state.extra, step.storage.extra_dtype)
    return arrays


def storage_clauses(step: Step) -> tuple[str, ...]:
    """Return the clauses of the way in which a step stores weights."""
    if step.param_dtype == "float32":
        return "P1", "P6"
    return _STORAGE_CLAUSES[step.param_storage]


def describe(rule: Rule) -> str:
    """Return how a rule's moments are stored, for comments."""
    words = []
    for name, moment in rule.moments.items():
        fmt = moment.dtype
        words.append(f"{name} {fmt if isinstance(fmt, str) else _described(fmt)} {moment.rounding}")
    return ", ".join(words)


def _described(fmt: Format) -> str:
    words = ("relative " if fmt.relative else "") + fmt.dtype
    return f"{words}/{fmt.block_size}" if fmt.scaled else words


def step_op(step: Step) -> str:
    """Return the op of a step: that of the rule, unless the step is of a kind of its own."""
    return f"{_file_of(step.rule if type(step) is Step else step)}_step"


def _file_of(value: object) -> str:
    return type(value).__module__.rsplit(".", 1)[-1]


def _numbers(step: Step) -> dict[str, float]:
    """Return the numbers of a step and of its rule; bounds that are not given are left out."""
    rule = step.rule.rule if isinstance(step.rule, StoreState) else step.rule
    values = {name: getattr(rule, name) for name in rule.hyperparameters()}
    fields = {field.name: getattr(step, field.name) for field in dataclasses.fields(step)}
    given = {name: x for name, x in fields.items() if isinstance(x, float) and np.isfinite(x)}
    return given | values


def _arguments(rule: Rule) -> dict[str, object]:
    """Return a rule's other arguments as plain data.

    A switch is named if it differs from its default, so a case does not change when a rule gets a new one.
    """
    if isinstance(rule, StoreState):
        options = {
            "inner": f"{_file_of(rule.rule)}_step",
            "state_format": _plain(rule.dtype),
            "state_rounding": rule.rounding,
            "select": rule.select and list(rule.select),
        }
        return _arguments(rule.rule) | options
    others = [field for field in dataclasses.fields(rule) if field.init and field.name != "seed"]  # pyright: ignore
    values = {f.name: getattr(rule, f.name) for f in others if f.name not in rule.hyperparameters()}
    switched = {f.name for f in others if isinstance(f.default, bool) and values.get(f.name) == f.default}
    return {name: _plain(value) for name, value in values.items() if name not in switched}


def _switched(step: Step) -> dict[str, object]:
    """Return the switches of a step that are not as they are by default."""
    options = {field.name: (getattr(step, field.name), field.default) for field in dataclasses.fields(step)}
    return {name: x for name, (x, usual) in options.items() if isinstance(usual, bool) and x != usual}


def _plain(value: object) -> object:
    """Return a format as the arguments of the function that makes it, and anything else as it is."""
    if isinstance(value, Format) and value.relative:
        block_size = value.block_size if value.scaled else None
        return {"relative": value.dtype, "block_size": block_size} | _sizes(value)
    if not isinstance(value, Format) or not value.scaled:
        return value.dtype if isinstance(value, Format) else value
    kind = "table" if value.dtype in CODEBOOK_CODES else "dtype"
    fine = {"scale": "fine"} if value.scale == "fine" else {}
    return {kind: value.dtype, "block_size": value.block_size} | _sizes(value) | fine


def _sizes(fmt: Format) -> dict[str, object]:
    return {"min_size": fmt.min_size, "min_ndim": fmt.min_ndim}

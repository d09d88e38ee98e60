"""What the runner asks of a backend."""

import importlib
from typing import Any

import optax

from halfstep.rules.muon import MuonMomentum, NormalizeRows
from halfstep_spec import RULES
from halfstep_spec.vectors import Array, Case

_STEP_NUMBERS = ("count", "learning_rate", "weight_decay")
_STEP_ARGUMENTS = ("leaf", "decay", "param_storage", "inner", "state_format", "state_rounding", "select")


_FUNCTIONS = (
    "fold",
    "leaf_id",
    "leaf_key",
    "random_words",
    "round_to",
    "bias_correction",
    "round_stochastically",
    "encode",
    "to_unit",
    "norm",
    "global_norm",
    "clip",
    "accumulate",
    "ema_params",
    "trust_ratio",
    "newton_schulz",
    "mean",
    "inverse_power",
)
_STEPS = tuple(f"{name}_step" for name in (*RULES, "lamb", "store_state"))


MEANS = {"rows": 1, "columns": 0, "all": None}
"""Of a case of means: what is asked of, and the axis."""


class Backend:
    """A backend has one method per op, which takes a case and returns its outputs by name.

    Steps without a method of their own are taken by `step`.
    """

    OPS = _FUNCTIONS + _STEPS

    def run(self, case: Case) -> dict[str, Array]:
        """Run one case; refuse an op that is not known."""
        if case.op not in self.OPS:
            raise LookupError(
                f"{type(self).__name__} has no op {case.op!r} (case {case.key}: {case.comment})."
            )
        return getattr(self, case.op, self.step)(case)

    def step(self, case: Case) -> dict[str, Array]:
        """Take the steps of a case; return what a checkpoint would hold after each."""
        raise NotImplementedError


def stored_names(case: Case) -> list[str]:
    """Return the names of the state arrays that a case of steps starts from, the weights not among them."""
    return [name for name in case.inputs if name in case.outputs and name != "p"]


def link_of(case: Case, package: Any) -> Any:
    """Return the update rule that a case of steps asks for, as a link of a chain."""
    if case.arguments.get("given"):
        return given_factor(rule_arguments(case, package), package)
    name = case.arguments.get("inner", case.op).removesuffix("_step")
    make = getattr(package, f"scale_by_{name}", None) or getattr(package, name)
    return make(**unrefused(rule_arguments(case, package)))


def adafactor_links(case: Case, package: Any) -> list[Any]:
    """Return the links of Adafactor that a case of steps asks for, in their order."""
    options = unrefused(rule_arguments(case, package))
    threshold, min_scale = options.pop("clipping_threshold"), options.pop("min_scale")
    return [
        package.scale_by_factored_rms(**options),
        package.clip_by_block_rms(threshold),
        package.scale_by_learning_rate(scalar(case, "learning_rate")),
        package.scale_by_param_block_rms(min_scale),
        package.add_decayed_weights(scalar(case, "weight_decay"), absolute=True),
    ]


def stored_links(case: Case, package: Any) -> list[Any]:
    """Return the links of a step whose rule has its state stored."""
    a, seed, select = case.arguments, seed_of(case), case.arguments["select"]
    stored = package.store_state(
        link_of(case, package),
        format_of(a["state_format"], package),
        rounding=unchecked(a["state_rounding"]),
        select=select and (lambda name, array: name.split("/")[0] in select),
        seed=seed,
    )
    decay, rate = scalar(case, "weight_decay"), scalar(case, "learning_rate")
    links = [package.add_decayed_weights(decay), package.scale_by_learning_rate(rate)]
    return [stored, *links, package.round_stochastically(seed)]


def given_factor(options: dict[str, Any], package: Any) -> Any:
    """Return the links of Muon in which what is given stands for its factor: all else is to the bit."""
    rules = importlib.import_module(f"{package.__name__}.rules.muon")

    class Given(rules.Orthogonalize):
        name = "given_factor"

        def factor(self, x, matrices):
            return x

    axis, scale, beta2 = (options.pop(name, None) for name in ("output_axis", "scale", "beta2"))
    options.pop("given")
    factor = [Given(None, axis, scale=scale)]
    if beta2 is not None:
        factor = [Given(None, axis, scale=None), NormalizeRows(None, axis, scale, beta2)]
    links = MuonMomentum(**unrefused(options)), *factor
    as_transform = getattr(package, "as_transform", None)
    return package.chain(*links) if as_transform is None else optax.chain(*map(as_transform, links))


def seed_of(case: Case) -> int:
    """Return the seed of a case as one integer."""
    high, low = (int(word) for word in case.inputs["seed"].bits)
    return (high << 32) | low


def offset_of(case: Case) -> int:
    """Return the offset of a case as one integer."""
    high, low = (int(word) for word in case.inputs["offset"].bits)
    return (high << 32) | low


def scalar(case: Case, name: str) -> float:
    """Return a float32 input of one element as a Python float: exact."""
    return float(case.inputs[name].bits.view("float32"))


def unchecked(rounding: str) -> str:
    """Vectors force nearest where users would be refused it."""
    return "nearest_unchecked" if rounding == "nearest" else rounding


def rule_arguments(case: Case, package: Any) -> dict[str, Any]:
    """Return the arguments of a case's update rule: its numbers are inputs, the rest are arguments.

    Args:
        case: of an op that takes steps.
        package: whose `scaled` and `codebook` make the formats.
    """
    values = {n: v for n, v in case.arguments.items() if n not in _STEP_ARGUMENTS}
    values = {n: format_of(v, package) for n, v in values.items()}
    scalars = [n for n, array in case.inputs.items() if array.bits.shape == () and n not in _STEP_NUMBERS]
    return values | {n: scalar(case, n) for n in scalars} | {"seed": seed_of(case)}


def codes_of(case: Case) -> dict[str, Any]:
    """Return what a case of codes says of a format beside its dtype and blocks."""
    return {name: case.arguments[name] for name in ("scale", "relative") if name in case.arguments}


def format_of(value: Any, package: Any) -> Any:
    """Return what an argument says of a format; anything else as it is."""
    if not isinstance(value, dict):
        return value
    if "relative" in value:
        return package.relative(
            value["relative"], *(value[n] for n in ("block_size", "min_size", "min_ndim"))
        )
    return package.codebook(**value) if "table" in value else package.scaled(**value)


def unrefused(options: dict[str, Any]) -> dict[str, Any]:
    """Return a rule's arguments with every nearest rounding forced, as the vectors mean it."""
    return {name: unchecked(v) if name.endswith("rounding") else v for name, v in options.items()}


RATIO_ARRAYS = ("p_norm", "u_norm", "p", "u")
"""Inputs of a trust ratio that are no numbers of it: norms that are given, or arrays whose norms it takes."""


def ratio_numbers(case: Case) -> dict[str, float]:
    """Return the numbers of a trust ratio; those that are not given are not asked for."""
    return {name: scalar(case, name) for name in case.inputs if name not in RATIO_ARRAYS}

"""The links of each rule that the hunt draws: in a package, and as a step of the reference."""

import dataclasses
from collections.abc import Iterable
from types import ModuleType
from typing import Any

import numpy as np

import halfstep_spec as spec
from backends.protocol import given_factor, unrefused
from halfstep.rules.adamw_fed_back import AdamWFedBack
from halfstep.rules.adamw_in_codes import AdamWInCodes
from halfstep.rules.sgd_fed_back import SGDFedBack
from halfstep_spec.numbers.random_words import Role, random_words
from halfstep_spec.rules.adafactor import Adafactor
from halfstep_spec.rules.adamw_fed_back import FedBack
from halfstep_spec.rules.adamw_in_codes import InCodes
from halfstep_spec.rules.sgd_fed_back import FedBackSGD

BASES = {"lamb": "adam", "schedule_free": "rms"}
"""The rules of more than one link, by that which divides by a root; others stand for themselves."""
_WHOLE = {"adamw_in_codes": AdamWInCodes, "adamw_fed_back": AdamWFedBack, "sgd_fed_back": SGDFedBack}
_STEPS = {"adamw_in_codes": InCodes, "adamw_fed_back": FedBack, "sgd_fed_back": FedBackSGD}
_BESIDE = {"adafactor": ("clipping_threshold", "min_scale"), "lamb": ("max_norm",)}
_OF_THE_LEAD = ("b1", "warmup_steps", "lead_dtype", "lead_rounding")


def links(package: ModuleType, rule: str, decay: str, arguments: dict[str, Any]) -> list[Any]:
    """Return the links of a package in their order.

    Args:
        package: halfstep_jax or halfstep_torch.
        rule: its name in the hunt.
        decay: "decoupled", "l2" or "".
        arguments: of all links, by name; `lr` and `weight_decay` among them.
    """
    own = unrefused(arguments)
    if rule in _WHOLE:
        if rule == "sgd_fed_back":
            own.pop("weight_decay")
        whole = _WHOLE[rule](own.pop("lr"), **own)
        return [package.as_transform(whole) if hasattr(package, "as_transform") else whole]
    rate, share = package.scale_by_learning_rate(own.pop("lr")), own.pop("weight_decay")
    beside = {name: own.pop(name) for name in _BESIDE.get(rule, ())}
    lead = _lead(rule, own)
    decays = [package.add_decayed_weights(share, absolute=rule == "adafactor")] if decay else []
    first = _rule(package, BASES.get(rule, rule), own)
    if rule == "adafactor":
        clip = package.clip_by_block_rms(beside["clipping_threshold"])
        return [first, clip, rate, package.scale_by_param_block_rms(beside["min_scale"]), *decays]
    made = [*decays, first] if decay == "l2" else [first, *decays]
    if rule == "lamb":
        made.append(package.scale_by_trust_ratio(max_norm=beside["max_norm"], exact=True))
    return [*made, rate, *([package.scale_by_schedule_free(**lead)] if lead else [])]


def _rule(package: ModuleType, rule: str, own: dict[str, Any]) -> Any:
    if rule in ("muon", "normuon"):
        return given_factor(own, package)
    name = {"trace": "trace", "adafactor": "scale_by_factored_rms"}.get(rule, f"scale_by_{rule}")
    return getattr(package, name)(**own)


def _lead(rule: str, own: dict[str, Any]) -> dict[str, Any]:
    """Take the arguments of the average of weights out of those of a rule."""
    if rule != "schedule_free":
        return {}
    return {name: own.pop(name) for name in _OF_THE_LEAD} | {"seed": own["seed"]}


def reference(rule: str, arguments: dict[str, Any], decay: tuple[float, str], *weights: str) -> spec.Step:
    """Return a step of the reference.

    Args:
        rule: its name in the hunt.
        arguments: of all links but decay and learning rate.
        decay: its rate, and its kind.
        weights: their dtype and how they are stored.
    """
    own = dict(arguments)
    beside = {name: own.pop(name) for name in _BESIDE.get(rule, ())}
    lead = _lead(rule, own)
    common = spec.RULES[BASES.get(rule, rule)](**own), *decay, *weights
    if rule == "adafactor":
        return Adafactor(*common, **beside)
    if rule in _WHOLE:
        return _STEPS[rule](*common)
    if rule == "lamb":
        return spec.Lamb(*common, **beside, exact=True)
    return ScheduleFree(*common, spec.RULES[rule](**lead)) if lead else spec.Step(*common)


@dataclasses.dataclass(frozen=True)
class ScheduleFree(spec.Step):
    """A step of the reference with its average of weights behind the learning rate (contract A17)."""

    lead: spec.Rule = spec.RULES["schedule_free"]()

    def init(self, p: np.ndarray) -> spec.StepState:
        """Return the state of a leaf, in which the lead is a moment among the others."""
        state = super().init(p)
        kept = state.rule.moments | self.lead.init(p.shape).moments
        return state._replace(rule=spec.RuleState(0, kept))

    def step(self, p, g, state, leaf, learning_rate):
        """Return new patterns and state, as `spec.Step` does."""
        p32, count = self.storage.seen(p, state.extra), state.rule.count
        before, after = self.links(learning_rate)
        of_rule, of_lead = (
            spec.RuleState(count, {name: state.rule.moments[name] for name in rule.moments})
            for rule in (self.rule, self.lead)
        )
        u, of_rule = self.rule.step(_through(before, g, p32), of_rule, leaf, p32)
        u, of_lead = self.lead.step(_through(after, u, p32), of_lead, leaf, p32)
        words = random_words(self.rule.seed, of_rule.count, leaf, Role.PARAM, p.shape)
        u, extra = self.storage.emit(p, u, state.extra, words)
        kept = spec.RuleState(of_rule.count, of_rule.moments | of_lead.moments)
        return spec.apply_updates(p, u, self.param_dtype), spec.StepState(kept, extra)


def _through(stateless: Iterable[spec.Rule], u: np.ndarray, p32: np.ndarray) -> np.ndarray:
    for link in stateless:
        u, _ = link.step(u, link.init(u.shape), "", p32)
    return u


def stored(step: spec.Step) -> dict[str, spec.StoredMoment]:
    """Return how the moments of a step are stored, by name."""
    lead = step.lead.moments if isinstance(step, ScheduleFree) else {}
    return step.rule.moments | lead


def moment_names(rule: str) -> list[str]:
    """Return the names of the moments of a rule of the hunt."""
    lead = spec.RULES[rule].declared() if rule == "schedule_free" else ()
    return [*spec.RULES[BASES.get(rule, rule)].declared(), *lead]

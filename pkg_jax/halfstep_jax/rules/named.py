"""Named optimizers in JAX: the arguments of an alias, as a chain of the links that `halfstep` declares."""

import inspect
import math
from collections.abc import Callable, Mapping
from typing import Any

import jax
import optax

from halfstep.hyperparameters import Arguments, Scalar
from halfstep.rule import Rule
from halfstep.rules import trust_ratio, weight_decay
from halfstep.rules.named import Named
from halfstep_jax.leaf_calls import may_wait
from halfstep_jax.numbers.schedules import checked_peak_of
from halfstep_jax.rules.trust_ratio import scale_by_tempered_trust_ratio, scale_by_trust_ratio
from halfstep_jax.rules.weight_decay import add_decayed_weights
from halfstep_jax.transform import as_transform, say_once, transform_of
from halfstep_jax.weights.weight_storage import with_param_storage

Links = Mapping[type[Rule], Callable[..., optax.GradientTransformationExtraArgs]]
_LINKS: Links = {
    trust_ratio.ScaleByTemperedTrustRatio: scale_by_tempered_trust_ratio,
    trust_ratio.ScaleByTrustRatio: scale_by_trust_ratio,
    weight_decay.AddDecayedWeights: add_decayed_weights,
}


def named_transform(
    named: Named,
    **arguments: Any,  # each is checked by its link
) -> optax.GradientTransformationExtraArgs:
    """Return the transform of a named optimizer. Its links check the arguments of the alias."""
    storage = arguments["param_storage"]
    if whole := named.whole.get(storage):
        arguments = {**arguments, "peak_lr": _peak_lr(named.alias, arguments)}
        links = [*links_of(named.front, arguments), as_transform(whole(named.alias, arguments))]
        return links[0] if len(links) == 1 else may_wait(optax.chain(*links))
    return with_param_storage(named.alias, storage, links_of(named, arguments), arguments["seed"])


def _peak_lr(alias: str, arguments: Arguments) -> Scalar:
    """Return the largest learning rate of a run; infinite where it is not known: nothing is fed back then."""
    rate, peak, storage = (arguments[name] for name in ("learning_rate", "peak_lr", "param_storage"))
    if peak is not None:
        return peak
    if callable(rate):
        return checked_peak_of(alias, rate)
    if isinstance(rate, jax.Array):
        say_once(
            f"{alias}: learning_rate is an array, as optax.inject_hyperparams makes it, and peak_lr is None. "
            f'So param_storage="{storage}" feeds no rounding error of weights back. Pass peak_lr, the '
            "largest rate of the run; or a schedule, to inject_hyperparams with "
            "static_args=('learning_rate',)."
        )
        return math.inf
    return None


def links_of(
    named: Named, arguments: Arguments, links: Links | None = None
) -> list[optax.GradientTransformationExtraArgs]:
    """Return the links of a named optimizer, without links for arguments that the alias lacks.

    `links` are the functions that make links of some of its rules.
    """
    made = {**_LINKS, **(links or {})}
    parts = [part for part in named.parts if not part.needs or part.needs in arguments]
    functions = [(part, made.get(part.rule) or transform_of(part.rule)) for part in parts]
    return [make(**part.fields(inspect.signature(make).parameters, arguments)) for part, make in functions]

"""Named optimizers in torch: the arguments of a class, as a chain of the links that `halfstep` declares."""

import functools
import inspect
from typing import Any

from halfstep.hyperparameters import Arguments, Values, several
from halfstep.other_names import advice_on_argument
from halfstep.rule import Rule
from halfstep.rules import learning_rate, trace, trust_ratio, weight_decay
from halfstep.rules.named import Named
from halfstep_torch.links.chain import Chain, ChainByOptions, chain
from halfstep_torch.links.group_entries import ASKS_FOR_NOTHING, check_torch_options
from halfstep_torch.links.link import Link, ParamInfo
from halfstep_torch.numbers.hyperparameters import decay_rate
from halfstep_torch.numbers.seeds import as_seed
from halfstep_torch.optimizer import Optimizer
from halfstep_torch.rules.learning_rate import ScaleByLearningRate
from halfstep_torch.rules.trust_ratio import ScaleByTemperedTrustRatio
from halfstep_torch.rules.weight_decay import AddDecayedWeights
from halfstep_torch.weights.weight_storage import with_param_storage

_OF_OPTIMIZER = ("params", "maximize", "compile", "names", "state_device", "capturable")


class TraceUnlessZero(trace.Trace, Link):
    """The rule of `trace` in a param group, without a sum if the momentum is 0."""

    name = "trace"

    def is_noop(self, h: Values, info: ParamInfo) -> bool:
        """Whether there is no sum to keep."""
        return h.decay == 0


_LINKS: dict[type[Rule], type[Rule]] = {
    learning_rate.ScaleByLearningRate: ScaleByLearningRate,
    trace.Trace: TraceUnlessZero,
    trust_ratio.ScaleByTemperedTrustRatio: ScaleByTemperedTrustRatio,
    weight_decay.AddDecayedWeights: AddDecayedWeights,
}


def optimizer_arguments(
    optimizer: type[Optimizer],
    **arguments: Any,  # each is checked by its link
) -> Arguments:
    """Return the arguments of `Optimizer`, given the arguments of a named class, checked by its links."""
    caller, named = optimizer.__name__, named_of(optimizer)
    choices = (*(moment.rounding for moment in named.moments), *named.choices, "param_storage")
    _check_arguments(caller, arguments, {*named.arguments, *choices})
    check_torch_options(caller, arguments)
    given = {"learning_rate": arguments["lr"], **by_rates(caller, named, arguments), **arguments}
    given = {name: given[name] for name in named.arguments & given.keys()}
    given["seed"] = as_seed(caller, arguments["seed"])
    options = {name: arguments[name] for name in choices if name in arguments}
    tx = ChainByOptions(functools.partial(_chain, optimizer, given), options)
    return {"tx": tx, **{name: arguments[name] for name in _OF_OPTIMIZER if name in arguments}}


def _check_arguments(caller: str, arguments: Arguments, own: set[str]) -> None:
    """Raise TypeError for an unknown argument, such as a misspelt one of a subclass."""
    known = {*own, *_OF_OPTIMIZER, *ASKS_FOR_NOTHING, "lr", "betas", "recipe", "seed"}
    for name in arguments.keys() - known:
        raise TypeError(f"{caller}: unknown argument {name}. {advice_on_argument(name, sorted(known))}")


def named_of(optimizer: type[Optimizer]) -> Named:
    """Return the declaration of a named optimizer."""
    assert optimizer.named is not None
    return optimizer.named


def by_rates(caller: str, named: Named, arguments: Arguments) -> Arguments:
    """Return the rates in `betas`, if there are any, by their names in JAX: b1, b2, b3."""
    names = sorted({"b1", "b2", "b3"} & named.arguments)
    if not names:
        return {}
    betas = several(caller, "betas", arguments["betas"], len(names))
    for i, rate in enumerate(betas):
        decay_rate(caller, f"betas[{i}]", rate)
    return dict(zip(names, betas, strict=True))


def links_of(named: Named, given: Arguments) -> list[Rule]:
    """Return the links of a named optimizer, given values by their JAX names."""
    links = [(part, _LINKS.get(part.rule, part.rule)) for part in named.parts]
    return [link(**part.fields(inspect.signature(link).parameters, given)) for part, link in links]


def _chain(optimizer: type[Optimizer], given: Arguments, *, param_storage: str, **options: str) -> Chain:
    """Return the chain of a param group, given its storage, roundings and other options."""
    caller, named = optimizer.__name__, named_of(optimizer)
    for name in named.choices:
        if not isinstance(options[name], bool):
            raise TypeError(f"{caller}: {name}={options[name]!r} is not a bool. Use True or False.")
    given = {**given, **options}
    if whole := named.whole.get(param_storage):
        return chain(*links_of(named.front, given), whole(caller, given))
    return with_param_storage(caller, chain(*links_of(named, given)), param_storage, given["seed"])

"""What a param group may hold besides the numbers of the links, and the names of its parameters."""

import collections
import difflib
import operator
import reprlib
from collections.abc import Iterable, Iterator, Mapping, Sequence
from itertools import chain
from typing import Any

import numpy as np
from torch import Tensor

from halfstep_torch.leaves.names import leaf_names
from halfstep_torch.numbers.random_words import fold
from halfstep_torch.optimizer_state.form import HEADER

# Arguments of torch's own optimizers that ask for nothing where they have these values.
_ASKS_FOR_NOTHING = {
    "amsgrad": (False, None),
    "capturable": (False, None),
    "differentiable": (False, None),
    "foreach": (True, False, None),
    "fused": (True, False, None),
    "dampening": (0, None),
    "decoupled_weight_decay": (True, False, None),
    # Of transformers' Adafactor.
    "scale_parameter": (True, None),
    "relative_step": (True, None),
    "warmup_init": (False, None),
}
_FIXED_RATE = (
    " For a rate that is not relative use Optimizer with chain(scale_by_factored_rms(), "
    "clip_by_block_rms(1.0), scale_by_learning_rate(lr), round_stochastically())."
)
_WAYS = {"scale_parameter": _FIXED_RATE, "relative_step": _FIXED_RATE}
# What is an entry, or an argument, of some optimizer here or in torch.
_ELSEWHERE = {
    *("lr", "learning_rate", "betas", "b1", "b2", "eps", "eps_root", "weight_decay", "momentum", "nesterov"),
    *("mu_dtype", "nu_dtype", "accumulator_dtype", "mu_rounding", "nu_rounding", "rounding"),
    *(
        "param_storage",
        "seed",
        "tx",
        "trust_power",
        "max_norm",
        "bias_correction",
        "alpha",
        "recipe",
        "rho",
        "centered",
    ),
}

_NAMELESS: collections.Counter = collections.Counter()
"""How many optimizers without names this process has built, by their seeds."""


def parameter_names(caller: str, names: Any) -> dict[Tensor, str] | None:
    """Return the names that an optimizer was given beside its parameters, by parameter."""
    if names is None:
        return None
    pairs = list(names.items()) if isinstance(names, Mapping) else list(names)
    for pair in pairs:
        if not isinstance(pair, (tuple, list)) or len(pair) != 2 or not isinstance(pair[1], Tensor):
            raise TypeError(
                f"{caller}: names holds {type(pair).__name__}, not pairs (name, parameter). "
                "Pass list(model.named_parameters())."
            )
    return {param: name for name, param in pairs}


def with_names(caller: str, params: Any, names: Mapping[Tensor, str]) -> list:
    """Return parameters as pairs (name, parameter)."""
    listed = [params] if isinstance(params, Tensor) else list(params)
    bare = [x[1] if isinstance(x, (tuple, list)) else x for x in listed]
    for param in bare:
        if param not in names:
            raise ValueError(
                f"{caller}: a parameter of shape {tuple(param.shape)} has no name in names. "
                "Pass list(model.named_parameters()) of the whole model."
            )
    return [(names[param], param) for param in bare]


class NamedMembers:
    """The names of the parameters of all groups, kept by parameter.

    A list of parameters may be filtered, sorted or replaced in place. torch reads its list of names by
    position, so that list is set here to the names of the parameters.
    """

    def __init__(self):
        self._names: dict[Tensor, str] = {}
        self._listed: list[list[Tensor]] = []
        self._leaves: list[list[str]] = []

    def named(
        self, caller: str, groups: Sequence[dict[str, Any]], added: int
    ) -> Iterator[tuple[int, str, Tensor]]:
        """Return triples: index of the group, leaf name (contract W7), parameter; without names their places.

        Raises:
            ValueError: if a parameter was put into a list of parameters, and so has no name; or if there are
                other groups than so many that were `added`.
        """
        if len(groups) != added:
            raise ValueError(
                f"{caller}: {added} param groups were added, and there are {len(groups)}. "
                "Use add_param_group; empty a group's params to drop it."
            )
        params = [group["params"] for group in groups]
        if not _same(params, self._listed):
            for i, group in enumerate(groups):
                if "param_names" in group:
                    group["param_names"] = self._names_of(caller, i, group)
            self._leaves = _leaves_of(groups)
            self._listed = [list(listed) for listed in params]
        places = [i for i, listed in enumerate(params) for _ in listed]
        return zip(places, chain(*self._leaves), chain(*params), strict=True)

    def _names_of(self, caller: str, index: int, group: Mapping[str, Any]) -> list[str]:
        """Return the names of a group's parameters: one that replaces another has the name of that."""
        params, names = group["params"], group["param_names"]
        for place, param in enumerate(params):
            if param in self._names:
                continue
            if len(names) != len(params):
                raise ValueError(
                    f"{caller}: the parameter {place} of param group {index}, of shape {tuple(param.shape)}, "
                    "has no name, as it was put into the group's list. Use add_param_group. A wrapper that "
                    "puts flat arrays there (DeepSpeed's ZeRO) needs an optimizer without names: pass "
                    "model.parameters() and names=()."
                )
            self._names[param] = names[place]
        return [self._names[param] for param in params]


def _same(params: Sequence[list[Tensor]], others: Sequence[list[Tensor]]) -> bool:
    """Whether groups have the very same parameters."""
    if list(map(len, params)) != list(map(len, others)):
        return False
    return all(all(map(operator.is_, xs, ys)) for xs, ys in zip(params, others, strict=True))


def _leaves_of(groups: Sequence[Mapping[str, Any]]) -> list[list[str]]:
    names = [name for group in groups for name in group.get("param_names", ())]
    leaves, index, named = iter(leaf_names(names)), 0, []
    for group in groups:
        places = range(index, index + len(group["params"]))
        named.append([next(leaves) if "param_names" in group else str(place) for place in places])
        index = places.stop
    return named


def check_torch_options(caller: str, given: Mapping[str, Any]) -> None:
    """Raise ValueError for an argument of torch's own optimizers that asks for something we do not do."""
    for name, value in given.items():
        allowed = _ASKS_FOR_NOTHING.get(name)
        if allowed is not None and value not in allowed:
            way = f"Use {name}={allowed[0]!r}.{_WAYS.get(name, '')}"
            raise ValueError(f"{caller}: {name}={value!r} is not supported. {way}")


def check_decay(caller: str, index: int, group: Mapping[str, Any], decoupled: bool | None) -> None:
    """Raise ValueError for a group of torch's Adam in AdamW, or the other way round: decay differs."""
    saved_decay = group.get("decoupled_weight_decay")
    if None in (saved_decay, decoupled) or bool(saved_decay) == decoupled or not group.get("weight_decay"):
        return
    raise ValueError(
        f"{caller}: decoupled_weight_decay={saved_decay} in param group {index}, whose weight_decay is "
        f"{group['weight_decay']}; here decay is {'decoupled' if decoupled else 'added to the gradient'}. "
        f"Use {'AdamW' if saved_decay else 'Adam'}, or weight_decay=0."
    )


def check_maximize(caller: str, index: int, value: Any) -> None:
    """Raise TypeError for what would be true, or false, without being meant so."""
    if not (isinstance(value, (bool, np.bool_)) or (type(value) is int and value in (0, 1))):
        raise TypeError(
            f"{caller}: maximize of param group {index} is {value!r}, not a bool. Use True or False."
        )


def check_entries(caller: str, group: Mapping[str, Any], entries: set[str], arguments: set[str]) -> None:
    """Raise ValueError for an entry of a group that nothing would follow. Tags of a user's own are none."""
    check_torch_options(caller, {key: value for key, value in group.items() if key not in entries})
    for key in group:
        if key in entries or key in _ASKS_FOR_NOTHING or key in ("params", "param_names", HEADER):
            continue
        problem = f"{caller}: {key}={reprlib.repr(group[key])} in a param group"
        if key == "recipe" and key in arguments:
            raise ValueError(
                f"{problem}; it is read when the group is added. Build an optimizer with it, and move the "
                "float32_state_dict there by load_float32_state_dict."
            )
        if key in arguments:
            raise ValueError(
                f"{problem}; it is the same for all groups. "
                "Give it to the optimizer, or use an optimizer of its own for these parameters."
            )
        meant = difflib.get_close_matches(key, entries, 1, 0.85)
        if key in _ELSEWHERE or meant:
            known = f"Did you mean {meant[0]}?" if meant else f"Its entries are {', '.join(sorted(entries))}."
            raise ValueError(f"{problem}; nothing reads it. {known}")


def check_named(caller: str, group: Mapping[str, Any]) -> None:
    """Raise ValueError for a new group without names beside others that have names."""
    for param in () if "param_names" in group else group.get("params", ()):
        if isinstance(param, Tensor):
            raise ValueError(
                f"{caller}: a parameter of shape {tuple(param.shape)} of a new group has no name, and "
                "those of the other groups have. Pass pairs (name, parameter), or call register_names(model)."
            )


def check_names(caller: str, groups: Iterable[Mapping[str, Any]]) -> None:
    """Raise ValueError if two parameters have the same name: the same words would round them."""
    names = [name for group in groups for name in group.get("param_names", ())]
    taken: dict[str, str] = {}
    for name, leaf in zip(names, leaf_names(names), strict=True):
        if leaf in taken:
            raise ValueError(
                f"{caller}: the parameters {taken[leaf]!r} and {name!r} have the same name, {leaf!r}, "
                "and names decide the random words. Put a prefix before the names of each model."
            )
        taken[leaf] = name


def count_nameless(chain_seeds: Sequence[Any]) -> int:
    """Return how many optimizers without names were built before of such seeds, and count one more."""
    key = repr(tuple(chain_seeds))
    _NAMELESS[key] += 1
    return _NAMELESS[key] - 1


def nameless_seeds(chain_seeds: Sequence[Any], before: int) -> list[Any]:
    """Return the seeds of an optimizer without names, behind so many others (contract W7).

    Numbers, None, or tuples of them, as links have them.
    """
    return [_nameless_seed(seed, before) for seed in chain_seeds]


def _nameless_seed(seed: Any, before: int) -> Any:
    if isinstance(seed, tuple | list):
        return tuple(_nameless_seed(part, before) for part in seed)
    if seed is None or not before:
        return seed
    # No count of steps reaches 2^31, so no key of a step is among these.
    key = np.array([seed >> 32]), np.array([seed & 0xFFFFFFFF])
    high, low = fold(
        (key[0].astype(np.uint32), key[1].astype(np.uint32)), np.array([2**32 - before], np.uint32)
    )
    return int(high[0]) << 32 | int(low[0])

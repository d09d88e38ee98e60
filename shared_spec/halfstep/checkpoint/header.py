"""The header of a state file, with the links that step every weight. Contract: section T.

A recipe is a list of links, each with its count, seed, numbers, switches and arrays. Weights with equal
recipes share one recipe.
"""

import dataclasses
import json
import logging
import math
from collections.abc import Iterable, Mapping, Sequence

import numpy as np

from halfstep.checkpoint.header_form import Header
from halfstep.checkpoint.state_file import LAYOUT_VERSION
from halfstep.hyperparameters import Scalar
from halfstep.rule import Rule, declared
from halfstep.version import __version__

SPEC_VERSION = 4
"""Version of the contract, which changes whenever a published bit changes."""

Recipe = list[Header]
"""A weight's links in order, each made by `link_record`."""

_LOG = logging.getLogger("halfstep")
_HINT = "Build the optimizer of the run that was saved."
_THAT_RUN = "Pass the model and the optimizer of that run."
_IN_JAX = (
    "Arrays called optax/ belong to transforms that only JAX has. If such a transform wraps one of "
    "halfstep's, save the inner one: save_state(path, params, state.inner_state, inner)."
)
# Numbers that may change during a run, as with schedules.
_FREE = ("learning_rate", "lr", "weight_decay", "peak_lr")


def link_record(
    name: str,
    count: int | None,
    seed: Sequence[int] | None,
    numbers: Mapping[str, Scalar],
    options: Mapping[str, bool],
    arrays: Mapping[str, object],
    idle: bool = False,
) -> Header:
    """Return a link's entry in a recipe.

    A hyperparameter that is not a finite number, such as a schedule, becomes None. `arrays` has the format
    and rounding of every field that the link keeps for a weight. `idle` means that the link does not change
    the weight.
    """
    # JSON has no infinity, which as a bound has no effect.
    finite = {field: isinstance(x, float | np.floating) and math.isfinite(x) for field, x in numbers.items()}
    return {
        "name": name,
        "count": count,
        "seed": None if seed is None else list(seed),
        "numbers": {field: float(x) if finite[field] else None for field, x in numbers.items()},
        "options": dict(options),
        "arrays": dict(arrays),
        "idle": idle,
    }


def settings_of(rule: object, values: object) -> tuple[dict[str, object], dict[str, bool]]:
    """Return a rule's hyperparameters, with the values in `values`, and its switches."""
    numbers = declared(type(rule)).numbers if isinstance(rule, Rule) else ()
    fields = {field.name: getattr(rule, field.name) for field in dataclasses.fields(rule)}  # pyright: ignore[reportArgumentType]
    switches = {name: x for name, x in fields.items() if isinstance(x, bool) and name not in numbers}
    return {name: getattr(values, name, None) for name in numbers}, switches


def make_header(package: str, recipes: Mapping[str, Recipe], formats: Mapping[str, object]) -> Header:
    """Return a state file's header.

    `recipes` has each weight's recipe by name. `formats` has the formats of arrays that their dtype does not
    determine.
    """
    distinct: dict[str, Recipe] = {}
    keys = {leaf: json.dumps(recipe, sort_keys=True) for leaf, recipe in recipes.items()}
    for leaf, key in keys.items():
        distinct.setdefault(key, recipes[leaf])
    numbers = {key: i for i, key in enumerate(distinct)}
    return {
        "writer": f"{package} {__version__}",
        "spec_version": SPEC_VERSION,
        "layout_version": LAYOUT_VERSION,
        "leaves": {leaf: numbers[key] for leaf, key in keys.items()},
        "recipes": list(distinct.values()),
        "formats": dict(formats),
    }


def read_recipes(caller: str, header: Header, recipes: Mapping[str, Recipe]) -> dict[str, Recipe]:
    """Return every weight's recipe, and raise ValueError if weights or recipes differ from this run's."""
    check_spec_version(caller, "file", header["spec_version"])
    check_names(caller, "weight", header["leaves"], recipes)
    saved = {leaf: header["recipes"][number] for leaf, number in header["leaves"].items()}
    for leaf, recipe in recipes.items():
        _compare(caller, leaf, _keeping(saved[leaf]), _keeping(recipe))
        _compare_switches(caller, leaf, saved[leaf], recipe)
    _say_other_decay(caller, saved, recipes)
    return saved


def _say_other_decay(caller: str, saved: Mapping[str, Recipe], recipes: Mapping[str, Recipe]) -> None:
    """Log a different weight decay in the saved run, because JAX's default is 1e-4 and torch's 1e-2."""
    for leaf, recipe in recipes.items():
        before = {link["name"]: link["numbers"].get("weight_decay") for link in saved[leaf]}
        for link in recipe:
            was, now = before.get(link["name"]), link["numbers"].get("weight_decay")
            if None not in (was, now) and was != now:
                _LOG.warning(
                    f"{caller}: {link['name']} of {leaf!r} had weight_decay={was:.6g}, and goes on with "
                    f"{now:.6g}. For the steps of that run, build the optimizer with weight_decay={was:.6g}."
                )
                return


def check_spec_version(caller: str, what: str, version: object) -> None:
    """Raise ValueError for a file written under another version of the contract."""
    if version != SPEC_VERSION:
        raise ValueError(
            f"{caller}: the {what} follows version {version} of the contract, this package version "
            f"{SPEC_VERSION}. Load it with the halfstep that wrote it. To go on with this version, carry "
            "the run over in float32: weights by float32_params there and set_float32_params here, the "
            "state by to_optax and from_optax, in torch float32_state_dict and load_float32_state_dict."
        )


def paired(saved: Recipe, recipe: Recipe) -> Recipe:
    """Return the file's link for every link in this run, after `read_recipes` found equal recipes.

    A link without arrays may be missing in the file. The count for its schedule is then the count of the
    other links.
    """
    kept = iter(_keeping(saved))
    rest = [link for link in saved if link["count"] is not None]
    counts = {link["count"] for link in rest}
    links = []
    for link in recipe:
        if link in _keeping([link]):
            links.append(next(kept))
            continue
        same = next((other for other in rest if other["name"] == link["name"]), None)
        links.append(same or {**link, "count": min(counts) if len(counts) == 1 else None})
    return links


def check_names(caller: str, what: str, saved: Iterable[str], names: Iterable[str]) -> None:
    """Raise ValueError unless the file has the names of this run."""
    missing, unknown = sorted(set(names) - set(saved)), sorted(set(saved) - set(names))
    if missing or unknown:
        problem = (
            f"lacks the {what}s {_listed(missing)}" if missing else f"has the {what}s {_listed(unknown)}"
        )
        here = "" if missing else ", which are not here"
        if missing and unknown:
            here = f", and has the {what}s {_listed(unknown)}: renamed or wrapped since"
        way_out = _IN_JAX if any(name.startswith("optax/") for name in unknown) else _THAT_RUN
        raise ValueError(f"{caller}: the file {problem}{here}. {way_out}")


def _keeping(recipe: Recipe) -> Recipe:
    """Return the links that keep arrays or round weights, on which the bits of a run depend."""
    rounding = "round_stochastically"
    return [link for link in recipe if link["arrays"] or (link["name"] == rounding and not link["idle"])]


def _compare(caller: str, leaf: str, saved: Sequence[dict], recipe_here: Sequence[dict]) -> None:
    names = [
        [link["name"] for link in recipe] or ["no link that keeps anything"]
        for recipe in (saved, recipe_here)
    ]
    if names[0] != names[1]:
        raise ValueError(
            f"{caller}: {leaf!r} was stepped by {', '.join(names[0])}; here by {', '.join(names[1])}. {_HINT}"
        )
    for saved_link, link in zip(saved, recipe_here, strict=True):
        for what in ("arrays", "options", "numbers"):
            _compare_values(caller, leaf, saved_link, link, what)
        if saved_link["arrays"].keys() != link["arrays"].keys():
            raise ValueError(
                f"{caller}: {saved_link['name']} of {leaf!r} kept {', '.join(saved_link['arrays'])}, here "
                f"{', '.join(link['arrays'])}. {_HINT}"
            )


def _compare_switches(caller: str, leaf: str, saved: Recipe, recipe_here: Recipe) -> None:
    """Raise ValueError if a link without arrays has other switches in the two recipes."""
    for name in {link["name"]: None for link in recipe_here if not link["arrays"]}:
        switches = [[link for link in recipe if link["name"] == name] for recipe in (saved, recipe_here)]
        for saved_link, link in zip(*switches, strict=False):
            _compare_values(caller, leaf, saved_link, link, "options")


def _compare_values(caller: str, leaf: str, saved_link: dict, link: dict, what: str) -> None:
    """Raise ValueError if two links differ in arrays, options or numbers that both have."""
    for name in sorted(saved_link[what].keys() & link[what].keys()):
        a, b = saved_link[what][name], link[what][name]
        if a != b and name not in _FREE and None not in (a, b):
            raise ValueError(
                f"{caller}: {saved_link['name']} of {leaf!r} had {name}={_said(a)}, "
                f"here {name}={_said(b)}. {_HINT}"
            )


def _said(value: object) -> str:
    if not isinstance(value, dict):
        return repr(value)
    label = value["format"]
    extras = [f"{key} {label[key]}" for key in ("block_size", "scale") if key in label]
    extras += ["relative"] * label.get("relative", False)
    extras += [str(value["rounding"])] if "rounding" in value else []
    return f"{label['dtype']} ({', '.join(extras)})" if extras else label["dtype"]


def _listed(names: Sequence[str]) -> str:
    shown = ", ".join(map(repr, names[:8]))
    return shown if len(names) <= 8 else f"{shown} and {len(names) - 8} more"

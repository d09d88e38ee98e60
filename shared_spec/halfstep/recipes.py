"""Named settings of optimizers: how many bytes to keep, in one word.

Each is a mapping of keyword arguments of Adam, AdamW, LAMB and LAMB16, for bfloat16 weights:
`adamw(1e-3, **recipes.eight_bit)`. Every optimizer takes the name too, and arguments that are given beside it
win: `adamw(1e-3, recipe="eight_bit")`; so does every link with moments. Of Lion, SGD and Adan, whose first
moments have no second one as a unit, it names what fits these. Of Muon it names the formats of what AdamW
steps, and the momentum has 16 bits, as much as two moments of 8.

>>> from halfstep import recipes
>>> recipes.eight_bit["nu_dtype"].text
'uroot8, blocks of 128'

`docs/recipes.md` has what each of them costs and how closely it follows float32.

Contract: F1, F5, F6, F12 to F19.
"""

import functools
import inspect
import types
from collections.abc import Callable, Iterable, Mapping
from typing import Any, TypeVar

from halfstep.storage.moment_formats import AMPLIFIED
from halfstep.storage.relative import relative
from halfstep.storage.state_dtypes import scaled

full_precision = types.MappingProxyType(
    {"param_storage": "split16", "mu_dtype": "float32", "nu_dtype": "float32"}
)
"""12 bytes per parameter: float32 weights, of which the model sees the upper half, and float32 moments."""

near_float32 = types.MappingProxyType(
    {"param_storage": "split8", "mu_dtype": "bfloat16", "nu_dtype": "bfloat16"}
)
"""7 bytes: weights of 24 bits, moments of 16."""

sixteen_bit = types.MappingProxyType({"mu_dtype": "bfloat16", "nu_dtype": "bfloat16"})
"""6 bytes: what bfloat16 weights get by default."""

one_pass = types.MappingProxyType({"mu_dtype": relative("mulaw8"), "nu_dtype": "uroot4_e4m4"})
"""4.00 bytes: 8-bit moments without scales, roots and quotients, so that a step reads memory once."""

eight_bit = types.MappingProxyType(
    {"mu_dtype": relative("float8_e3m4"), "nu_dtype": scaled("uroot8", 128), "mu_rounding": "feedback"}
)
"""4.01 bytes: the second moment with a scale per block of 128, and so nearer to float32, in a second pass."""

four_bit = types.MappingProxyType(
    {"mu_dtype": relative("int4", 32), "nu_dtype": scaled("uroot8", 128), "mu_rounding": "feedback"}
)
"""3.55 bytes: a first moment of 4 bits, a second one of 8."""

_FORMATS = ("mu_dtype", "nu_dtype")
# Of moments with a sign of which no second one is the unit.
_ALONE = {
    "full_precision": "float32",
    "near_float32": "bfloat16",
    "sixteen_bit": "bfloat16",
    "eight_bit": scaled("float8_e4m3fn", 128),
}
# Of the lead of a schedule-free run, whose errors stay in the average (dist on digits 0.05; of e4m3fn 0.15).
_LEAD = _ALONE | {"near_float32": AMPLIFIED, "eight_bit": scaled("int8", 32, scale="fine")}
# The argument for the dtype of the factor of Muon; and how its momentum is kept, whose errors that magnifies.
_FACTOR = "ns_dtype"
_MOMENTUM = {"full_precision": "float32"} | dict.fromkeys(
    ("near_float32", "sixteen_bit", "one_pass", "eight_bit"), AMPLIFIED
)

F = TypeVar("F", bound=Callable[..., Any])


def takes_recipe(function: F) -> F:
    """Let an optimizer, a function or the `__init__` of a class, or a link follow its argument `recipe`."""
    parameters = inspect.signature(function).parameters

    @functools.wraps(function, updated=())
    def call(*args: Any, **options: Any) -> Any:
        name = getattr(function, "name", function.__name__)
        caller = type(args[0]).__name__ if name == "__init__" else name
        _check_arguments(caller, args, options, parameters)
        if (recipe := options.get("recipe")) is not None:
            options = {**settings(caller, recipe, parameters), **options}
        if "recipe" not in parameters:
            options.pop("recipe", None)
        return function(*args, **options)

    return call  # pyright: ignore[reportReturnType]


def _check_arguments(caller: str, args: tuple, options: Mapping[str, Any], parameters: Mapping) -> None:
    """Refuse recipes where they are not recipes, or not of such an optimizer."""
    if any(isinstance(x, types.MappingProxyType) for x in args):
        raise TypeError(f'{caller}: a recipe is given by position. Pass it by name, as recipe="one_pass".')
    moments = _moments(parameters)
    for name in _FORMATS:
        fmt = options.get(name)
        if name in options and (name not in moments or (len(moments) > 2 and getattr(fmt, "relative", 0))):
            raise TypeError(
                f"{caller}: {name}={getattr(fmt, 'text', fmt)!r} is for Adam and LAMB. "
                f"Use {'=..., '.join(moments)}=..., or recipe={_names(_known(parameters))}."
            )
    if "param_storage" in options and "param_storage" not in parameters:
        _refuse_storage(caller, f"param_storage={options['param_storage']!r}")


def settings(caller: str, recipe: Any, parameters: Mapping[str, Any]) -> Mapping[str, Any]:
    """Return the arguments for which a recipe stands, of those that an optimizer has."""
    recipes, known, moments = _recipes(), _known(parameters), _moments(parameters)
    if recipe in recipes and "param_storage" in recipes[recipe] and "param_storage" not in parameters:
        _refuse_storage(caller, f"recipe={recipe!r}")
    if recipe not in known:
        why = "does not apply: it is for Adam and LAMB" if recipe in recipes else "is not a recipe"
        raise ValueError(f"{caller}: recipe={recipe!r} {why}. Use {_names(known)}.")
    chosen = recipes[recipe]
    if set(moments) == set(_FORMATS):
        return chosen
    # Lion's update is not linear in its moment, so that no error is fed back.
    rest = {key: x for key, x in chosen.items() if key not in (*_FORMATS, "mu_rounding")}
    if _has_factor(parameters):
        of_adamw = {f"adam_{name}": chosen[name] for name in ("mu_dtype", "mu_rounding") if name in chosen}
        of_adamw["nu_dtype"] = chosen["nu_dtype"]
        given = {name: x for name, x in of_adamw.items() if name in parameters}
        return {**rest, **given, "mu_dtype": _MOMENTUM[recipe]}
    alone = _LEAD if "lead_dtype" in moments else _ALONE
    return rest | {name: chosen[name] if name == "nu_dtype" else alone[recipe] for name in moments}


def _recipes() -> dict[str, Mapping[str, Any]]:
    return {name: x for name, x in globals().items() if isinstance(x, types.MappingProxyType)}


def _known(parameters: Mapping[str, Any]) -> list[str]:
    """Return the names of the recipes that apply to such arguments."""
    stores, recipes = "param_storage" in parameters, _recipes()
    names = recipes if set(_moments(parameters)) == set(_FORMATS) else _ALONE
    names = _MOMENTUM if _has_factor(parameters) else names
    return [name for name in names if stores or "param_storage" not in recipes[name]]


def _moments(parameters: Mapping[str, Any]) -> list[str]:
    """Return the arguments that say how moments are stored."""
    return [name for name in parameters if name.endswith("_dtype") and name != _FACTOR]


def _has_factor(parameters: Mapping[str, Any]) -> bool:
    """Whether such arguments are Muon's."""
    return _FACTOR in parameters


def _refuse_storage(caller: str, given: str) -> None:
    raise TypeError(
        f"{caller}: {given} says how weights are stored, which a link does not. Leave it to the chain: end "
        "it with round_stochastically() or compensate(), or wrap it in split_params(...)."
    )


def _names(recipes: Iterable[str]) -> str:
    *names, last = (f'"{name}"' for name in recipes)
    return f"{', '.join(names)} or {last}"

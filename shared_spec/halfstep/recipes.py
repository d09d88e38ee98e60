"""Named settings of optimizers: how many bytes to keep, in one word.

Each is a mapping of keyword arguments of Adam, AdamW, LAMB and LAMB16, for bfloat16 weights:
`adamw(1e-3, **recipes.eight_bit)`. Every optimizer takes the name too, and arguments that are given beside it
win: `adamw(1e-3, recipe="eight_bit")`. Of Lion and SGD, which keep one moment, it names what fits that.

>>> from halfstep import recipes
>>> recipes.eight_bit["nu_dtype"].text
'uroot8, blocks of 128'

`docs/recipes.md` has what each of them costs and how closely it follows float32.

Contract: F1, F5, F6, F12 to F19.
"""

import functools
import inspect
import types
from collections.abc import Callable, Mapping
from typing import Any, TypeVar

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
    {"mu_dtype": relative("float8_e3m4"), "nu_dtype": scaled("uroot8", 128), "mu_rounding": "paid"}
)
"""4.01 bytes: the second moment with a scale per block of 128, and so nearer to float32, in a second pass."""

four_bit = types.MappingProxyType(
    {"mu_dtype": relative("int4", 32), "nu_dtype": scaled("uroot8", 128), "mu_rounding": "paid"}
)
"""3.55 bytes: a first moment of 4 bits, a second one of 8."""

_FORMATS = ("mu_dtype", "nu_dtype")
# Of optimizers with one moment, of which no second one is the unit.
_ONE_MOMENT = {
    "full_precision": "float32",
    "near_float32": "bfloat16",
    "sixteen_bit": "bfloat16",
    "eight_bit": scaled("float8_e4m3fn", 128),
}

F = TypeVar("F", bound=Callable[..., Any])


def takes_recipe(function: F) -> F:
    """Let an optimizer, a function or the `__init__` of a class, follow its argument `recipe`."""
    parameters = inspect.signature(function).parameters

    @functools.wraps(function)
    def call(*args: Any, **options: Any) -> Any:
        caller = type(args[0]).__name__ if function.__name__ == "__init__" else function.__name__
        _check_arguments(caller, args, options, parameters)
        if (recipe := options.get("recipe")) is not None:
            options = {**_settings(caller, recipe, parameters), **options}
        return function(*args, **options)

    return call  # pyright: ignore[reportReturnType]


def _check_arguments(caller: str, args: tuple, options: Mapping[str, Any], parameters: Mapping) -> None:
    """Refuse recipes where they are not recipes, or not of such an optimizer."""
    if any(isinstance(x, types.MappingProxyType) for x in args):
        raise TypeError(f'{caller}: a recipe is given by position. Pass it by name, as recipe="one_pass".')
    for name in _FORMATS:
        if name in options and name not in parameters:
            raise TypeError(
                f"{caller}: {name}={getattr(options[name], 'text', options[name])!r} is no argument of an "
                f"optimizer with one moment. Use {_moment(parameters)}=..., or recipe={_names(_ONE_MOMENT)}."
            )


def _settings(caller: str, recipe: Any, parameters: Mapping) -> Mapping[str, Any]:
    """Return the arguments for which a recipe stands."""
    recipes = {name: x for name, x in globals().items() if isinstance(x, types.MappingProxyType)}
    one_moment = not set(_FORMATS) <= set(parameters)
    known = _ONE_MOMENT if one_moment else recipes
    if recipe in known:
        if not one_moment:
            return recipes[recipe]
        # Lion's update is not linear in its moment, so that nothing is paid.
        of_moments = (*_FORMATS, "mu_rounding")
        weights = {key: x for key, x in recipes[recipe].items() if key not in of_moments}
        return {**weights, _moment(parameters): _ONE_MOMENT[recipe]}
    why = "does not apply: it keeps one moment" if recipe in recipes else "is not a recipe"
    raise ValueError(f"{caller}: recipe={recipe!r} {why}. Use {_names(known)}.")


def _moment(parameters: Mapping) -> str:
    return next(name for name in ("mu_dtype", "accumulator_dtype") if name in parameters)


def _names(recipes: Mapping) -> str:
    *names, last = (f'"{name}"' for name in recipes)
    return f"{', '.join(names)} or {last}"

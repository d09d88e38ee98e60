"""Named settings for optimizers, which choose the bytes per parameter in one word.

Each recipe is a mapping with keyword arguments for Adam, AdamW, LAMB and LAMB16 with bfloat16 weights:
`adamw(1e-3, **recipes.eight_bit)`. Every optimizer and every link with moments also accepts the name, and
explicit arguments override the recipe: `adamw(1e-3, recipe="eight_bit")`. For Lion, SGD, Adan and AdEMAMix,
where first moments have no second moment as a unit, the name stands for formats that fit. For Muon it stands
for the formats of AdamW's part, and the momentum has 16 bits, as many as two 8-bit moments.

>>> from halfstep import recipes
>>> recipes.eight_bit["nu_dtype"].text
'uroot8, blocks of 128'

`docs/recipes.md` gives the cost of each recipe and its distance from float32.

Contract: F1, F5, F6, F12 to F19.
"""

import functools
import inspect
import types
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any, Literal, TypedDict, TypeVar, cast

from halfstep.did_you_mean import did_you_mean, listed
from halfstep.hyperparameters import Arguments
from halfstep.other_names import advice_on_argument
from halfstep.rule import Moment
from halfstep.storage.formats import Format
from halfstep.storage.moment_formats import AMPLIFIED, Rounding
from halfstep.storage.relative import relative
from halfstep.storage.state_dtypes import scaled
from halfstep.weight_storage import FED_BACK, PARAM_STORAGES, ParamStorage


class Settings(TypedDict, total=False):
    """The arguments in a recipe, by name."""

    param_storage: ParamStorage
    mu_dtype: str | Format
    nu_dtype: str | Format
    mu_rounding: Rounding


class _Recipe(Mapping):
    """Immutable settings. A pickle or a copy returns the recipe with the same name."""

    def __init__(self, settings: Settings) -> None:
        self._settings = dict(settings)

    def __getitem__(self, key: str) -> object:
        return self._settings[key]

    def __iter__(self) -> Iterator[str]:
        return iter(self._settings)

    def __len__(self) -> int:
        return len(self._settings)

    def __or__(self, other: Mapping) -> Arguments:
        return self._settings | dict(other)

    def __ror__(self, other: Mapping) -> Arguments:
        return dict(other) | self._settings

    def __repr__(self) -> str:
        return repr(self._settings)

    def __reduce__(self) -> str:
        return next(name for name, x in _recipes().items() if x is self)


def _recipe(settings: Settings) -> Settings:
    return cast("Settings", _Recipe(settings))


full_precision = _recipe({"param_storage": "split16", "mu_dtype": "float32", "nu_dtype": "float32"})
"""12 bytes per parameter: float32 weights, with the upper half in the model, and float32 moments."""

near_float32 = _recipe({"param_storage": "split8", "mu_dtype": "bfloat16", "nu_dtype": "bfloat16"})
"""7 bytes: 24-bit weights and 16-bit moments."""

sixteen_bit = _recipe({"mu_dtype": "bfloat16", "nu_dtype": "ufloat16_e7m9"})
"""6 bytes, as by default, but the second moment has two more mantissa bits than bfloat16."""

one_pass = _recipe({"mu_dtype": relative("mulaw8"), "nu_dtype": "uroot4_e4m4"})
"""4.00 bytes: 8-bit moments without scales, roots and quotients, so that a step reads memory once."""

eight_bit = _recipe(
    {"mu_dtype": relative("float8_e3m4"), "nu_dtype": scaled("uroot8", 128), "mu_rounding": "feedback"}
)
"""4.01 bytes: the second moment has a scale per 128 elements. Closer to float32, but in a second pass."""

four_bit = _recipe(
    {"mu_dtype": relative("int4", 32), "nu_dtype": scaled("uroot8", 128), "mu_rounding": "feedback"}
)
"""3.55 bytes: a 4-bit first moment and an 8-bit second moment."""

Recipe = (
    Literal["full_precision", "near_float32", "sixteen_bit", "one_pass", "eight_bit", "four_bit"] | Settings
)
"""Type of the argument `recipe`, a name or the recipe itself."""


def __dir__() -> list[str]:
    """Return only the recipes, for completion."""
    return sorted(_recipes())


# For signed moments without a second moment as a unit.
_ALONE = {
    "full_precision": "float32",
    "near_float32": "bfloat16",
    "sixteen_bit": "bfloat16",
    "eight_bit": scaled("float8_e4m3fn", 128),
}
# For a schedule-free lead, where errors stay in the average (distance 0.05 on digits, with e4m3fn 0.15).
_LEAD = _ALONE | {"near_float32": AMPLIFIED, "eight_bit": scaled("int8", 32, scale="fine")}
# For a momentum with errors that a factor magnifies.
_AMPLIFIED = {"full_precision": "float32"} | dict.fromkeys(
    ("near_float32", "sixteen_bit", "one_pass", "eight_bit"), AMPLIFIED
)

F = TypeVar("F", bound=Callable)


def takes_recipe(moments: Iterable[Moment], stores_weights: bool = True) -> Callable[[F], F]:
    """Return a decorator that adds the argument `recipe` to an optimizer function, `__init__` or link.

    Args:
        moments: the moments it keeps, each with the argument names for its format and rounding.
        stores_weights: whether it has `param_storage`, as optimizers do and links do not.
    """
    moments = tuple(moment for moment in moments if moment.dtype)

    def decorate(function: F) -> F:
        if not moments:
            return function
        parameters = inspect.signature(function).parameters
        takes_it = "recipe" in parameters
        takes_all = any(x.kind is inspect.Parameter.VAR_KEYWORD for x in parameters.values())

        @functools.wraps(function, updated=())
        def call(*args: Any, **options: Any) -> Any:  # the function's arguments and result
            name = getattr(function, "name", function.__name__)
            caller = type(args[0]).__name__ if name == "__init__" else name
            if not takes_all:
                _check_names(caller, options, parameters)
            _check_arguments(caller, args, options, moments, stores_weights)
            if (recipe := options.get("recipe")) is not None:
                chosen = settings(caller, recipe, moments, stores_weights, options)
                options = {**chosen, **_without_defaults(options, chosen, parameters)}
            if "param_storage" in parameters and options.get("param_storage") is None:
                options["param_storage"] = "stochastic"
            if not takes_it:
                options.pop("recipe", None)
            return function(*args, **options)

        return call  # pyright: ignore[reportReturnType]

    return decorate


def _without_defaults(
    options: Arguments, chosen: Arguments, parameters: Mapping[str, inspect.Parameter]
) -> Arguments:
    """Return arguments without defaults that a recipe sets, because some callers pass all arguments.

    `optax.inject_hyperparams` does so, and command lines made from a signature.
    """

    def is_default(name: str, x: object) -> bool:
        default = parameters[name].default if name in parameters else None
        return x is default or (isinstance(x, str) and x == default)

    return {name: x for name, x in options.items() if name not in chosen or not is_default(name, x)}


def _check_names(caller: str, options: Arguments, parameters: Mapping[str, object]) -> None:
    """Raise TypeError for an unknown argument, with the right name."""
    takes = [name for name in parameters if name != "self"]
    for name in options.keys() - parameters.keys() - {"recipe", "mu_dtype", "nu_dtype", "param_storage"}:
        raise TypeError(f"{caller}: there is no argument {name}. {advice_on_argument(name, takes)}")


def _check_arguments(
    caller: str, args: tuple, options: Arguments, moments: Sequence[Moment], stores_weights: bool
) -> None:
    """Raise an error for a recipe that is passed in the wrong way, or that does not fit the optimizer."""
    if any(isinstance(x, _Recipe) for x in args):
        raise TypeError(f'{caller}: a recipe is given by position. Pass it by name, as recipe="one_pass".')
    of_argument = {moment.dtype: moment for moment in moments}
    for name in ("mu_dtype", "nu_dtype"):
        fmt, moment = options.get(name), of_argument.get(name)
        in_units = getattr(fmt, "relative", 0)
        if name in options and (moment is None or (len(moments) > 2 and in_units and not moment.unit)):
            raise TypeError(
                f"{caller}: {name}={getattr(fmt, 'text', fmt)!r} is for Adam and LAMB. Use "
                f"{'=..., '.join(of_argument)}=..., or recipe={listed(_offered(moments, stores_weights))}."
            )
    if "param_storage" in options and not stores_weights:
        _refuse_storage(caller, f"param_storage={options['param_storage']!r}")


def settings(
    caller: str,
    recipe: object,
    moments: Sequence[Moment],
    stores_weights: bool = True,
    beside: Arguments = types.MappingProxyType({}),
) -> Arguments:
    """Return a recipe's arguments for an optimizer that keeps the given moments.

    `beside` has the explicit arguments. Weight errors are fed back into a moment before it is stored, when
    its own storage error is not yet known, so the moment is rounded stochastically (contract A21).
    """
    recipes, offered = _recipes(), _offered(moments, stores_weights)
    recipe = next((name for name, x in recipes.items() if x is recipe), recipe)
    if not isinstance(recipe, str):
        raise TypeError(f"{caller}: recipe={recipe!r} is not a recipe. Use {listed(offered)}.")
    if recipe in recipes and "param_storage" in recipes[recipe] and not stores_weights:
        _refuse_storage(caller, f"recipe={recipe!r}")
    if recipe not in offered:
        why = "does not apply: it is for Adam and LAMB" if recipe in recipes else "is not a recipe"
        meant = "" if recipe in recipes else did_you_mean(recipe, offered)
        if not (meant or recipe in recipes) and stores_weights:
            meant = did_you_mean(recipe, PARAM_STORAGES).replace("mean ", "mean param_storage=")
        raise ValueError(f"{caller}: recipe={recipe!r} {why}. {meant}Use {listed(offered)}.")
    chosen = recipes[recipe]
    given = {name: x for name, x in chosen.items() if name == "param_storage"}
    for moment in moments:
        given[moment.dtype] = _formats(moment, moments)[recipe]
        # Updates from a moment without a unit are not linear in it, so that no error is fed back.
        if moment.unit and "mu_rounding" in chosen:
            fed_back = beside.get("param_storage") == FED_BACK
            given[moment.rounding] = "stochastic" if fed_back else chosen["mu_rounding"]
    return given


def _formats(moment: Moment, moments: Sequence[Moment]) -> Mapping[str, str | Format]:
    """Return a moment's format under each recipe that has one."""
    recipes = _recipes()
    if not moment.signed:
        names = recipes if any(other.unit == moment.name for other in moments) else _ALONE
        return {name: recipes[name]["nu_dtype"] for name in names}
    if moment.unit:
        return {name: chosen["mu_dtype"] for name, chosen in recipes.items()}
    return {"amplified": _AMPLIFIED, "lasting": _LEAD}.get(moment.errors, _ALONE)


def _recipes() -> dict[str, Arguments]:
    return {name: x for name, x in globals().items() if isinstance(x, _Recipe)}


def _offered(moments: Sequence[Moment], stores_weights: bool) -> list[str]:
    """Return the names of recipes that have a format for every given moment."""
    return [
        name
        for name, chosen in _recipes().items()
        if all(name in _formats(moment, moments) for moment in moments)
        and (stores_weights or "param_storage" not in chosen)
    ]


def _refuse_storage(caller: str, given: str) -> None:
    raise TypeError(
        f"{caller}: {given} says how weights are stored, which a link does not. Leave it to the chain: end "
        "it with round_stochastically() or compensate(), or wrap it in split_params(...)."
    )

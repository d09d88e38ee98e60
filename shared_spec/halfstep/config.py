"""Optimizers from a config, given as a text or a mapping with a name and arguments.

Case and underscores in the name are ignored. Arguments in a text are literals. It is parsed and never run.
"""

import ast
import inspect
from collections.abc import Callable, Iterable, Mapping
from typing import TypeVar

from halfstep.hyperparameters import Arguments
from halfstep.other_names import advice_on_argument, advice_on_name, plain

T = TypeVar("T", bound=Callable)


def read_config(caller: str, config: object) -> tuple[str, Arguments]:
    """Return an optimizer's name and arguments.

    Args:
        caller: name for messages.
        config: `"adamw"`, `"AdamW(recipe='one_pass')"`, or a mapping with a `name` and arguments.

    Raises:
        TypeError: if `config` is neither a text nor a mapping.
        ValueError: if a mapping has no name, or a text is not a name with literals as arguments.

    Example:
        >>> read_config("from_config", "AdamW(lr=1e-3, recipe='one_pass')")
        ('AdamW', {'lr': 0.001, 'recipe': 'one_pass'})
    """
    if isinstance(config, Mapping):
        arguments = {str(key): value for key, value in config.items()}
        if not isinstance(name := arguments.pop("name", None), str):
            raise ValueError(
                f'{caller}: {dict(config)!r} has no name. Use {{"name": "adamw", ...}}, arguments beside it.'
            )
        return name, arguments
    if not isinstance(config, str):
        raise TypeError(
            f"{caller}: config={config!r} is neither a text nor a mapping. Use \"AdamW(recipe='one_pass')\"."
        )
    try:
        call = ast.parse(config.strip(), mode="eval").body
        if isinstance(call, ast.Name):
            return call.id, {}
        if isinstance(call, ast.Call) and isinstance(call.func, ast.Name) and not call.args:
            pairs = [(keyword.arg, ast.literal_eval(keyword.value)) for keyword in call.keywords]
            if all(name is not None for name, _ in pairs):
                return call.func.id, {str(name): value for name, value in pairs}
    except (SyntaxError, ValueError, RecursionError, MemoryError):
        pass
    raise ValueError(
        f"{caller}: {config!r} is not a name with arguments by name that are literals, and is not run. "
        "Use \"AdamW(recipe='one_pass')\", or a mapping."
    )


def chosen(caller: str, name: str, optimizers: Mapping[str, T], arguments: Iterable[str], package: str) -> T:
    """Return the optimizer with a name, in any case and with any underscores, if it accepts the arguments.

    Raises:
        ValueError: if the name is unknown, an argument is unknown, or a required argument is missing.
    """
    by_name = {plain(other): other for other in optimizers}
    if plain(name) not in by_name:
        advice = advice_on_name(name, optimizers, package) or f"Use one of {', '.join(sorted(optimizers))}."
        raise ValueError(f"{caller}: {name!r} is not an optimizer. {advice}")
    name = by_name[plain(name)]
    found = optimizers[name]
    parameters = inspect.signature(found).parameters
    takes = [key for key in parameters if key not in ("params", "self")]
    for key in arguments:
        if key not in takes:
            advice = advice_on_argument(key, takes)
            raise ValueError(f"{caller}: {name} has no argument {key!r}. {advice}")
    needed = [key for key in takes if parameters[key].default is inspect.Parameter.empty]
    if missing := [key for key in needed if key not in arguments and _is_one(parameters[key])]:
        raise ValueError(f"{caller}: {name} needs {missing[0]}. Add {missing[0]}=... to the config.")
    return found


def _is_one(parameter: inspect.Parameter) -> bool:
    return parameter.kind not in (inspect.Parameter.VAR_POSITIONAL, inspect.Parameter.VAR_KEYWORD)

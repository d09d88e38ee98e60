"""What Griffe, which reads docstrings from the source, does not know of ours."""

import re
from collections.abc import Sequence
from typing import Any

import griffe

_MADE_OF = re.compile(r"\b(?:transform_of\(|link_of\(|returning\(\w+, )([\w.]+)")


class Examples(griffe.Extension):
    """A docstring's "Example:" becomes a section of code; Griffe knows the plural alone."""

    def on_object(self, *, obj: griffe.Object, **_: Any) -> None:
        """Rename it in the docstring of one object."""
        if obj.docstring:
            obj.docstring.value = re.sub(r"^Example:$", "Examples:", obj.docstring.value, flags=re.MULTILINE)


class Shared(griffe.Extension):
    """Docstrings that stand once in `halfstep`, on the pages of both packages.

    A link is made of its rule, as `link_of(ScaleByLion)`: it has the rule's arguments, and the docstring of
    the rule in `halfstep`. So has a function that gives what another of `halfstep` does in a kind of its own,
    as `returning(Format, shared.scaled)`. A class without a docstring has that of its base.
    """

    def on_package(self, *, pkg: griffe.Module, loader: griffe.GriffeLoader, **_: Any) -> None:
        """Replace the attributes of a package that are functions made of others by functions."""
        for module in [pkg, *_modules(pkg)]:
            for attribute in [x for x in module.members.values() if isinstance(x, griffe.Attribute)]:
                if made_of := _MADE_OF.search(str(attribute.value)):
                    name, dot, inside = made_of[1].partition(".")
                    origin = loader.modules_collection[module.resolve(name) + dot + inside]
                    made = _again if isinstance(origin, griffe.Function) else _function
                    module.set_member(attribute.name, made(attribute, origin))
            for cls in [x for x in module.members.values() if isinstance(x, griffe.Class)]:
                if cls.is_public and not cls.docstring:
                    _inherit(cls, cls.mro())
                for method in cls.functions.values():
                    if cls.is_public and method.is_public and not method.docstring:
                        _inherit(
                            method,
                            [x.functions[method.name] for x in cls.mro() if method.name in x.functions],
                        )
        if pkg.name in ("halfstep_jax", "halfstep_torch"):
            list_arguments(pkg)


_LEFT_TO_OTHERS = re.compile(
    r"[Aa]rguments\b[^.;]{0,60}?\s(?:are|and)\s+[^.;]{0,40}?(?:those|the same|as in)"
)
_SECTION = re.compile(r"^(?=\w+:$|Source: )", flags=re.MULTILINE)


def list_arguments(pkg: griffe.Module) -> None:
    """List the arguments of functions and classes that refer to `other`, as `other` has them.

    Raises:
        ValueError: if an argument is described nowhere.
    """
    functions = {
        x.name: x
        for module in [pkg, *_modules(pkg)]
        for x in module.members.values()
        if isinstance(x, griffe.Function | griffe.Class) and x.docstring and x.is_public
    }

    def described(name: str, seen: set[str]) -> dict[str, str]:
        """Return the text of each argument, a function's own first, then that of functions it names."""
        if name in seen or name not in functions:
            return {}
        seen.add(name)
        before, *sections = _SECTION.split(functions[name].docstring.value)
        args = "".join(x for x in sections if x.startswith("Args:"))
        own = dict(re.findall(r"^    (\w+): (.*\n(?:     .*\n)*)", args + "\n", flags=re.MULTILINE))
        for other in re.findall(r"`(\w+)`", before):
            own = described(other, seen) | own
        return own

    for name, function in functions.items():
        text = function.docstring.value
        if not _LEFT_TO_OTHERS.search(_SECTION.split(text)[0]):
            continue
        known = described(name, set())
        wanted = [x.name for x in function.parameters if x.name != "self"]
        if missing := [x for x in wanted if x not in known]:
            raise ValueError(f"{function.path}: no docstring describes {', '.join(missing)}")
        text = re.sub(r"^Args:\n(?:    .*\n)*", "", text, flags=re.MULTILINE)
        listed = "Args:\n" + "".join(f"    {x}: {known[x]}" for x in wanted) + "\n"
        cut = len(_SECTION.split(text)[0])
        function.docstring.value = text[:cut].rstrip("\n") + "\n\n" + listed + text[cut:]


def _modules(module: griffe.Module) -> list[griffe.Module]:
    inside = [x for x in module.members.values() if isinstance(x, griffe.Module)]
    return inside + [deeper for x in inside for deeper in _modules(x)]


def _function(attribute: griffe.Attribute, rule: griffe.Class) -> griffe.Function:
    """Return the function that a link is, for a page: fields of its rule and of bases are its arguments."""
    parameters: dict[str, griffe.Parameter] = {}
    for cls in reversed([rule, *rule.mro()]):
        kind = griffe.ParameterKind.positional_or_keyword
        for field in (x for x in cls.members.values() if isinstance(x, griffe.Attribute)):
            if str(field.annotation) == "KW_ONLY":
                kind = griffe.ParameterKind.keyword_only
            elif field.annotation is not None and "instance-attribute" in field.labels:
                parameters[field.name] = griffe.Parameter(
                    field.name, annotation=field.annotation, kind=kind, default=_default(field.value)
                )
    ordered = sorted(parameters.values(), key=lambda x: x.kind is griffe.ParameterKind.keyword_only)
    function = griffe.Function(
        attribute.name, lineno=attribute.lineno, endlineno=attribute.endlineno,
        parameters=griffe.Parameters(*ordered),
    )  # fmt: skip
    _inherit(function, [rule, *rule.mro()])
    return function


def _again(attribute: griffe.Attribute, function: griffe.Function) -> griffe.Function:
    """Return a function of `halfstep` as a package has it: what it returns is of the package's kind."""
    assert isinstance(attribute.value, griffe.ExprCall)
    made = griffe.Function(
        attribute.name, lineno=attribute.lineno, endlineno=attribute.endlineno,
        parameters=function.parameters, returns=attribute.value.arguments[0],
    )  # fmt: skip
    _inherit(made, [function])
    return made


def _inherit(taker: griffe.Function | griffe.Class, bases: Sequence[griffe.Function | griffe.Class]) -> None:
    """Give the docstring that stands in `halfstep`, less the arguments that the other package has."""
    found = next((x.docstring for x in bases if x.path.startswith("halfstep.")), None)
    if found is None:
        return
    names = {x.name for x in taker.parameters}

    def of_taker(args: re.Match[str]) -> str:
        return re.sub(
            r"^    (\w+):.*\n(?:     .*\n)*", lambda x: x[0] if x[1] in names else "", args[0], flags=re.M
        )

    text = re.sub(r"^Args:\n(?:    .*\n)+", of_taker, found.value, flags=re.MULTILINE)
    taker.docstring = griffe.Docstring(text, parser=found.parser, parent=taker)


def _default(value: Any) -> Any:
    """Return the default of a field: `decay_rate(0.9, torch="betas[0]")` declares 0.9."""
    if not isinstance(value, griffe.ExprCall):
        return value
    return next((x for x in value.arguments if not isinstance(x, griffe.ExprKeyword)), None)

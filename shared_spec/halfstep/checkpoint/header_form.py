"""The form of a state file's header, so that a reader can name a wrong part. Contract: section T.

A digest shows that a file is undamaged, but not that halfstep wrote it.
"""

from pathlib import Path
from typing import Any, TypeAlias

Header: TypeAlias = dict[str, Any]
"""JSON from a file, with texts, numbers and lists by name, before and after `check_header`."""


def _is_count(x: object) -> bool:
    return type(x) is int and 0 <= x < 2**31


def _is_seed(x: object) -> bool:
    return isinstance(x, list) and len(x) == 2 and all(type(word) is int and 0 <= word < 2**32 for word in x)


_LINK = {
    "name": str,
    "count": (_is_count, None),
    "seed": (_is_seed, None),
    "numbers": {...: (float, int, None)},
    "options": {...: bool},
    "arrays": {...: {"format": {"dtype": str}}},
    "idle": bool,
}
_HEADER = {
    "writer": str,
    "spec_version": int,
    "layout_version": int,
    "leaves": {...: int},
    "recipes": [[_LINK]],
    "formats": {...: {"dtype": str}},
}
_ENTRY = {"dtype": str, "shape": [int], "data_offsets": [int]}


def check_entry(caller: str, path: Path, name: str, entry: Header) -> None:
    """Raise ValueError unless safetensors' entry of an array has a dtype, a shape and two offsets."""
    misfit = _misfit(entry, _ENTRY, f"the entry of {name!r}")
    if misfit is None and len(entry["data_offsets"]) != 2:
        misfit = f"the entry of {name!r}, data_offsets"
    _refuse(caller, path, misfit)


def check_header(caller: str, path: Path, header: Header) -> None:
    """Raise ValueError unless a header has all its parts in the right form."""
    _refuse(caller, path, misfit_of(header))


def misfit_of(header: Header) -> str | None:
    """Return the first place where a header has a wrong form, or None if there is none."""
    misfit = _misfit(header, _HEADER, "the header")
    if misfit is None:
        count = len(header["recipes"])
        strays = (leaf for leaf, number in header["leaves"].items() if not 0 <= number < count)
        misfit = next((f"the header, leaves, {leaf}" for leaf in strays), None)
    return misfit


def _refuse(caller: str, path: Path, misfit: str | None) -> None:
    if misfit is not None:
        raise ValueError(f"{caller}: {path} has not what save_state writes at: {misfit}. Load another copy.")


def _misfit(value: Any, form: Any, where: str) -> str | None:  # of JSON, whatever a file has
    """Return the first place where a value has another form, or None if there is none.

    A form can be:

    - a type, or None
    - a function that returns whether a value fits
    - a tuple with alternative forms
    - a list with the form for all items
    - a dict with forms by key, or a dict {...: form} for any keys. A dict may have more keys than its form.
    """
    if isinstance(form, tuple):
        return None if any(_misfit(value, kind, where) is None for kind in form) else where
    if isinstance(form, list):
        items = value if isinstance(value, list) else None
        pairs = None if items is None else ((str(i), x, form[0]) for i, x in enumerate(items))
    elif isinstance(form, dict):
        fits = isinstance(value, dict) and (... in form or form.keys() <= value.keys())
        keys = form if ... not in form else value
        pairs = ((str(k), value[k], form.get(k, form.get(...))) for k in keys) if fits else None
    else:
        # A bool is an integer in Python.
        if form is None:
            return None if value is None else where
        fits = type(value) is form if isinstance(form, type) else form(value)
        return None if fits else where
    if pairs is None:
        return where
    misfits = (_misfit(x, kind, f"{where}, {key}") for key, x, kind in pairs)
    return next((misfit for misfit in misfits if misfit is not None), None)

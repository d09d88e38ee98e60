"""The form of a vector file, as a JSON schema. Its dtypes are all that `vectors.py` can write."""

from typing import Any

from halfstep_spec.vectors import WIDTHS

_DIGITS = "[0-9a-f]{2}|[0-9a-f]{4}|[0-9a-f]{8}"


def _object(properties: dict[str, Any], **other: Any) -> dict[str, Any]:
    """Return the schema of an object that has these properties and no others."""
    return {
        "type": "object",
        "additionalProperties": False,
        "required": list(properties),
        "properties": properties,
        **other,
    }


def _array(words: str, **other: Any) -> dict[str, Any]:
    shape = {"type": "array", "items": {"type": "integer", "minimum": 0}}
    bits = {"type": "string", "pattern": f"^(({words})( |$))*$"}
    return _object({"dtype": {"enum": sorted(WIDTHS)}, "shape": shape, "bits": bits, **other})


def _named(schema: dict[str, Any], **other: Any) -> dict[str, Any]:
    return {"type": "object", "additionalProperties": schema, **other}


_TEXT = {"type": "string", "minLength": 5}
_ULPS = _object({"ulps": {"type": "integer", "minimum": 1}, "because": {"type": "string", "minLength": 10}})
_NORM = _object(
    {"norm": {"type": "number", "exclusiveMinimum": 0}, "because": {"type": "string", "minLength": 10}}
)
_CASE = _object(
    {
        "key": {"type": "string", "pattern": "^[a-z0-9_]+(-[a-z0-9_]*)*-[0-9a-f]{8}$"},
        "op": {"type": "string", "pattern": "^[a-z0-9_]+$"},
        "comment": _TEXT,
        "flags": {"type": "array", "items": {"type": "string"}, "uniqueItems": True},
        "clauses": {
            "type": "array",
            "items": {"type": "string", "pattern": "^[A-Z][0-9]+$"},
            "minItems": 1,
        },
        "arguments": {"type": "object"},
        "inputs": _named(_array(_DIGITS)),
        "outputs": _named(
            _array(f"nan|{_DIGITS}", compare={"oneOf": [{"const": "bits"}, _ULPS, _NORM]}), minProperties=1
        ),
    }
)
SCHEMA: dict[str, Any] = _object(
    {
        "schema": {"const": "schema.json"},
        "spec_version": {"type": "integer", "minimum": 1},
        "name": {"type": "string", "pattern": "^[a-z0-9_]+$"},
        "notes": {"type": "object", "additionalProperties": _TEXT},
        "cases": {"type": "array", "minItems": 1, "items": _CASE},
    }
) | {
    "$schema": "https://json-schema.org/draft/2020-12/schema",
    "title": "halfstep golden vectors",
}
"""The content of `vectors/schema.json`."""

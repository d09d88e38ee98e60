"""Golden vectors on disk: arrays as hexadecimal patterns, cases, files, and the manifest that guards them.

Nothing here computes a value that a backend must give: `cases/` does, through the spec.
"""

import dataclasses
import functools
import hashlib
import json
import pathlib
import re
from collections.abc import Iterable
from typing import Any

import numpy as np

from halfstep_spec.numbers.float_formats import FLOAT_FORMATS

FOLDER = pathlib.Path(__file__).resolve().parents[1] / "vectors"

WIDTHS = {"uint32": 32, "int32": 32, "uint16": 16, "uint8": 8, "int8": 8}
WIDTHS |= {name: fmt.bits for name, fmt in FLOAT_FORMATS.items()}
"""Bits of an element, by the label of its dtype."""


def is_nan(bits: np.ndarray, dtype: str) -> np.ndarray:
    """Tell which patterns of `dtype` are NaN; none where `dtype` is an integer type."""
    if dtype not in FLOAT_FORMATS:
        return np.zeros(bits.shape, bool)
    fmt = FLOAT_FORMATS[dtype]
    past = fmt.max_code if fmt.overflow_code == fmt.nan_code else fmt.overflow_code
    return (bits & ((1 << (fmt.bits - 1)) - 1)) > past


@dataclasses.dataclass(frozen=True)
class Array:
    """An array as unsigned patterns, with the dtype as a label.

    Attributes:
        dtype: an integer dtype or the name of a float format.
        bits: unsigned patterns, in the array's shape.
        compare: for outputs: "bits", {"ulps": k, "because": why}, or {"norm": x, "because": why}, the norm of
            the difference over that of the array. None for inputs.
    """

    dtype: str
    bits: np.ndarray
    compare: Any = None

    @classmethod
    def of(cls, values, dtype: str | None = None, compare: Any = None) -> "Array":
        """Wrap float32, uint32 or int32 values, or the unsigned patterns of `dtype`."""
        values = np.asarray(values)
        dtype = dtype or str(values.dtype)
        return cls(dtype, values.view(np.dtype(f"uint{WIDTHS[dtype]}")), compare)

    def to_json(self) -> dict[str, Any]:
        """Return the array as JSON data; in outputs NaN is the word `nan`."""
        digits = WIDTHS[self.dtype] // 4
        nan = is_nan(self.bits, self.dtype) & (self.compare is not None)
        words = [
            "nan" if n else f"{int(b):0{digits}x}"
            for b, n in zip(self.bits.ravel(), nan.ravel(), strict=True)
        ]
        data = {"dtype": self.dtype, "shape": list(self.bits.shape), "bits": " ".join(words)}
        return data if self.compare is None else data | {"compare": self.compare}

    @classmethod
    def from_json(cls, data: dict[str, Any]) -> "Array":
        """Read the output of `to_json`; the word `nan` becomes the quiet NaN of the dtype."""
        dtype, width = data["dtype"], WIDTHS[data["dtype"]]
        quiet = FLOAT_FORMATS[dtype].nan_code if dtype in FLOAT_FORMATS else 0
        words = [quiet if word == "nan" else int(word, 16) for word in data["bits"].split()]
        bits = np.array(words, np.dtype(f"uint{width}")).reshape(data["shape"])
        return cls(dtype, bits, data.get("compare"))


@dataclasses.dataclass(frozen=True)
class Case:
    """One question and its answer.

    Attributes:
        op: the function asked.
        comment: why this case is here.
        arguments: plain values (names, dtypes, shapes).
        inputs: arrays, hyperparameters among them.
        outputs: arrays, each with its comparison.
        flags: words that the file's notes explain.
        clauses: of the contract, that the case asks about.
    """

    op: str
    comment: str
    arguments: dict[str, Any]
    inputs: dict[str, Array]
    outputs: dict[str, Array]
    flags: tuple[str, ...] = ()
    clauses: tuple[str, ...] = ()

    @functools.cached_property
    def digest(self) -> str:
        """Eight hexadecimal digits of a hash of the question: op, arguments and inputs."""
        inputs = {name: array.to_json() for name, array in self.inputs.items()}
        question = canonical({"op": self.op, "arguments": self.arguments, "inputs": inputs})
        return hashlib.sha256(question.encode()).hexdigest()[:8]

    @property
    def key(self) -> str:
        """The name of the case: its op, the words of its arguments, and its digest."""
        named = {name: value for name, value in self.arguments.items() if name != "leaf"}
        return "-".join([self.op, *(_slug(named[name], name) for name in sorted(named)), self.digest])

    def to_json(self) -> dict[str, Any]:
        """Return the case as JSON data."""
        data = {field.name: getattr(self, field.name) for field in dataclasses.fields(self)} | {
            "inputs": {name: array.to_json() for name, array in self.inputs.items()},
            "outputs": {name: array.to_json() for name, array in self.outputs.items()},
        }
        return data | {"flags": list(self.flags), "clauses": list(self.clauses), "key": self.key}

    @classmethod
    def from_json(cls, data: dict[str, Any]) -> "Case":
        """Read the output of `to_json`."""
        values: dict[str, Any] = {key: tuple(data[key]) for key in ("flags", "clauses")}
        for part in ("inputs", "outputs"):
            values[part] = {name: Array.from_json(array) for name, array in data[part].items()}
        case = cls(**{name: value for name, value in (data | values).items() if name != "key"})
        if case.key != data["key"]:
            raise ValueError(
                f"from_json: the case named {data['key']} asks what {case.key} would. Regenerate the vectors."
            )
        return case


def _slug(value: Any, name: str) -> str:
    """Return an argument as a word of lower-case letters, digits and underscores."""
    if isinstance(value, dict):
        return "_".join(_slug(value[part], part) for part in sorted(value) if value[part])
    if isinstance(value, list):
        return "x".join(_slug(part, name) for part in value)
    if isinstance(value, bool):
        return name if value else f"no_{name}"
    return re.sub("[^a-z0-9_]", "", str(value).lower())


def file_text(name: str, notes: dict[str, str], cases: Iterable[Case], spec_version: int) -> str:
    """Return the canonical text of a vector file: cases in the order of their keys."""
    by_key: dict[str, Case] = {}
    for case in cases:
        if case.key in by_key:
            raise ValueError(f"file_text: {name} asks {case.key} twice. Drop one, or change its inputs.")
        by_key[case.key] = case
    flags = {flag for case in by_key.values() for flag in case.flags}
    if flags - notes.keys():
        raise ValueError(
            f"file_text: {name} has flags without a note: {sorted(flags - notes.keys())}. "
            "Explain each in its notes."
        )
    data = {
        "schema": "schema.json",
        "spec_version": spec_version,
        "name": name,
        "notes": {flag: note for flag, note in notes.items() if flag in flags},
        "cases": [by_key[key].to_json() for key in sorted(by_key)],
    }
    return canonical(data)


def canonical(data: Any) -> str:
    """Return JSON text that is the same on every machine."""
    return json.dumps(data, indent=1, sort_keys=True, ensure_ascii=True) + "\n"


def manifest_text(texts: dict[str, str], spec_version: int) -> str:
    """Return the text of the manifest: each file's hash, and how many cases and output arrays it holds."""
    files = {}
    for name, text in texts.items():
        cases = json.loads(text)["cases"]
        files[f"{name}.json"] = {
            "sha256": hashlib.sha256(text.encode()).hexdigest(),
            "cases": len(cases),
            "outputs": sum(len(case["outputs"]) for case in cases),
        }
    return canonical({"spec_version": spec_version, "files": files})


def load(spec_version: int, folder: pathlib.Path = FOLDER) -> dict[str, list[Case]]:
    """Read every vector file that the manifest names: the cases by the file's name without ".json"."""
    manifest = json.loads((folder / "manifest.json").read_text())
    if manifest["spec_version"] != spec_version:
        raise ValueError(
            f"load: manifest.json has spec_version={manifest['spec_version']}, this reader knows "
            f"{spec_version}. Regenerate the vectors, or use the reader that came with them."
        )
    found = {path.name for path in folder.glob("*.json")} - {"manifest.json", "schema.json"}
    if found != manifest["files"].keys():
        raise ValueError(
            f"load: files {sorted(found)} do not match the manifest's {sorted(manifest['files'])}."
        )
    return {name.removesuffix(".json"): _load_file(folder / name, e) for name, e in manifest["files"].items()}


def _load_file(path: pathlib.Path, entry: dict[str, Any]) -> list[Case]:
    text = path.read_text()
    digest = hashlib.sha256(text.encode()).hexdigest()
    if digest != entry["sha256"]:
        raise ValueError(
            f"load: {path.name} has sha256 {digest}, its manifest says {entry['sha256']}. "
            "Regenerate the file, never edit it."
        )
    cases = [Case.from_json(case) for case in json.loads(text)["cases"]]
    if len(cases) != entry["cases"]:
        raise ValueError(f"load: {path.name} holds {len(cases)} cases, its manifest says {entry['cases']}.")
    return cases

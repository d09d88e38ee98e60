"""Golden vectors on disk: arrays as hexadecimal patterns, cases, files, and the manifest that guards them.

Nothing here computes a value that a backend must give: `cases/` does, through the spec.
"""

import dataclasses
import hashlib
import json
import pathlib
from typing import Any

import numpy as np

from halfstep_spec.numbers.float_formats import FLOAT_FORMATS

FOLDER = pathlib.Path(__file__).resolve().parents[1] / "vectors"

_WIDTHS = {"float32": 32, "uint32": 32, "int32": 32, "uint16": 16, "uint8": 8, "int8": 8} | {
    name: f.bits for name, f in FLOAT_FORMATS.items()
}


def is_nan(bits: np.ndarray, dtype: str) -> np.ndarray:
    """Tell which patterns of `dtype` are NaN; none where `dtype` is an integer type."""
    if dtype == "float32":
        return (bits & 0x7FFFFFFF) > 0x7F800000
    if dtype not in FLOAT_FORMATS:
        return np.zeros(bits.shape, bool)
    fmt = FLOAT_FORMATS[dtype]
    past = fmt.max_code if fmt.overflow_code == fmt.nan_code else fmt.overflow_code
    return (bits & ((1 << (fmt.bits - 1)) - 1)) > past


@dataclasses.dataclass(frozen=True)
class Array:
    """An array as unsigned patterns, with the dtype as a label.

    Attributes:
        dtype: "float32", an integer dtype or the name of a float format.
        bits: unsigned patterns, in the array's shape.
        compare: for outputs: "bits", or {"ulps": k, "because": why}. None for inputs.
    """

    dtype: str
    bits: np.ndarray
    compare: Any = None

    @classmethod
    def of(cls, values, dtype: str | None = None, compare: Any = None) -> "Array":
        """Wrap float32, uint32 or int32 values, or the unsigned patterns of `dtype`."""
        values = np.asarray(values)
        dtype = dtype or str(values.dtype)
        return cls(dtype, values.view(np.dtype(f"uint{_WIDTHS[dtype]}")), compare)

    def to_json(self) -> dict[str, Any]:
        """Return the array as JSON data; in outputs NaN is the word `nan`."""
        digits = _WIDTHS[self.dtype] // 4
        nan = is_nan(self.bits, self.dtype) & (self.compare is not None)
        words = [
            "nan" if n else f"{int(b):0{digits}x}"
            for b, n in zip(self.bits.ravel(), nan.ravel(), strict=True)
        ]
        data = {"dtype": self.dtype, "shape": list(self.bits.shape), "bits": " ".join(words)}
        return data if self.compare is None else data | {"compare": self.compare}

    @classmethod
    def from_json(cls, data: dict[str, Any]) -> "Array":
        """Read what `to_json` wrote; the word `nan` becomes the quiet NaN of the dtype."""
        dtype, width = data["dtype"], _WIDTHS[data["dtype"]]
        quiet = (
            0x7FC00000
            if dtype == "float32"
            else FLOAT_FORMATS[dtype].nan_code
            if dtype in FLOAT_FORMATS
            else 0
        )
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
        clauses: of the contract, that the case tempts a compiler to break.
        id: assigned when the file is written; never reused.
    """

    op: str
    comment: str
    arguments: dict[str, Any]
    inputs: dict[str, Array]
    outputs: dict[str, Array]
    flags: tuple[str, ...] = ()
    clauses: tuple[str, ...] = ()
    id: int = 0

    def to_json(self) -> dict[str, Any]:
        """Return the case as JSON data."""
        data = dataclasses.asdict(self) | {
            "inputs": {name: array.to_json() for name, array in self.inputs.items()},
            "outputs": {name: array.to_json() for name, array in self.outputs.items()},
        }
        return data | {"flags": list(self.flags), "clauses": list(self.clauses)}

    @classmethod
    def from_json(cls, data: dict[str, Any]) -> "Case":
        """Read what `to_json` wrote."""
        values: dict[str, Any] = {key: tuple(data[key]) for key in ("flags", "clauses")}
        for part in ("inputs", "outputs"):
            values[part] = {name: Array.from_json(array) for name, array in data[part].items()}
        return cls(**(data | values))


def file_text(name: str, notes: dict[str, str], cases: list[Case], spec_version: int) -> str:
    """Return the canonical text of a vector file: ids by position, keys sorted, one space of indent."""
    unexplained = {flag for case in cases for flag in case.flags} - notes.keys()
    if unexplained:
        raise ValueError(
            f"file_text: {name} has flags without a note: {sorted(unexplained)}. Explain each in its notes."
        )
    notes = {flag: note for flag, note in notes.items() if any(flag in case.flags for case in cases)}
    numbered = [dataclasses.replace(case, id=i).to_json() for i, case in enumerate(cases, start=1)]
    data = {
        "schema": "schema.json",
        "spec_version": spec_version,
        "name": name,
        "notes": notes,
        "cases": numbered,
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
    """Read every vector file that the manifest names.

    Args:
        spec_version: the version that the reader knows.
        folder: of the vectors.

    Returns:
        The cases of each file, by the file's name without ".json".

    Raises:
        ValueError: if the version, a hash or a count is not what the manifest says.
    """
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

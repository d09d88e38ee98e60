"""A state file: weights and optimizer state of one run, as safetensors with a header of ours.

Contract: section T. Any reader of safetensors opens one. It holds:

    8 bytes      length of the header, little-endian
    header       JSON: {"__metadata__": {"sha256": ..., "halfstep": ...}, name: {dtype, shape, data_offsets}}
    data         the arrays, row-major, little-endian, without gaps

`sha256` stands first, so that its 64 digits are at a fixed place; it is the SHA-256 of the whole file with
zeros in place of these digits.
"""

import hashlib
import json
import math
import pathlib
from collections.abc import Mapping
from typing import Any, NamedTuple

import numpy as np

LAYOUT_VERSION = 1
"""Of the layout; a reader refuses a later layout."""

DTYPES = {
    "BF16": "uint16",
    "BOOL": "uint8",
    "F16": "uint16",
    "F32": "uint32",
    "F64": "uint64",
    "I16": "uint16",
    "I32": "uint32",
    "I64": "uint64",
    "I8": "uint8",
    "U16": "uint16",
    "U32": "uint32",
    "U64": "uint64",
    "U8": "uint8",
}
"""The names of dtypes in safetensors, and the dtype of their patterns. Codes of 8 and 4 bits are U8."""

_START = b'{"__metadata__":{"sha256":"'
_DIGITS = 64


class FileArray(NamedTuple):
    """One array of a file.

    Attributes:
        dtype: as safetensors calls it, one of `DTYPES`.
        bits: patterns, in the array's shape.
    """

    dtype: str
    bits: np.ndarray


def write_state_file(path: str | pathlib.Path, header: Mapping[str, Any], arrays: Mapping[str, FileArray]):
    """Write a state file."""
    content = file_bytes(header, arrays)
    pathlib.Path(path).write_bytes(content)


def file_bytes(header: Mapping[str, Any], arrays: Mapping[str, FileArray]) -> bytes:
    """Return the bytes of a state file."""
    entries, data, end = {}, [], 0
    # Wide numbers first, so that every array is aligned.
    for name in sorted(arrays, key=lambda name: (-arrays[name].bits.dtype.itemsize, name)):
        dtype, bits = arrays[name]
        data.append(np.ascontiguousarray(bits).astype(bits.dtype.newbyteorder("<")).tobytes())
        start, end = end, end + len(data[-1])
        entries[name] = {"dtype": dtype, "shape": list(bits.shape), "data_offsets": [start, end]}
    own = {"sha256": "0" * _DIGITS, "halfstep": _json({**header, "layout_version": LAYOUT_VERSION})}
    text = _json({"__metadata__": own} | entries, sort=False).encode()
    text += b" " * (-len(text) % 8)
    content = bytearray(len(text).to_bytes(8, "little") + text + b"".join(data))
    place = 8 + len(_START)
    content[place : place + _DIGITS] = hashlib.sha256(content).hexdigest().encode()
    return bytes(content)


def read_state_file(path: str | pathlib.Path) -> tuple[dict[str, Any], dict[str, FileArray]]:
    """Return the header and the arrays of a state file."""
    content = pathlib.Path(path).read_bytes()
    place = 8 + len(_START)
    if content[8:place] != _START:
        raise ValueError(
            f"read_state_file: {path} is no state file of halfstep, or its start is damaged. "
            "Pass a file that save_state wrote."
        )
    found, blank = content[place : place + _DIGITS], b"0" * _DIGITS
    due = hashlib.sha256(content[:place] + blank + content[place + _DIGITS :]).hexdigest()
    if found.decode("latin1") != due:
        raise ValueError(
            f"read_state_file: {path} is damaged: its sha256 is {due[:12]}..., its header says "
            f"{found[:12].decode('latin1')}.... Load another copy."
        )
    length = int.from_bytes(content[:8], "little")
    entries = json.loads(content[8 : 8 + length])
    header = json.loads(entries.pop("__metadata__")["halfstep"])
    if header["layout_version"] > LAYOUT_VERSION:
        raise ValueError(
            f"read_state_file: {path} has layout_version={header['layout_version']}, this reader knows "
            f"{LAYOUT_VERSION}. Read it with the halfstep that wrote it."
        )
    data = memoryview(content)[8 + length :]
    return header, {name: _array(entry, data) for name, entry in entries.items()}


def _array(entry: dict[str, Any], data: memoryview) -> FileArray:
    dtype = np.dtype(DTYPES[entry["dtype"]]).newbyteorder("<")
    start, end = entry["data_offsets"]
    count = math.prod(entry["shape"])
    if end - start != count * dtype.itemsize:
        raise ValueError(f"read_state_file: {end - start} bytes for {count} numbers of {entry['dtype']}.")
    return FileArray(entry["dtype"], np.frombuffer(data[start:end], dtype).reshape(entry["shape"]))


def _json(data: Any, sort: bool = True) -> str:
    return json.dumps(data, sort_keys=sort, separators=(",", ":"), ensure_ascii=True)

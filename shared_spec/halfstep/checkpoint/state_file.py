"""A state file: safetensors with a header and a digest of every byte. Contract: section T.

Arrays are bytes with a dtype and a shape, so that nothing here knows of a framework.
"""

import contextlib
import glob
import hashlib
import json
import math
import os
import pathlib
import secrets
import stat
import time
from collections.abc import Iterator, Mapping, Sequence
from typing import BinaryIO, NamedTuple

import numpy as np

from halfstep.checkpoint.header_form import Header, check_entry, check_header

LAYOUT_VERSION = 1
"""Of the layout; a reader refuses a later layout."""

DTYPES = {
    "float32": "F32",
    "bfloat16": "BF16",
    "float16": "F16",
    "float64": "F64",
    "uint8": "U8",
    "uint16": "U16",
    "uint32": "U32",
    "uint64": "U64",
    "int8": "I8",
    "int16": "I16",
    "int32": "I32",
    "int64": "I64",
    "bool": "BOOL",
}
"""What safetensors calls the dtypes that a file may hold. Codes of 8 and 4 bits are uint8."""

SIZES = {"F64": 8, "U64": 8, "I64": 8, "F32": 4, "U32": 4, "I32": 4, "BF16": 2, "F16": 2, "U16": 2, "I16": 2}
"""Bytes of an element; one of those that are not listed."""

_START = b'{"__metadata__":{"sha256":"'
_ZEROS = b"0" * 64
_PLACE = 8 + len(_START)
_CHUNK = 1 << 24
_STALE = 3600.0
"""After how many seconds without a write nobody writes a file any more."""


class FileArray(NamedTuple):
    """One array of a file.

    Attributes:
        dtype: as safetensors calls it.
        shape: of the array.
        data: its bytes, row-major and little-endian, as a flat uint8 array.
    """

    dtype: str
    shape: tuple[int, ...]
    data: np.ndarray


def file_array(caller: str, name: str, dtype: str, shape: Sequence[int], data: np.ndarray) -> FileArray:
    """Return an array as a file holds it."""
    if dtype not in DTYPES:
        raise TypeError(f"{caller}: {name!r} is {dtype}, which a file does not hold. Cast it.")
    return FileArray(DTYPES[dtype], tuple(shape), data)


def bytes_of(caller: str, name: str, array: FileArray, dtype: str, shape: Sequence[int]) -> np.ndarray:
    """Return the bytes of an array of a file, in memory of their own, if it is of such a dtype and shape.

    `dtype` is as NumPy or ml_dtypes calls it; a code of a byte is a uint8.
    """
    due = DTYPES.get(dtype)
    if (array.dtype, array.shape) != (due, tuple(shape)):
        raise ValueError(
            f"{caller}: {name!r} is {array.dtype}{list(array.shape)} in the file, {due}{list(shape)} here. "
            "Build the model and the optimizer of the run that was saved."
        )
    return np.array(array.data)


def write_state_file(path: str | os.PathLike[str], header: Header, arrays: Mapping[str, FileArray]) -> None:
    """Write a state file: under another name first, so that a file that was there stays whole until then.

    `layout_version` is added to the header, which becomes JSON.
    """
    # Wide numbers first, so that every array is aligned.
    names = sorted(arrays, key=lambda name: (-SIZES.get(arrays[name].dtype, 1), name))
    text = _header_text(header, {name: arrays[name] for name in names})
    digest = hashlib.sha256()
    with _replacing(pathlib.Path(path)) as file:
        for piece in (len(text).to_bytes(8, "little"), text, *(arrays[name].data.data for name in names)):
            digest.update(piece)
            file.write(piece)
        file.seek(_PLACE)
        file.write(digest.hexdigest().encode())


def read_state_file(caller: str, path: str | os.PathLike[str]) -> tuple[Header, dict[str, FileArray]]:
    """Return the header and the arrays of a state file, which stay in the file until they are read."""
    path = pathlib.Path(path)
    with path.open("rb") as file:
        start = file.read(_PLACE + len(_ZEROS))
        # Mapped by the same descriptor: a writer may replace the file meanwhile.
        content = np.memmap(file, np.uint8, "r") if start[8:_PLACE] == _START else np.empty(0, np.uint8)
    if start[8:_PLACE] != _START:
        raise ValueError(
            f"{caller}: {path} is no state file of halfstep, or its start is damaged. "
            "Pass a file that save_state wrote."
        )
    _check_digest(caller, path, start[_PLACE:], content)
    length = int.from_bytes(start[:8], "little")
    entries, header = _parsed(caller, path, bytes(content[8 : 8 + length]))
    if header["layout_version"] > LAYOUT_VERSION:
        raise ValueError(
            f"{caller}: {path} has layout_version={header['layout_version']}, this halfstep knows "
            f"{LAYOUT_VERSION}. Load it with the halfstep that wrote it."
        )
    check_header(caller, path, header)
    data = content[8 + length :]
    return header, {name: _array(caller, path, name, entry, data) for name, entry in entries.items()}


def _parsed(caller: str, path: pathlib.Path, text: bytes) -> tuple[dict[str, Header], Header]:
    """Return the entries of the arrays, and the header, of which only the version is checked."""
    try:
        entries = json.loads(text)
        header = json.loads(entries.pop("__metadata__")["halfstep"])
        if type(header["layout_version"]) is int:
            return entries, header
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
        raise ValueError(
            f"{caller}: {path} has a header that is not JSON of halfstep. Load another copy."
        ) from error
    raise ValueError(f"{caller}: {path} has a layout_version that is no integer. Load another copy.")


def _check_digest(caller: str, path: pathlib.Path, saved_digest: bytes, content: np.ndarray) -> None:
    digest = hashlib.sha256(bytes(content[:_PLACE]) + _ZEROS)
    for at in range(_PLACE + len(_ZEROS), content.size, _CHUNK):
        digest.update(content[at : at + _CHUNK].data)
    if digest.hexdigest().encode() != saved_digest:
        raise ValueError(
            f"{caller}: {path} is damaged: its SHA-256 is {digest.hexdigest()[:12]}..., its header says "
            f"{saved_digest[:12].decode('latin1')!r}.... Load another copy."
        )


def _array(caller: str, path: pathlib.Path, name: str, entry: Header, data: np.ndarray) -> FileArray:
    check_entry(caller, path, name, entry)
    start, end = entry["data_offsets"]
    due = math.prod(entry["shape"]) * SIZES.get(entry["dtype"], 1)
    if end - start != due or not 0 <= start <= end <= data.size:
        raise ValueError(
            f"{caller}: {path} has {end - start} bytes of {name!r}, due are {due}. Load another copy."
        )
    return FileArray(entry["dtype"], tuple(entry["shape"]), data[start:end])


def _header_text(header: Header, arrays: Mapping[str, FileArray]) -> bytes:
    header_text = _json({**header, "layout_version": LAYOUT_VERSION}, sort_keys=True)
    entries: dict[str, Header] = {"__metadata__": {"sha256": _ZEROS.decode(), "halfstep": header_text}}
    end = 0
    for name, array in arrays.items():
        start, end = end, end + array.data.size
        entries[name] = {"dtype": array.dtype, "shape": list(array.shape), "data_offsets": [start, end]}
    text = _json(entries, sort_keys=False).encode()
    return text + b" " * (-len(text) % 8)


def _json(data: Header, sort_keys: bool) -> str:
    return json.dumps(data, sort_keys=sort_keys, separators=(",", ":"), ensure_ascii=True)


@contextlib.contextmanager
def _replacing(path: pathlib.Path) -> Iterator[BinaryIO]:
    """Open a file that takes the place of `path`, and its mode, once all of it is on the disk.

    Others may write to `path`, too: the name of the part is random, and no link is followed.
    """
    part = path.with_name(f".{path.name}.{secrets.token_hex(8)}.part")
    file = part.open("xb")
    try:
        with file:
            yield file
            if path.exists():
                part.chmod(stat.S_IMODE(path.stat().st_mode))
            file.flush()
            os.fsync(file.fileno())
        part.replace(path)
    finally:
        part.unlink(missing_ok=True)
    _flush_folder(path.parent)
    _remove_stale_parts(path)


def _flush_folder(folder: pathlib.Path) -> None:
    """Write the names in a folder to the disk; elsewhere than on POSIX a folder cannot be opened."""
    if os.name == "posix":
        descriptor = os.open(folder, os.O_RDONLY)
        try:
            os.fsync(descriptor)
        finally:
            os.close(descriptor)


def _remove_stale_parts(path: pathlib.Path) -> None:
    """Remove what writers that were killed have left beside a file."""
    for part in path.parent.glob(f".{glob.escape(path.name)}.*.part"):
        with contextlib.suppress(FileNotFoundError):  # another process removes it, too
            if time.time() - part.stat().st_mtime > _STALE:
                part.unlink()

"""A state file, which is a safetensors file with a header and a digest over every byte. Contract: section T.

Arrays are bytes with a dtype and a shape, so that this module needs no framework.
"""

import contextlib
import glob
import hashlib
import io
import itertools
import json
import math
import os
import pathlib
import secrets
import stat
from collections.abc import Iterator, Mapping, Sequence
from typing import BinaryIO, NamedTuple

import numpy as np

from halfstep.checkpoint.header_form import Header, check_entry, check_header, misfit_of

LAYOUT_VERSION = 1
"""Version of the layout. A reader raises an error for a later layout."""

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
"""Dtypes allowed in a file, with their safetensors names. Codes with 8 and 4 bits are uint8."""

SIZES = {"F64": 8, "U64": 8, "I64": 8, "F32": 4, "U32": 4, "I32": 4, "BF16": 2, "F16": 2, "U16": 2, "I16": 2}
"""Bytes per element. Dtypes that are not listed have 1 byte."""

_START = b'{"__metadata__":{"sha256":"'
_ZEROS = b"0" * 64
_PLACE = 8 + len(_START)
_CHUNK = 1 << 24
_LONGEST_HEADER = 100_000_000
"""Largest header in bytes, as in safetensors."""
_STALE = 3600.0
"""Seconds without a write after which a partial file counts as abandoned."""


class FileArray(NamedTuple):
    """One array of a file.

    Attributes:
        dtype: safetensors name of its dtype.
        shape: its shape.
        data: its bytes, row-major and little-endian, as a flat uint8 array.
    """

    dtype: str
    shape: tuple[int, ...]
    data: np.ndarray


def file_array(caller: str, name: str, dtype: str, shape: Sequence[int], data: np.ndarray) -> FileArray:
    """Return an array in the form for a file."""
    if dtype not in DTYPES:
        raise TypeError(f"{caller}: {name!r} is {dtype}, which a file does not hold. Cast it.")
    return FileArray(DTYPES[dtype], tuple(shape), data)


def bytes_of(caller: str, name: str, array: FileArray, dtype: str, shape: Sequence[int]) -> np.ndarray:
    """Return the bytes of an array in a file, and raise ValueError if its dtype or shape differs.

    `dtype` is a name in NumPy or ml_dtypes. 8-bit codes are uint8.
    """
    due = DTYPES.get(dtype)
    if (array.dtype, array.shape) != (due, tuple(shape)):
        raise ValueError(
            f"{caller}: {name!r} is {array.dtype}{list(array.shape)} in the file, {due}{list(shape)} here. "
            "Build the model and the optimizer of the run that was saved."
        )
    return array.data


def write_state_file(path: str | os.PathLike[str], header: Header, arrays: Mapping[str, FileArray]) -> None:
    """Write a state file under another name and rename it, so that an earlier file stays whole until then.

    `layout_version` is added to the header, which becomes JSON. An invalid header raises an error, and no
    file is written.
    """
    header = {**header, "layout_version": LAYOUT_VERSION}
    # Wide numbers first, so that every array is aligned.
    names = sorted(arrays, key=lambda name: (-SIZES.get(arrays[name].dtype, 1), name))
    text = _header_text(header, {name: arrays[name] for name in names})
    _check_taken(header, len(text))
    digest = hashlib.sha256()
    with _replacing(pathlib.Path(path)) as file:
        pieces = ([len(text).to_bytes(8, "little"), text], *(_chunks(arrays[name].data) for name in names))
        for piece in itertools.chain.from_iterable(pieces):
            digest.update(piece)
            file.write(piece)
        file.seek(_PLACE)
        file.write(digest.hexdigest().encode())


def _check_taken(header: Header, size: int) -> None:
    """Raise ValueError if a header, or its size, is invalid for readers."""
    if misfit := misfit_of(header):
        raise ValueError(
            f"save_state: a reader would refuse {misfit}. A count is an integer from 0 to 2^31 - 1. "
            "Correct the optimizer's state."
        )
    if size > _LONGEST_HEADER:
        raise ValueError(
            f"save_state: names and recipes of {len(header['leaves'])} weights take {size} bytes, and a file "
            f"holds {_LONGEST_HEADER}. Shorten the names, or stack weights of one shape."
        )


def _chunks(data: np.ndarray) -> Iterator[bytes]:
    """Yield copies of an array's bytes, because a thread may change it between its digest and its write."""
    for at in range(0, data.size, _CHUNK):
        yield data[at : at + _CHUNK].tobytes()


def read_state_file(
    caller: str, path: str | os.PathLike[str], numbers: bool = True
) -> tuple[Header, dict[str, FileArray]]:
    """Return the header and the arrays in a state file, in new memory.

    Every byte is read once, so that the digest matches the arrays even if the file changes meanwhile. Without
    `numbers`, arrays have a size but no memory.
    """
    path = pathlib.Path(path)
    with path.open("rb") as file:
        head = _read_head(caller, path, file)
        digest = hashlib.sha256(head[:_PLACE] + _ZEROS + head[_PLACE + len(_ZEROS) :])
        header, arrays, refusal = {}, {}, None
        try:
            header, arrays = _parsed(caller, path, head, os.fstat(file.fileno()).st_size)
        except ValueError as error:  # raised below, if the digest is right
            refusal = error
        if numbers:
            arrays = {name: x._replace(data=_read(file, x.data.size, digest)) for name, x in arrays.items()}
        while chunk := file.read(_CHUNK):
            digest.update(chunk)
    _check_digest(caller, path, head[_PLACE : _PLACE + len(_ZEROS)], digest.hexdigest())
    if refusal is not None:
        raise refusal
    return header, arrays


def _read_head(caller: str, path: pathlib.Path, file: io.BufferedReader) -> bytes:
    """Return a file's length field and header, at least up to the digest."""
    head = file.read(_PLACE + len(_ZEROS))
    if head[8:_PLACE] != _START:
        raise ValueError(
            f"{caller}: {path} is no state file of halfstep, or its start is damaged. "
            "Pass a file that save_state wrote."
        )
    length = int.from_bytes(head[:8], "little")
    if length > _LONGEST_HEADER:
        raise ValueError(
            f"{caller}: {path} is damaged: its header has {length} bytes, the longest {_LONGEST_HEADER}. "
            "Load another copy."
        )
    return head + file.read(max(8 + length - len(head), 0))


def _read(file: io.BufferedReader, size: int, digest: "hashlib._Hash") -> np.ndarray:
    """Read a file's next bytes into new memory, and add them to a digest."""
    data = np.empty(size, np.uint8)
    for at in range(0, size, _CHUNK):
        chunk = data[at : at + _CHUNK].data
        digest.update(chunk[: file.readinto(chunk)])
    return data


def _check_digest(caller: str, path: pathlib.Path, saved: bytes, digest: str) -> None:
    if digest.encode() != saved:
        raise ValueError(
            f"{caller}: {path} is damaged: its SHA-256 is {digest[:12]}..., its header says "
            f"{saved[:12].decode('latin1')!r}.... Load another copy."
        )


def _parsed(caller: str, path: pathlib.Path, head: bytes, size: int) -> tuple[Header, dict[str, FileArray]]:
    """Return the header and the arrays without memory, in the order of a file with `size` bytes."""
    length = int.from_bytes(head[:8], "little")
    entries, header = _entries(caller, path, head[8 : 8 + length])
    if header["layout_version"] != LAYOUT_VERSION:  # the first
        raise ValueError(
            f"{caller}: {path} has layout_version={header['layout_version']}, this halfstep knows "
            f"{LAYOUT_VERSION}. Load it with the halfstep that wrote it."
        )
    check_header(caller, path, header)
    for name, entry in entries.items():
        check_entry(caller, path, name, entry)
    arrays, at = {}, 0
    for name, entry in sorted(entries.items(), key=lambda item: item[1]["data_offsets"]):
        (start, end), due = entry["data_offsets"], math.prod(entry["shape"]) * SIZES.get(entry["dtype"], 1)
        if not start == at <= end == at + due <= size - len(head):
            raise ValueError(
                f"{caller}: {path} has {name!r} at bytes {start} to {end}; it has {due} bytes, and "
                f"{at} is where the array before it ends. Load another copy."
            )
        arrays[name] = FileArray(entry["dtype"], tuple(entry["shape"]), np.broadcast_to(np.uint8(0), due))
        at = end
    if at != size - len(head):
        raise ValueError(
            f"{caller}: {path} has {size - len(head)} bytes of arrays, and they end at {at}. "
            "Load another copy."
        )
    return header, arrays


def _entries(caller: str, path: pathlib.Path, text: bytes) -> tuple[dict[str, Header], Header]:
    """Return the entries for arrays, and the header. Only its version is checked."""
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


def _header_text(header: Header, arrays: Mapping[str, FileArray]) -> bytes:
    own = {"sha256": _ZEROS.decode(), "halfstep": _json(header, sort_keys=True)}
    entries: dict[str, Header] = {"__metadata__": own}
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
    """Open a partial file, which replaces `path`, with its mode, once it is complete on the disk.

    Its name is random, because other processes may write to `path` too, and no link is followed.
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
            written = os.fstat(file.fileno()).st_mtime
        part.replace(path)
    finally:
        part.unlink(missing_ok=True)
    _flush_folder(path.parent)
    _remove_stale_parts(path, written)


def _flush_folder(folder: pathlib.Path) -> None:
    """Write the names in a folder to the disk, on POSIX. Other systems cannot open a folder."""
    if os.name == "posix":
        descriptor = os.open(folder, os.O_RDONLY)
        try:
            os.fsync(descriptor)
        finally:
            os.close(descriptor)


def _remove_stale_parts(path: pathlib.Path, now: float) -> None:
    """Remove partial files that killed processes left beside a file.

    `now` is a time from the clock of the file system, which may be on another machine.
    """
    for part in path.parent.glob(f".{glob.escape(path.name)}.*.part"):
        with contextlib.suppress(FileNotFoundError):  # another process removes it, too
            if now - part.stat().st_mtime > _STALE:
                part.unlink()

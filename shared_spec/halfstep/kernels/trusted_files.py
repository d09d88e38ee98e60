"""Files with native code, each with its SHA-256, which are read only if no other user can have written them.

A user who can write such a file runs code in every process that loads it. So the folder and its files must
belong to the user or to root, and other users must not be able to write them. The digest shows damage,
because loading a damaged library would end the process.
"""

import contextlib
import hashlib
import os
import pathlib
import stat
import tempfile

_LARGEST = 1 << 26
"""Largest size of a file in bytes."""


def is_trusted_folder(path: pathlib.Path) -> bool:
    """Whether a folder is not a link, and only the user or root can put files into it."""
    try:
        status = path.lstat()
        above = [parent.stat().st_mode for parent in path.absolute().parents]
    except OSError:
        return False
    # In a sticky folder, such as /tmp, other users cannot replace this folder.
    open_to_all = any(mode & stat.S_IWOTH and not mode & stat.S_ISVTX for mode in above)
    return stat.S_ISDIR(status.st_mode) and _is_ours(status) and not open_to_all


def write(path: pathlib.Path, content: bytes) -> None:
    """Write a file, and its digest beside it, each atomically."""
    _put(path, content)
    _put(_digest_of(path), hashlib.sha256(content).hexdigest().encode())


def read(path: pathlib.Path) -> bytes | None:
    """Return the content that `write` stored, or remove any other file with this name and return None."""
    content, digest = _content_of(path), _content_of(_digest_of(path))
    if content is not None and hashlib.sha256(content).hexdigest().encode() == digest:
        return content
    remove(path)
    return None


def remove(path: pathlib.Path) -> None:
    """Remove a file and its digest, if they exist and may be removed."""
    for each in (path, _digest_of(path)):
        with contextlib.suppress(OSError):
            each.unlink()


def _digest_of(path: pathlib.Path) -> pathlib.Path:
    return path.with_name(f"{path.name}.sha256")


def _is_ours(status: os.stat_result) -> bool:
    """Whether a file belongs to the user or to root, and other users cannot write it."""
    return status.st_uid in (0, os.getuid()) and not status.st_mode & (stat.S_IWGRP | stat.S_IWOTH)


def _content_of(path: pathlib.Path) -> bytes | None:
    """Return the content of the user's own plain file, without following links or waiting for pipes."""
    try:
        descriptor = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC)
    except OSError:
        return None
    with os.fdopen(descriptor, "rb") as file:
        status = os.fstat(descriptor)
        is_plain = stat.S_ISREG(status.st_mode) and status.st_size <= _LARGEST
        return file.read() if is_plain and _is_ours(status) else None


def _put(path: pathlib.Path, content: bytes) -> None:
    handle, part = tempfile.mkstemp(dir=path.parent)
    with os.fdopen(handle, "wb") as file:
        os.fchmod(handle, 0o644)  # another user may load what root has stored in an image
        file.write(content)
    pathlib.Path(part).replace(path)

"""A file of native code is read if it is what was written, and nobody else could write it."""

import os
import pathlib

import pytest

from halfstep.kernels import trusted_files

AS_ROOT = pytest.mark.skipif(os.getuid() != 0, reason="gives files to another user")


def flip(path: pathlib.Path) -> None:
    content = bytearray(path.read_bytes())
    content[len(content) // 2] ^= 1
    path.write_bytes(content)


def put_elsewhere(path: pathlib.Path) -> None:
    path.rename(path.with_name("elsewhere"))


def link(path: pathlib.Path) -> None:
    put_elsewhere(path)
    path.symlink_to(path.with_name("elsewhere"))


def pipe(path: pathlib.Path) -> None:
    path.unlink()
    os.mkfifo(path)


BAD = {
    "a bit is flipped": flip,
    "it is cut short": lambda path: os.truncate(path, 100),
    "it is empty": lambda path: os.truncate(path, 0),
    "it is larger than any": lambda path: os.truncate(path, 1 << 27),
    "its digest is missing": lambda path: put_elsewhere(path.with_name("x.so.sha256")),
    "its digest is damaged": lambda path: flip(path.with_name("x.so.sha256")),
    "its digest is a pipe": lambda path: pipe(path.with_name("x.so.sha256")),
    "it is a pipe": pipe,
    "it is a link": link,
    "others may write it": lambda path: path.chmod(0o666),
    "its group may write it": lambda path: path.chmod(0o664),
}


@pytest.mark.parametrize("what", BAD)
def test_a_file_is_read_as_it_was_written_or_is_removed(what, tmp_path):
    path = tmp_path / "x.so"
    trusted_files.write(path, bytes(range(256)) * 40)
    assert trusted_files.read(path) == bytes(range(256)) * 40
    BAD[what](path)
    assert trusted_files.read(path) is None
    assert {each.name for each in tmp_path.iterdir()} <= {"elsewhere"}


def test_what_is_not_there_is_none(tmp_path):
    assert trusted_files.read(tmp_path / "x.so") is None


@AS_ROOT
def test_a_file_of_another_user_is_not_read(tmp_path):
    path = tmp_path / "x.so"
    trusted_files.write(path, b"code")
    os.chown(path, 12345, 0)
    assert trusted_files.read(path) is None


def test_what_root_or_the_user_wrote_is_read_by_the_user(tmp_path, monkeypatch):
    path = tmp_path / "x.so"
    trusted_files.write(path, b"code")
    assert path.stat().st_mode & 0o777 == 0o644
    if os.getuid() == 0:
        monkeypatch.setattr(os, "getuid", lambda: 12345)
    assert trusted_files.is_trusted_folder(tmp_path)
    assert trusted_files.read(path) == b"code"


def test_a_folder_is_trusted_if_nobody_else_can_put_files_there(tmp_path):
    folder = tmp_path / "parent" / "folder"
    assert not trusted_files.is_trusted_folder(folder)
    folder.mkdir(parents=True, mode=0o700)
    assert trusted_files.is_trusted_folder(folder)
    for mode in (0o770, 0o707):
        folder.chmod(mode)
        assert not trusted_files.is_trusted_folder(folder)
    folder.chmod(0o755)
    for mode, trusted in ((0o777, False), (0o1777, True), (0o775, True)):
        folder.parent.chmod(mode)
        assert trusted_files.is_trusted_folder(folder) == trusted
    (tmp_path / "link").symlink_to(folder)
    assert not trusted_files.is_trusted_folder(tmp_path / "link")
    (tmp_path / "file").write_bytes(b"")
    assert not trusted_files.is_trusted_folder(tmp_path / "file")

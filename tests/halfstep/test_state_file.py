"""Writing a state file: whole or not at all, on the disk, for one writer or several."""

import hashlib
import os
import stat
import threading
import time
import unittest.mock

import numpy as np
import pytest

from halfstep.checkpoint import state_file
from halfstep.checkpoint.header import link_record, make_header
from halfstep.checkpoint.state_file import FileArray, file_array, read_state_file, write_state_file


def array(value: int, size: int = 64) -> FileArray:
    return file_array("test", "params/w", "uint8", (size,), np.full(size, value, np.uint8))


def write(path, value: int = 1, size: int = 64) -> None:
    write_state_file(path, make_header("test", {"w": []}, {}), {"params/w": array(value, size)})


def test_a_file_keeps_the_mode_of_the_one_that_it_replaces(tmp_path):
    path = tmp_path / "run"
    write(path)
    path.chmod(0o600)
    write(path, 2)
    assert stat.S_IMODE(path.stat().st_mode) == 0o600
    assert set(read_state_file("test", path)[1]["params/w"].data) == {2}


def test_a_new_file_has_the_mode_that_the_process_gives(tmp_path):
    (tmp_path / "plain").write_bytes(b"")
    write(tmp_path / "run")
    assert (tmp_path / "run").stat().st_mode == (tmp_path / "plain").stat().st_mode


def test_file_and_folder_are_flushed_and_the_file_before_it_is_renamed(tmp_path):
    path, flushed = tmp_path / "run", []

    def fsync(descriptor):
        flushed.append((os.path.isdir(f"/proc/self/fd/{descriptor}"), path.exists()))  # noqa: PTH112

    with unittest.mock.patch.object(os, "fsync", fsync):
        write(path)
    assert flushed == [(False, False), (True, True)]


def test_a_write_that_fails_leaves_the_folder_as_it_was(tmp_path):
    path = tmp_path / "run"
    write(path)
    with (
        unittest.mock.patch.object(os, "fsync", side_effect=OSError("disk")),
        pytest.raises(OSError, match="disk"),
    ):
        write(path, 2)
    assert list(tmp_path.iterdir()) == [path]
    assert set(read_state_file("test", path)[1]["params/w"].data) == {1}


def test_writers_to_one_path_all_end_whole(tmp_path):
    path, errors = tmp_path / "run", []

    def writer(value):
        try:
            for _ in range(20):
                write(path, value, 1 << 16)
        except Exception as error:
            errors.append(error)

    threads = [threading.Thread(target=writer, args=[value]) for value in range(1, 5)]
    for thread in threads:
        thread.start()
    while any(thread.is_alive() for thread in threads):
        if path.exists():
            assert len(set(read_state_file("test", path)[1]["params/w"].data)) == 1
    assert errors == []
    assert list(tmp_path.iterdir()) == [path]


def test_what_a_killed_writer_left_goes_and_what_one_writes_now_stays(tmp_path):
    stale, fresh, other = (tmp_path / name for name in (".run.a.part", ".run.b.part", ".run2.a.part"))
    for part in (stale, fresh, other):
        part.write_bytes(b"part")
    for part in (stale, other):
        os.utime(part, (time.time() - 7200,) * 2)
    write(tmp_path / "run")
    assert sorted(path.name for path in tmp_path.iterdir()) == [".run.b.part", ".run2.a.part", "run"]


def test_no_link_is_followed(tmp_path):
    victim = tmp_path / "victim"
    victim.write_bytes(b"mine")
    with unittest.mock.patch("secrets.token_hex", return_value="guessed"):
        (tmp_path / ".run.guessed.part").symlink_to(victim)
        with pytest.raises(FileExistsError):
            write(tmp_path / "run")
    assert victim.read_bytes() == b"mine"


def test_arrays_are_those_of_the_digest_though_the_file_is_rewritten_in_place(tmp_path):
    path = tmp_path / "run"
    write(path)
    _, arrays = read_state_file("test", path)
    with path.open("r+b") as file:
        file.write(bytes(path.stat().st_size))
    assert set(arrays["params/w"].data) == {1}


def test_an_array_that_changes_while_it_is_written_makes_a_file_that_is_whole(tmp_path, monkeypatch):
    """Another thread may train; the file has bytes of some moment, and their digest."""
    array = file_array("test", "params/w", "uint8", (64,), np.zeros(64, np.uint8))

    class Digest:
        def __init__(self, sha256=hashlib.sha256):
            self.found = sha256()

        def update(self, piece):
            self.found.update(piece)
            array.data[:] += 1

        def hexdigest(self):
            return self.found.hexdigest()

    with monkeypatch.context() as patched:
        patched.setattr(hashlib, "sha256", Digest)
        write_state_file(tmp_path / "run", make_header("test", {"w": []}, {}), {"params/w": array})
    assert set(read_state_file("test", tmp_path / "run")[1]["params/w"].data) == {2}


def test_a_header_longer_than_any_is_not_read_into_memory(tmp_path):
    path = tmp_path / "run"
    write(path)
    content = bytearray(path.read_bytes())
    content[:8] = (1 << 29).to_bytes(8, "little")
    path.write_bytes(content)
    os.truncate(path, 1 << 30)
    with pytest.raises(ValueError, match="its header has 536870912 bytes, the longest 100000000"):
        read_state_file("test", path)


@pytest.mark.parametrize(("longest", "count"), [(100, 0), (1 << 20, 1 << 31), (1 << 20, -1)])
def test_what_no_reader_takes_is_not_written(longest, count, tmp_path, monkeypatch):
    monkeypatch.setattr(state_file, "_LONGEST_HEADER", longest)
    header = make_header("test", {"w": [link_record("scale_by_adam", count, None, {}, {}, {})]}, {})
    with pytest.raises(ValueError, match=r"^save_state: (a reader would refuse|names and recipes)"):
        write_state_file(tmp_path / "run", header, {"params/w": array(1)})
    assert list(tmp_path.iterdir()) == []


def test_a_writer_whose_clock_is_ahead_leaves_the_part_of_another(tmp_path, monkeypatch):
    """The times of files are those of the machine that keeps them."""
    (tmp_path / ".run.a.part").write_bytes(b"part")
    monkeypatch.setattr(time, "time", lambda now=time.time: now() + 3720)
    write(tmp_path / "run")
    assert (tmp_path / ".run.a.part").exists()

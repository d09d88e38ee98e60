"""Keras trains with our optimizers and resumes them, with either backend from the state of the other."""

import pathlib
import subprocess
import sys

import numpy as np
import pytest

RUNS = pathlib.Path(__file__).with_name("keras_runs.py")
pytestmark = pytest.mark.slow
both = pytest.mark.parametrize("backend", ["jax", "torch"])


def run(backend, name, folder):
    """Run one of `keras_runs` with a backend."""
    done = subprocess.run(
        [sys.executable, RUNS, backend, name, folder], capture_output=True, text=True, timeout=300
    )
    assert done.returncode == 0, done.stderr[-3000:]


@both
def test_updates_that_keras_loses_are_kept(backend, tmp_path):
    run(backend, "small_updates", tmp_path)


@both
def test_a_model_that_was_saved_resumes_with_the_same_bits(backend, tmp_path):
    run(backend, "resume", tmp_path)


@both
def test_bad_arguments_and_files_of_other_recipes_raise(backend, tmp_path):
    run(backend, "refuse", tmp_path)


def test_each_backend_continues_the_run_of_the_other_with_the_same_bits(tmp_path):
    folders = [tmp_path / "jax", tmp_path / "torch"]
    for folder in folders:
        folder.mkdir()
        run(folder.name, "steps", folder)
    for backend, folder in zip(("torch", "jax"), folders, strict=True):
        run(backend, "steps", folder)
    ends = [dict(np.load(folders[0] / "torch.npz")), dict(np.load(folders[1] / "jax.npz"))]
    firsts = [dict(np.load(folder / f"{folder.name}.npz")) for folder in folders]
    for a, b in (ends, firsts):
        assert a["count"] == b["count"]
        for key in a.keys() - {"state"}:
            np.testing.assert_array_equal(a[key], b[key])
    assert (ends[0]["w0"] != firsts[0]["w0"]).any()


def test_state_is_cut_as_its_weights_are_and_has_the_bits_of_one_device(tmp_path):
    run("jax", "meshes", tmp_path)

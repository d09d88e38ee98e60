"""A state file is the same from both writers; one that is not whole, or not ours, is refused."""

import hashlib
import importlib
import importlib.metadata
import json
import re
import sys

import jax.numpy as jnp
import numpy as np
import optax
import pytest
import safetensors.numpy
import torch

import halfstep
import halfstep_jax
import halfstep_spec
import halfstep_torch
from halfstep import inspect
from halfstep.checkpoint import state_file
from halfstep.checkpoint.header import SPEC_VERSION, make_header
from halfstep_spec import inspect as spec_inspect
from halfstep_spec.checkpoint import state_file as spec_file
from on_torch.steps import step_by_ones
from twin.state_files import everything, torch_run, transform, weights

_READERS = {
    "spec": spec_file.read_state_file,
    "packages": lambda path: state_file.read_state_file("load_state", path),
}


@pytest.mark.parametrize("reader", _READERS)
def test_a_file_with_any_byte_changed_is_refused(reader, file, tmp_path):
    """Every byte of the start; of the rest one in seven, and all eight places of a bit."""
    content, path = file.read_bytes(), tmp_path / "bad"
    for at in (*range(128), *range(128, len(content), 7), len(content) - 1):
        bad = bytearray(content)
        bad[at] ^= 1 << at % 8
        path.write_bytes(bad)
        with pytest.raises(ValueError, match="damaged"):
            _READERS[reader](path)


@pytest.mark.parametrize("reader", _READERS)
def test_a_file_cut_short_or_longer_than_it_was_is_refused(reader, file, tmp_path):
    content, path = file.read_bytes(), tmp_path / "bad"
    for size in (*range(0, len(content), 13), len(content) - 1):
        path.write_bytes(content[:size])
        with pytest.raises(ValueError, match="damaged"):
            _READERS[reader](path)
    path.write_bytes(content + b"\0")
    with pytest.raises(ValueError, match="damaged"):
        _READERS[reader](path)


@pytest.mark.parametrize("reader", _READERS)
def test_a_safetensors_file_of_someone_else_is_refused(reader, tmp_path):
    path = tmp_path / "foreign.safetensors"
    safetensors.numpy.save_file({"w": np.zeros(3, np.float32)}, path)
    with pytest.raises(ValueError, match="no state file of halfstep"):
        _READERS[reader](path)


@pytest.mark.parametrize("reader", _READERS)
def test_a_file_of_a_later_layout_is_refused(reader, tmp_path, monkeypatch):
    path = tmp_path / "later"
    monkeypatch.setattr(state_file, "LAYOUT_VERSION", 2)
    state_file.write_state_file(path, make_header("test", {}, {}), {})
    monkeypatch.undo()
    with pytest.raises(ValueError, match="layout_version=2"):
        _READERS[reader](path)


def damaged_files(file, tmp_path, monkeypatch):
    """Return files that are no whole state file of this version, and what is said of each."""
    content, start = file.read_bytes(), file.read_bytes().index(b"}") + 1
    found = {"cut": (content[: len(content) // 2], "damaged"), "none": (b"", "damaged")}
    for at in (3, start // 2, start + 40, len(content) - 3):
        flipped = bytearray(content)
        flipped[at] ^= 4
        found[f"flipped at {at}"] = (bytes(flipped), "damaged")
    safetensors.numpy.save_file({"w": np.zeros(3, np.float32)}, tmp_path / "theirs")
    found["theirs"] = ((tmp_path / "theirs").read_bytes(), "no state file of halfstep")
    header, arrays = _READERS["packages"](file)
    monkeypatch.setattr(state_file, "LAYOUT_VERSION", 2)
    state_file.write_state_file(tmp_path / "later", header | {"layout_version": 2}, arrays)
    monkeypatch.undo()
    found["later"] = ((tmp_path / "later").read_bytes(), "layout_version=2")
    state_file.write_state_file(tmp_path / "contract", header | {"spec_version": 1}, arrays)
    found["contract"] = (
        (tmp_path / "contract").read_bytes(),
        "version 1 of the contract.*to_optax.*float32_state_dict",
    )
    return found


def test_model_and_optimizer_stay_as_they_are_where_a_file_is_refused(file, tmp_path, monkeypatch):
    path, (model, optimizer) = tmp_path / "bad", torch_run()
    step_by_ones(optimizer)
    before = everything(model, optimizer)
    for content, message in damaged_files(file, tmp_path, monkeypatch).values():
        path.write_bytes(content)
        with pytest.raises(ValueError, match=message):
            halfstep_torch.load_state(path, model, optimizer)
        with pytest.raises(ValueError, match=message):
            halfstep_jax.load_state(path, weights(), transform())
    with pytest.raises(FileNotFoundError):
        halfstep_torch.load_state(tmp_path / "missing", model, optimizer)
    after = everything(model, optimizer)
    assert before[1] == after[1]
    assert all(torch.equal(a, b) for a, b in zip(before[0], after[0], strict=True))


def test_all_readers_find_what_was_written_and_so_does_safetensors(file):
    header, arrays = _READERS["spec"](file)
    assert header["leaves"].keys() == {"w", "b"}
    found_header, found = _READERS["packages"](file)
    assert found_header == header
    assert found.keys() == arrays.keys()
    for name, array in arrays.items():
        said = (array.dtype, array.bits.shape, array.bits.tobytes())
        assert (found[name].dtype, found[name].shape, found[name].data.tobytes()) == said
    with safetensors.safe_open(file, "np") as theirs:
        assert set(theirs.keys()) == set(arrays)
        assert json.loads(theirs.metadata()["halfstep"]) == header
    np.testing.assert_array_equal(
        safetensors.numpy.load_file(file)["nu/w"], arrays["nu/w"].bits, err_msg="nu/w"
    )


def test_both_writers_write_the_same_bytes(file, tmp_path):
    assert spec_file.file_bytes(*_READERS["spec"](file)) == file.read_bytes()
    state_file.write_state_file(tmp_path / "again", *_READERS["packages"](file))
    assert (tmp_path / "again").read_bytes() == file.read_bytes()
    assert [path.name for path in tmp_path.iterdir()] == ["again"]


@pytest.mark.parametrize("decay", [1e-4, 1e-2])
def test_another_weight_decay_than_that_of_the_run_is_told(decay, file, caplog):
    halfstep_torch.load_state(file, *torch_run(weight_decay=decay))
    halfstep_jax.load_state(file, weights(), transform(weight_decay=decay))
    said = [record.message for record in caplog.records if "had weight_decay=0.0001" in record.message]
    assert len(said) == (0 if decay == 1e-4 else 2)


def test_arrays_without_elements_are_read_again(tmp_path):
    params, tx = {"w": jnp.ones((0, 4), jnp.bfloat16)}, halfstep_jax.adamw(1e-3)
    halfstep_jax.save_state(tmp_path / "run", params, tx.init(params), tx)
    model = torch.nn.Module()
    model.w = torch.nn.Parameter(torch.ones(0, 4, dtype=torch.bfloat16))
    optimizer = halfstep_torch.AdamW(model.named_parameters(), weight_decay=1e-4)
    halfstep_torch.load_state(tmp_path / "run", model, optimizer)
    assert optimizer.state[model.w]["exp_avg"].shape == (0, 4)


def test_versions_are_those_of_the_spec():
    assert halfstep_spec.SPEC_VERSION == SPEC_VERSION
    assert spec_file.LAYOUT_VERSION == state_file.LAYOUT_VERSION


def test_a_header_is_json_as_others_read_it(tmp_path):
    """LAMB's ratio has no upper bound, and JSON no infinity."""
    path, params = tmp_path / "run", {"w": weights()["w"]}
    tx = halfstep_jax.lamb(1e-2)
    halfstep_jax.save_state(path, params, tx.init(params), tx)
    model = torch.nn.Module()
    model.w = torch.nn.Parameter(torch.zeros(2, 3, dtype=torch.bfloat16))
    optimizer = halfstep_torch.Lamb(model.named_parameters(), 1e-2, compile=False)
    halfstep_torch.load_state(path, model, optimizer)
    halfstep_torch.save_state(tmp_path / "again", model, optimizer)
    for name in ("run", "again"):
        with safetensors.safe_open(tmp_path / name, "np") as file:
            said = json.loads(file.metadata()["halfstep"], parse_constant=pytest.fail)
        (ratio,) = (link for link in said["recipes"][0] if link["name"] == "scale_by_trust_ratio")
        assert ratio["numbers"]["max_ratio"] is None


@pytest.mark.parametrize("main", [inspect.main, spec_inspect.main], ids=["packages", "spec"])
def test_a_person_can_read_a_file(main, file, tmp_path, capsys):
    assert main([str(file)]) == 0
    said = capsys.readouterr().out
    for text in ("2 leaves", "scale_by_adam, step 2, seed 3", "ufloat16_e7m9", "nu/w", "2x3"):
        assert text in said
    bad = tmp_path / "bad"
    bad.write_bytes(file.read_bytes()[:-1])
    assert main([str(bad)]) == 1
    assert "damaged" in capsys.readouterr().out


@pytest.mark.parametrize("module", ["halfstep.inspect", "halfstep_spec.inspect", "halfstep.check"])
def test_the_usage_of_a_command_can_be_typed(module, capsys, monkeypatch):
    monkeypatch.setattr(sys, "argv", ["module.py", "--help"])
    with pytest.raises(SystemExit):
        importlib.import_module(module).main()
    assert capsys.readouterr().out.startswith(f"usage: python -m {module} ")


def test_a_file_is_written_where_nothing_is_installed(tmp_path, monkeypatch):
    """Folders on a path have no metadata; the version that a file names stands in the code."""

    def missing(name):
        raise importlib.metadata.PackageNotFoundError(name)

    monkeypatch.setattr(importlib.metadata, "version", missing)
    params, tx = weights(), transform()
    halfstep_jax.save_state(tmp_path / "jax", params, tx.init(params), tx)
    halfstep_torch.save_state(tmp_path / "torch", *torch_run())
    for package in ("jax", "torch"):
        said, _ = _READERS["packages"](tmp_path / package)
        assert said["writer"] == f"halfstep_{package} {halfstep.__version__}"


CHANGES = {
    "[0,4]": (lambda text: text.replace(b"[0,12]", b"[0,4]"), b"", "it has 12 bytes"),
    "[-12,0]": (lambda text: text.replace(b"[0,12]", b"[-12,0]"), b"", "it has 12 bytes"),
    "far": (lambda text: text.replace(b"[0,12]", b"[1000000,1000012]"), b"", "it has 12 bytes"),
    "longer": (lambda text: text, b"more", "has 16 bytes of arrays, and they end at 12"),
    "layout": (lambda text: text.replace(b'version\\":1', b'version\\":0'), b"", "has layout_version=0"),
}


@pytest.mark.parametrize("name", CHANGES)
def test_a_file_of_another_layout_is_refused(name, tmp_path):
    """The hash is right: someone wrote the file so."""
    change, more, message = CHANGES[name]
    path = tmp_path / "run"
    params, tx = {"w": weights()["w"]}, optax.identity()
    halfstep_jax.save_state(path, params, tx.init(params), tx)
    content = path.read_bytes()
    size = int.from_bytes(content[:8], "little")
    header = change(content[8 : 8 + size])
    zeros = re.sub(rb'"sha256":"[0-9a-f]{64}"', b'"sha256":"' + b"0" * 64 + b'"', header)
    whole = len(header).to_bytes(8, "little") + zeros + content[8 + size :] + more
    digest = hashlib.sha256(whole).hexdigest().encode()
    path.write_bytes(whole.replace(b'"sha256":"' + b"0" * 64, b'"sha256":"' + digest))
    with pytest.raises(ValueError, match=message):
        state_file.read_state_file("test", path)

"""A framework newer than what the tests ran with is told, where its private parts are used."""

import logging
import pathlib
import re

import jax
import pytest
import torch

import halfstep.__main__ as command
from halfstep import newest

CONSTRAINTS = pathlib.Path(__file__).parents[2] / "constraints.txt"


@pytest.fixture(autouse=True)
def fresh():
    """Forget what was said, before and after."""
    newest.say_if_newer.cache_clear()
    yield
    newest.say_if_newer.cache_clear()


def test_the_newest_versions_are_those_that_are_pinned_and_run_here():
    pins = dict(re.findall(r"^(jax|torch)==(\S+)$", CONSTRAINTS.read_text(), re.MULTILINE))
    assert pins == newest.NEWEST
    for module in (jax, torch):
        assert newest.note(module.__name__, module.__version__) == ""


@pytest.mark.parametrize("version", ["2.13.0+cpu", "2.9.1", "2.13.0a0", "unknown", "2.13"])
def test_of_versions_up_to_the_newest_nothing_is_said(version):
    assert newest.note("torch", version) == ""


@pytest.mark.parametrize("version", ["2.13.1", "2.14.0+cu130", "2.14.0a1", "3.0"])
def test_a_newer_version_is_told_with_what_to_do(version):
    assert f"torch {version} is newer than 2.13.0" in newest.note("torch", version)
    assert "python -m halfstep" in newest.note("torch", version)


def test_a_new_primitive_tells_of_a_newer_jax_once(monkeypatch, caplog):
    from halfstep_jax.xla import primitives

    monkeypatch.setitem(newest.NEWEST, "jax", "0.1.0")
    with caplog.at_level(logging.WARNING, "halfstep_jax"):
        for name in ("told_a", "told_b"):
            primitives.elementwise(name, lambda x: x)
    assert len([line for line in caplog.messages if "is newer than 0.1.0" in line]) == 1


def test_the_command_line_tells_of_newer_frameworks(monkeypatch, capsys):
    monkeypatch.setattr(command, "verdict", lambda machine, device, mode: (True, "was run"))
    monkeypatch.setitem(newest.NEWEST, "jax", "0.1.0")
    command.main([])
    assert f"jax {jax.__version__} is newer than 0.1.0" in capsys.readouterr().out

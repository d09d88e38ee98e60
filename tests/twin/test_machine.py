"""`python -m halfstep` says what is installed, and whether steps on this machine give the contract's bits."""

import importlib.util
from collections.abc import Mapping

import numpy as np
import pytest

import halfstep.__main__ as command
import halfstep_jax.report.machine
import halfstep_torch.report.machine
from halfstep.kernels.build import find_cc

MACHINES = (halfstep_jax.report.machine, halfstep_torch.report.machine)


def test_every_recipe_is_tried():
    names = vars(command.recipes).items()
    mappings = [name for name, value in names if isinstance(value, Mapping) and name[0] != "_"]
    assert sorted(command.RECIPES) == sorted(mappings)


def test_the_question_has_weights_and_gradients_of_both_signs_that_bfloat16_holds():
    weights, gradients = command.question()
    assert weights.dtype == np.uint16
    assert 0.4 < (weights >> 15).mean() < 0.6
    assert 0.4 < (gradients < 0).mean() < 0.6
    assert not (gradients.view(np.uint32) & 0xFFFF).any()
    assert gradients.shape == (command._STEPS, *weights.shape)


@pytest.mark.slow
@pytest.mark.parametrize("machine", MACHINES, ids=lambda module: module.__name__)
def test_steps_move_most_weights_to_the_bits_of_the_reference(machine, monkeypatch):
    monkeypatch.setattr(command, "RECIPES", ("one_pass",))
    assert command.verdict(machine, "cpu", machine.MODES[0])[0]
    assert (command.due(command.recipes.one_pass) != command.question()[0]).mean() > 0.5


@pytest.mark.slow
@pytest.mark.parametrize("machine", MACHINES, ids=lambda module: module.__name__)
def test_a_bit_that_differs_is_named(machine, monkeypatch):
    monkeypatch.setattr(command, "RECIPES", ("sixteen_bit",))
    due = command.due(command.recipes.sixteen_bit)
    due[3, 4] ^= 1
    monkeypatch.setattr(command, "due", lambda _: due)
    same, words = command.verdict(machine, "cpu", machine.MODES[0])
    assert not same
    assert words.startswith("bits that differ from the reference: sixteen_bit (1 weights)")


def test_the_command_prints_versions_devices_and_compilers(monkeypatch, capsys):
    monkeypatch.setattr(
        command, "verdict", lambda machine, device, mode: (mode != "plain steps", f"{mode} was run")
    )
    assert command.main([]) == 1
    text = capsys.readouterr().out
    assert "halfstep 0." in text
    assert "contract version" in text
    for words in (
        "jax 0.",
        "optax 0.",
        "torch 2.",
        "device",
        "C compiler: ",
        "Triton: ",
        "plain steps was run",
    ):
        assert words in text
    assert ("kernels was run" in text) == (find_cc() is not None)


def test_a_framework_that_is_missing_is_said_to_be(monkeypatch, capsys):
    monkeypatch.setattr(command, "verdict", lambda *_: (True, "held"))
    installed = importlib.util.find_spec
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None if name == "jax" else installed(name))
    assert command.main([]) == 0
    text = capsys.readouterr().out
    assert "jax is not installed" in text
    assert "plain steps: held" in text

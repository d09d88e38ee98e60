"""Lives of a run: steps, edits, files, rates, new groups, frozen weights and other frameworks in any order.

After each event every array has the bits of the reference, which knows of none of them.
"""

import io
import pathlib
import tempfile
from typing import Any

import jax
import numpy as np
import pytest
import torch
from hypothesis import HealthCheck, Phase, seed, settings
from hypothesis import strategies as st
from hypothesis.stateful import (
    RuleBasedStateMachine,
    initialize,
    invariant,
    precondition,
    rule,
    run_state_machine_as_test,
)

import halfstep_jax
import halfstep_torch
from hunt.edits import EDITS, edited
from hunt.settings import EXAMPLES, SEED, Numbers, Setting, kinds_of_numbers, patterns
from hunt.sides import Jax, Reference, Torch, assert_same_arrays, transform

LIVES = EXAMPLES // 100
_LEAST = 2.0**-40
_SHAPES = {"a": (4, 6), "b": (17,), "c": (5, 3)}
_RATES = {"b1": 0.9, "b2": 0.95, "eps": 1e-8}


def _setting(dtype, storage, mu, nu, rounding="stochastic") -> Setting:
    options = (("mu_rounding", rounding), ("nu_rounding", "stochastic"))
    shapes = tuple((name, _SHAPES[name]) for name in ("a", "b"))
    return Setting("adam", dtype, storage, (("mu_dtype", mu), ("nu_dtype", nu)), options, "decoupled", shapes)


_SETTINGS = (
    _setting("bfloat16", "stochastic", "bfloat16", "bfloat16"),
    _setting("bfloat16", "split8", ("relative", "int4", 4, ()), ("scaled", "uroot8", 16, ()), "feedback"),
    _setting("float16", "compensated", ("relative", "mulaw8", None, ()), "uroot4_e4m4"),
    _setting("float32", "nearest", ("codebook", "dynamic8", 7, ()), ("scaled", "ufloat8_e5m3", "row", ())),
)


class Life(RuleBasedStateMachine):
    """A run that begins in torch."""

    @initialize(which=st.sampled_from(_SETTINGS), draw_seed=st.integers(0, 2**32))
    def begin(self, which, draw_seed):
        """Make the run, and the reference beside it."""
        self.setting, self.draws, self.frozen, self.compile = which, draw_seed, set(), False
        self.numbers = Numbers(_RATES, 1e-2, 0.1, 2**40 + 5)
        weights = {name: self._patterns("near 1", shape) for name, shape in which.shapes}
        self.due, self.run = Reference(which, self.numbers, weights), Torch(which, self.numbers, weights)

    def _patterns(self, kind: str, shape: tuple[int, ...]) -> np.ndarray:
        self.draws += 1
        return patterns(self.draws, kind, shape, self.setting.dtype, _LEAST)

    @property
    def in_torch(self) -> bool:
        """Whether the run is in torch now."""
        return isinstance(self.run, Torch)

    @property
    def counts(self) -> set[int]:
        """The steps that leaves have taken."""
        return {state.rule.count for state in self.due.states.values()}

    def _torch(self, rate: float) -> Torch:
        """Return a run in torch of other weights, as after a restart."""
        zeros = {name: np.zeros_like(p) for name, p in self.due.params.items()}
        numbers = Numbers(_RATES, rate, 0.1, 2**40 + 5)
        return Torch(self.setting, numbers, zeros, self.compile)

    def _model(self, run: Torch) -> torch.nn.Module:
        model = torch.nn.Module()
        for name, p in run.params.items():
            model.register_parameter(name, p)
        return model

    @rule(kind=kinds_of_numbers)
    def step(self, kind):
        """Take a step with all weights that are not frozen."""
        names = [name for name in self.due.params if name not in self.frozen]
        gradients = {name: self._patterns(kind, self.due.params[name].shape) for name in names}
        with np.errstate(all="ignore"):
            self.due.step(gradients)
        self.run.step(gradients)

    @rule(edit=st.sampled_from(tuple(EDITS)))
    def edit_the_weights(self, edit):
        """Set weights from outside."""
        self.draws += 1
        weights = {
            name: edited(edit, p, self.setting.dtype, self.draws, _LEAST)
            for name, p in self.due.params.items()
        }
        self.due.set(weights)
        self.run.set(weights)

    @rule(rate=st.sampled_from((1e-2, 1e-3, 1e-5, 0.5)))
    def change_the_rate(self, rate):
        """Go on at another learning rate."""
        self.due.rate = np.float32(rate)
        self.numbers = Numbers(_RATES, rate, 0.1, 2**40 + 5)
        if self.in_torch:
            for group in self.run.optimizer.param_groups:
                group["lr"] = rate
        else:
            self.run.numbers[0]["lr"] = np.float32(rate)

    @precondition(lambda self: self.in_torch and "c" not in self.due.params)
    @rule()
    def add_a_group(self):
        """Go on with one weight more."""
        bits = self._patterns("near 1", _SHAPES["c"])
        new = Reference(self.setting, self.numbers, {"c": bits})
        self.due.params["c"], self.due.states["c"] = bits, new.states["c"]
        p = Torch(self.setting, self.numbers, {"c": bits}).params["c"]
        self.run.params["c"] = p
        self.run.optimizer.add_param_group({"params": [("c", p)], "lr": self.numbers.learning_rate})

    @precondition(lambda self: self.in_torch)
    @rule(name=st.sampled_from(("a", "b")))
    def freeze_or_thaw(self, name):
        """Let a weight stand still, or go on."""
        self.frozen ^= {name}
        self.run.params[name].requires_grad_(name not in self.frozen)

    @precondition(lambda self: self.in_torch)
    @rule()
    def save_and_load_a_state_dict(self):
        """Go on in another process, by torch.save."""
        file = io.BytesIO()
        torch.save({"p": self._model(self.run).state_dict(), "o": self.run.optimizer.state_dict()}, file)
        file.seek(0)
        held = torch.load(file)
        groups = len(self.run.optimizer.param_groups)
        self.run = self._with_groups(groups)
        self._model(self.run).load_state_dict(held["p"])
        self.run.optimizer.load_state_dict(held["o"])
        self._freeze()

    def _with_groups(self, groups: int) -> Torch:
        if groups == 1:
            return self._torch(0.25)
        c = self.due.params.pop("c")
        run = self._torch(0.25)
        self.due.params["c"] = c
        p = Torch(self.setting, self.numbers, {"c": np.zeros_like(c)}).params["c"]
        run.params["c"] = p
        run.optimizer.add_param_group({"params": [("c", p)], "lr": 0.25})
        return run

    def _freeze(self) -> None:
        for name in self.frozen:
            self.run.params[name].requires_grad_(False)

    @precondition(lambda self: self.in_torch and not self.compile and self.setting is _SETTINGS[0])
    @rule()
    def compile_it(self):
        """Go on with compiled steps."""
        self.compile = True
        self.save_and_load_a_state_dict()

    @precondition(lambda self: len(self.counts) == 1 and not self.frozen)
    @rule()
    def change_framework(self):
        """Go on in the other framework, by a file."""
        with tempfile.TemporaryDirectory() as folder:
            path = pathlib.Path(folder) / "run.safetensors"
            if self.in_torch:
                halfstep_torch.save_state(path, self._model(self.run), self.run.optimizer)
                self.run = self._in_jax(path)
            else:
                halfstep_jax.save_state(path, self.run.params, self.run.state, self._transform())
                self.run = self._torch(self.numbers.learning_rate)
                halfstep_torch.load_state(path, self._model(self.run), self.run.optimizer)

    def _transform(self) -> Any:
        return transform(self.setting, self.numbers.of_links, self.numbers.seed)

    def _in_jax(self, path: pathlib.Path) -> Jax:
        zeros = {name: np.zeros_like(p) for name, p in self.due.params.items()}
        run = Jax(self.setting, self.numbers, zeros)
        run.params, run.state = halfstep_jax.load_state(path, run.params, self._transform())
        return run

    @precondition(lambda self: not self.in_torch)
    @rule(count=st.sampled_from((1, 2)))
    def reshard(self, count):
        """Go on with arrays cut over devices, where their first axis can be cut."""
        mesh = jax.sharding.Mesh(np.array(jax.devices()[:count]), ("x",))

        def put(x):
            cut = x.ndim and x.shape[0] and x.shape[0] % count == 0
            spec = jax.sharding.PartitionSpec("x") if cut else jax.sharding.PartitionSpec()
            return jax.device_put(x, jax.sharding.NamedSharding(mesh, spec))

        self.run.params, self.run.state = jax.tree.map(put, (self.run.params, self.run.state))

    @invariant()
    def every_bit_is_that_of_the_reference(self):
        """Compare all arrays; a weight that was never stepped has no state in torch yet."""
        given, due = self.run.arrays(), self.due.arrays()
        for name, state in self.due.states.items():
            if state.rule.count == 0 and self.in_torch:
                due = {
                    key: x for key, x in due.items() if not key.startswith(f"{name} ") or key.endswith(" p")
                }
                given = {key: x for key, x in given.items() if key in due or not key.startswith(f"{name} ")}
        assert_same_arrays(given, due, type(self.run).__name__)


@pytest.mark.slow
def test_every_life_has_the_bits_of_the_reference():
    how = settings(max_examples=LIVES, stateful_step_count=25, deadline=None, database=None)
    how = settings(how, suppress_health_check=list(HealthCheck), phases=[Phase.generate])
    run_state_machine_as_test(seed(SEED)(Life), settings=how)

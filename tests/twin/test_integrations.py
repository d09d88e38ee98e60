"""Classes that trainers' configs name, against the documented form of their registries."""

import dataclasses
import importlib
import subprocess
import sys
import types

import jax
import jax.numpy as jnp
import pytest
import torch


class Registry:
    """As draccus.ChoiceRegistry: classes by the names under which they were registered."""

    kinds: dict = {}  # noqa: RUF012

    @classmethod
    def register_subclass(cls, name):
        def register(kind):
            cls.kinds[name] = kind
            return kind

        return register


def module(monkeypatch, name, **members):
    for i in range(name.count(".") + 1):
        part = ".".join(name.split(".")[: i + 1])
        monkeypatch.setitem(sys.modules, part, types.ModuleType(part))
    vars(sys.modules[name]).update(members)


def anew(monkeypatch, name):
    """Import a module, whatever an earlier test has left of it."""
    monkeypatch.delitem(sys.modules, name, raising=False)
    return importlib.import_module(name)


def test_lerobot_builds_ours_by_its_registered_name(monkeypatch):
    @dataclasses.dataclass
    class OptimizerConfig(Registry):
        lr: float
        weight_decay: float
        grad_clip_norm: float

    module(monkeypatch, "lerobot.optim.optimizers", OptimizerConfig=OptimizerConfig)
    import halfstep_torch as hs

    anew(monkeypatch, "halfstep_torch.integrations.lerobot")

    config = Registry.kinds["halfstep"](lr=2e-3, recipe="one_pass")
    model = torch.nn.Linear(4, 4).bfloat16()
    renamed = {f"policy.{name}": param for name, param in model.named_parameters()}
    assert config.build(renamed).param_groups[0]["param_names"] == ["policy.weight", "policy.bias"]
    for params in (model.parameters(), list(model.parameters())):
        optimizer = config.build({"actor": params})["actor"]
        assert type(optimizer) is hs.AdamW
        group = optimizer.param_groups[0]
        assert (group["lr"], group["nu_dtype"], group["param_names"][0]) == (2e-3, "uroot4_e4m4", "weight")
        told = hs.AdamW(model.named_parameters(), recipe="one_pass", seed=0)
        assert str(group["halfstep"]) == str(told.param_groups[0]["halfstep"])
    assert type(Registry.kinds["halfstep"](optimizer="lion").build(model.parameters())) is hs.Lion
    with pytest.raises(TypeError, match="one of the params is list"):  # names and groups do not mix
        config.build({"actor": list(model.parameters()), "temperature": model.weight})


def test_torchtitan_builds_ours_by_name_and_its_own(monkeypatch):
    class OptimizersContainer:
        class Config:
            pass

        @staticmethod
        def _resolve_optimizer_factory(name):
            return f"torchtitan's {name}"

    module(monkeypatch, "torchtitan.components.optimizer", OptimizersContainer=OptimizersContainer)
    import halfstep_torch as hs

    made = anew(monkeypatch, "halfstep_torch.integrations.torchtitan").HalfstepOptimizers
    assert made._resolve_optimizer_factory("Lion") is hs.Lion
    for name in ("RMSprop", "from_config", "Monitor", "recipes"):
        assert made._resolve_optimizer_factory(name) == f"torchtitan's {name}"


def test_the_trainer_tells_which_weights_decay(monkeypatch):
    class Trainer:
        def get_decay_parameter_names(self, model):
            return [name for name, _ in model.named_parameters() if name.endswith("weight")]

    module(monkeypatch, "transformers", Trainer=Trainer)
    import halfstep_torch as hs

    model = torch.nn.Sequential(torch.nn.Linear(4, 4), torch.nn.Linear(4, 4))
    model[1].bias.requires_grad_(False)
    optimizer = hs.integrations.transformers()(model, lr=1e-3, weight_decay=0.1)
    told = [(group["param_names"], group["weight_decay"]) for group in optimizer.param_groups]
    assert told == [(["0.weight", "1.weight"], 0.1), (["0.bias"], 0.0)]


def test_the_factory_of_the_trainer_reads_its_arguments(monkeypatch, caplog):
    class Trainer:
        def get_decay_parameter_names(self, model):
            return ["weight"]

    module(monkeypatch, "transformers", Trainer=Trainer)
    import halfstep_torch as hs
    from halfstep_torch.say_once import say_once

    say_once.cache_clear()
    arguments = types.SimpleNamespace(
        learning_rate=2e-5, weight_decay=0.1, adam_beta1=0.8, adam_beta2=0.95, adam_epsilon=1e-7
    )
    model, factory = torch.nn.Linear(4, 4), hs.integrations.transformers()
    read = {"lr": 2e-5, "weight_decay": 0.1, "betas": (0.8, 0.95), "eps": 1e-7}
    for optimizer in (factory(model, arguments), factory(model, args=arguments)):
        assert {key: optimizer.param_groups[0][key] for key in read} == read
    optimizer = factory(model, args=arguments, lr=1e-3, betas=(0.9, 0.99))
    told = {**read, "lr": 1e-3, "betas": (0.9, 0.99)}
    assert {key: optimizer.param_groups[0][key] for key in told} == told
    for name in ("Lion", "SGD", "Adafactor", "AdEMAMix", "Adan", "Lamb", "AdamWScheduleFree"):
        group = factory(model, arguments, optimizer=name).param_groups[0]
        assert (group["lr"], group["weight_decay"]) == (2e-5, 0.1)
        assert len(group.get("betas", ())) != 2 or tuple(group["betas"]) == (0.8, 0.95)
    factory(model, lr=1e-3, weight_decay=0.1)
    assert not caplog.text
    factory(model, lr=1e-3)
    assert "AdamW has weight_decay=0.01, its own default, whatever the TrainingArguments have" in caplog.text
    with pytest.raises(TypeError, match=r"args='SGD' has no learning_rate\. Pass the TrainingArguments"):
        factory(model, "SGD")


def test_levanter_builds_ours_by_its_registered_name(monkeypatch):
    @dataclasses.dataclass(frozen=True)
    class OptimizerConfig(Registry):
        learning_rate: float = 6e-4
        weight_decay: float = 0.1

        def lr_scheduler(self, num_train_steps):
            return lambda count: self.learning_rate * (1 - count / num_train_steps)

        def build_weight_decay_mask(self):
            return None

    module(monkeypatch, "levanter.optim", OptimizerConfig=OptimizerConfig)
    import halfstep_jax

    anew(monkeypatch, "halfstep_jax.integrations.levanter")

    params, grads = {"w": jnp.ones(64)}, {"w": jnp.ones(64)}
    tx = Registry.kinds["halfstep"](recipe="eight_bit").build(100)
    told = halfstep_jax.adamw(
        lambda count: 6e-4 * (1 - count / 100), weight_decay=0.1, recipe="eight_bit", seed=0
    )
    (ours, _), (theirs, _) = (jax.jit(t.update)(grads, t.init(params), params) for t in (tx, told))
    assert (ours["w"] == theirs["w"]).all()


def test_importing_halfstep_imports_no_trainer():
    trainers = {"transformers", "torchtitan", "lerobot", "levanter"}
    code = f"import sys, halfstep_jax, halfstep_torch; assert not {trainers} & {{*sys.modules}}"
    subprocess.run([sys.executable, "-c", code], check=True)

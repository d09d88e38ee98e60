"""What holds of each public name of a package."""

import copy
import inspect
import pickle
import types

import pytest
import torch

import halfstep
import halfstep_jax
import halfstep_torch

PUBLIC = [
    pytest.param(name, x, id=f"{package.__name__}-{name}")
    for package in (halfstep_jax, halfstep_torch)
    for name in package.__all__
    if not isinstance(x := getattr(package, name), types.ModuleType)
]


@pytest.mark.parametrize(("name", "x"), PUBLIC)
def test_a_public_name_is_found_by_a_pickle_and_has_a_docstring(name, x):
    """Also where its docstring is that of another, from which it is made."""
    assert pickle.loads(pickle.dumps(x)) is x
    assert getattr(x, "__name__", name) == name
    assert inspect.getdoc(x)


@pytest.mark.parametrize("package", [halfstep, halfstep_jax, halfstep_torch], ids=lambda x: x.__name__)
def test_a_public_class_names_its_package_as_its_module(package):
    """As lists of what a safe load may read have it, and pickles by reference."""
    kinds = [x for x in map(vars(package).get, package.__all__) if isinstance(x, type)]
    assert not [kind for kind in kinds if kind.__module__.startswith(("halfstep_jax.", "halfstep_torch."))]


def test_schedules_formats_and_transforms_survive_a_pickle():
    schedule = halfstep_torch.preheat(1e-3, 10)
    assert pickle.loads(pickle.dumps(schedule))(7) == schedule(7)
    for package in (halfstep_jax, halfstep_torch):
        for made in (package.scaled("uroot8"), package.relative("int4", 32)):
            assert pickle.loads(pickle.dumps(made)) == made
            assert type(made).__module__ == package.__name__
        for recipe in map(vars(package.recipes).get, dir(package.recipes)):
            assert pickle.loads(pickle.dumps(recipe)) is copy.deepcopy(recipe) is recipe
    optimizer = halfstep_torch.AdamW(
        [("w", torch.nn.Parameter(torch.ones(4)))], lr=halfstep_torch.preheat(1e-3, 10)
    )
    again = pickle.loads(pickle.dumps(optimizer))
    assert again.param_groups[0]["lr"] == optimizer.param_groups[0]["lr"] > 0
    assert b"halfstep_torch.rules" not in pickle.dumps(type(optimizer))


def test_a_run_of_torch_survives_a_pickle_with_all_that_was_made_for_it():
    """As Ray, skorch and Lightning send it to another process."""
    model = torch.nn.Sequential(torch.nn.Linear(8, 8), torch.nn.Linear(8, 8)).bfloat16()
    average = torch.optim.swa_utils.AveragedModel(
        model, multi_avg_fn=halfstep_torch.ema_params(model, 0.9), device=torch.device("cpu")
    )
    model(torch.ones(2, 8).bfloat16()).sum().backward()
    kinds = [x for x in map(vars(halfstep_torch).get, halfstep_torch.__all__) if isinstance(x, type)]
    kinds = [
        x for x in kinds if issubclass(x, halfstep_torch.Optimizer) and x is not halfstep_torch.Optimizer
    ]
    tx = halfstep_torch.chain(
        halfstep_torch.scale_by_adam(),
        halfstep_torch.scale_by_learning_rate(halfstep_torch.preheat(1e-3, 10)),
        halfstep_torch.round_stochastically(),
    )
    optimizers = [kind(model.named_parameters()) for kind in kinds]
    optimizers.append(halfstep_torch.Optimizer(model.named_parameters(), tx))
    optimizers.append(halfstep_torch.round_weights(torch.optim.RAdam(model.named_parameters())))
    made = [tx, halfstep_torch.from_config("AdamW(lr=1e-3)"), halfstep_torch.MatrixAxes(0, 1)]
    reports = [halfstep_torch.describe(optimizers[0]), halfstep_torch.memory_report(model, optimizers[0])]
    reports += [halfstep_torch.diagnose(model, optimizers[0]), halfstep_torch.Monitor(optimizers[0])]
    again = pickle.loads(pickle.dumps([optimizers, made, reports, average, model]))
    again[3].update_parameters(again[4])
    average.update_parameters(model)
    assert all(map(torch.equal, again[3].parameters(), average.parameters()))

"""Names of parameters decide their random words: order, groups, freezing and lists change no bit."""

import copy
import importlib
import sys
import types

import pytest
import torch

import halfstep_torch as hs
from halfstep_torch.leaves import group_names
from on_torch.steps import assert_same_snapshots, parameters, snapshot, step_by_ones

SHAPES = {"layer.0.w": (5, 4), "layer.1.w": (300,), "layer.2.w": (7, 3, 2)}


def named():
    return parameters(shapes=SHAPES)


def step_named(params, optimizer, steps=3, without=()):
    for step in range(steps):
        for name, p in params:
            generator = torch.Generator().manual_seed(100 * step + sum(map(ord, name)))
            p.grad = None if name in without else torch.randn(p.shape, generator=generator).bfloat16()
        optimizer.step()


def by_name(params, optimizer):
    states = {name: [p.detach().clone(), *optimizer.state.get(p, {}).values()] for name, p in params}
    return {name: [x.float() for x in states[name]] for name in sorted(states)}


def assert_same_by_name(ours, theirs, names):
    for name in names:
        for a, b in zip(ours[name], theirs[name], strict=True):
            assert torch.equal(a, b), name


GIVEN = {
    "another order": lambda params: [params[i] for i in (2, 0, 1)],
    "groups": lambda params: [{"params": [p]} for p in params],
    "a wrapper": lambda params: [(f"module.{name}", p) for name, p in params],
    "wrappers": lambda params: [(f"_orig_mod.module.{name}", p) for name, p in params],
}


@pytest.mark.parametrize("way", GIVEN)
def test_the_order_groups_and_wrappers_of_named_parameters_change_no_bit(way):
    runs = []
    for given in (list, GIVEN[way]):
        params = named()
        optimizer = hs.AdamW(given(params), lr=1e-2)
        step_named(params, optimizer)
        runs.append(by_name(params, optimizer))
    assert_same_by_name(*runs, names=runs[0])


def test_freezing_a_parameter_changes_no_bit_of_the_others():
    frozen, runs = "layer.1.w", []
    for without in ((), (frozen,)):
        params = named()
        optimizer = hs.AdamW(params, lr=1e-2)
        step_named(params, optimizer, without=without)
        runs.append(by_name(params, optimizer))
    assert_same_by_name(*runs, names=["layer.0.w", "layer.2.w"])
    assert torch.equal(runs[1][frozen][0], dict(named())[frozen].float())
    assert len(runs[1][frozen]) == 1


def test_without_names_the_index_over_all_groups_is_the_name():
    params = named()
    bare = hs.AdamW([{"params": [params[0][1]]}, {"params": [p for _, p in params[1:]]}], lr=1e-2)
    step_named(params, bare)
    copies = [(str(i), p) for i, (_, p) in enumerate(named())]
    told = hs.AdamW(copies, lr=1e-2)
    step_named([(params[i][0], p) for i, (_, p) in enumerate(copies)], told)
    assert_same_snapshots(snapshot(bare), snapshot(told))


def _equal_layers():
    """Return a model of four equal layers, whose gradients are equal too."""
    model = torch.nn.ModuleDict({f"layer{i}": torch.nn.Module() for i in range(4)})
    for layer in model.values():
        layer.weight = torch.nn.Parameter(torch.ones(4096, dtype=torch.bfloat16))
    sum((p.float() * 1e-2).sum() for p in model.parameters()).backward()
    return model


def _bare(model):
    """Return copies of its parameters that no module owns, with their gradients."""
    copies = [torch.nn.Parameter(p.detach().clone()) for p in model.parameters()]
    for x, p in zip(copies, model.parameters(), strict=True):
        x.grad = p.grad
    return copies


def _step(*optimizers):
    for optimizer in optimizers:
        optimizer.step()
    return [p for optimizer in optimizers for group in optimizer.param_groups for p in group["params"]]


def _of_each_parameter(model):
    return _step(*(hs.AdamW([p], lr=1e-3) for p in _bare(model)))


def _of_each_parameter_as_a_group(model):
    return _step(*(hs.AdamW([{"params": [p], "lr": 1e-3}]) for p in _bare(model)))


def _of_each_parameter_by_chains(model):
    links = hs.scale_by_adam(), hs.scale_by_learning_rate(1e-3), hs.round_stochastically()
    return _step(*(hs.Optimizer([p], hs.chain(*links)) for p in _bare(model)))


def _of_each_block(model):
    params = _bare(model)
    return _step(hs.AdamW(params[:2], lr=1e-3), hs.AdamW(params[2:], lr=1e-3))


def _of_each_layer_of_the_model(model):
    return _step(*(hs.AdamW(layer.parameters(), lr=1e-3) for layer in model.values()))


def _of_groups(model):
    return _step(hs.AdamW([{"params": [p]} for p in _bare(model)], lr=1e-3))


def _of_all_without_names(model):
    return _step(hs.AdamW(_bare(model), lr=1e-3))


def _of_a_model_by_name(model):
    return _step(hs.AdamW(model.named_parameters(), lr=1e-3))


def _of_a_model_that_is_searched(model):
    return _step(hs.AdamW(model.parameters(), lr=1e-3))


def _of_registered_names(model):
    hs.register_names(model, prefix="actor")
    return _step(*(hs.AdamW(layer.parameters(), lr=1e-3) for layer in model.values()))


def _from_a_text(model):
    return _step(*(hs.from_config("AdamW(lr=1e-3)")([p]) for p in _bare(model)))


def _by_the_factory_of_transformers(model):
    trainer = types.SimpleNamespace(get_decay_parameter_names=lambda self, model: [])
    with pytest.MonkeyPatch.context() as patch:
        patch.setitem(sys.modules, "transformers", types.SimpleNamespace(Trainer=trainer))
        return _step(hs.integrations.transformers()(model, lr=1e-3))


def _integration(patch, name, library, **members):
    """Import an integration beside a stand-in for its library: `make clients` has the library itself."""
    parts = library.split(".")
    for i in range(len(parts)):
        patch.setitem(sys.modules, ".".join(parts[: i + 1]), types.SimpleNamespace(**members))
    patch.delitem(sys.modules, f"halfstep_torch.integrations.{name}", raising=False)
    return importlib.import_module(f"halfstep_torch.integrations.{name}")


def _by_the_config_of_lerobot(model):
    register = staticmethod(lambda name: lambda kind: kind)
    config = type("OptimizerConfig", (), {"register_subclass": register})
    with pytest.MonkeyPatch.context() as patch:
        made = _integration(patch, "lerobot", "lerobot.optim.optimizers", OptimizerConfig=config)
    lists = {f"layer{i}": [p] for i, p in enumerate(_bare(model))}
    return _step(*made.HalfstepConfig(lr=1e-3).build(lists).values())


def _by_the_container_of_torchtitan(model):
    """Each stage of a pipeline has a model of its own, and groups by regular expressions, with names."""
    container = type("OptimizersContainer", (), {"Config": type("Config", (), {})})
    with pytest.MonkeyPatch.context() as patch:
        made = _integration(
            patch, "torchtitan", "torchtitan.components.optimizer", OptimizersContainer=container
        )
    factory = made.HalfstepOptimizers._resolve_optimizer_factory("AdamW")
    stages = [(f"{name}.weight", layer.weight) for name, layer in model.items()]
    return _step(*(factory([{"params": [p], "param_names": [name], "lr": 1e-3}]) for name, p in stages))


def _by_step_parameter(model):
    optimizers = [hs.AdamW([p], lr=1e-3) for p in _bare(model)]
    for optimizer in optimizers:
        for group in optimizer.param_groups:
            for i, p in enumerate(group["params"]):
                optimizer.step_parameter(p, group, i)
    return [optimizer.param_groups[0]["params"][0] for optimizer in optimizers]


def _by_released_gradients(model):
    params = _bare(model)
    optimizers = [hs.AdamW([p], lr=1e-3) for p in params]
    for p, optimizer in zip(params, optimizers, strict=True):
        p.grad = None
        hs.release_gradients(optimizer)
    sum((p.float() * 1e-2).sum() for p in params).backward()
    return params


def _by_a_wrapped_optimizer(model):
    rounded = [hs.round_weights(torch.optim.AdamW([p], lr=1e-3, weight_decay=0)) for p in _bare(model)]
    return _step(*rounded)


WAYS = [
    *(_of_each_parameter, _of_each_parameter_as_a_group, _of_each_parameter_by_chains, _of_each_block),
    *(_of_each_layer_of_the_model, _of_groups, _of_all_without_names, _of_a_model_by_name),
    *(_of_a_model_that_is_searched, _of_registered_names, _from_a_text, _by_the_factory_of_transformers),
    *(_by_the_config_of_lerobot, _by_the_container_of_torchtitan),
    *(_by_step_parameter, _by_released_gradients, _by_a_wrapped_optimizer),
]


@pytest.mark.parametrize("build", WAYS, ids=lambda way: way.__name__.strip("_"))
def test_layers_draw_noise_of_their_own_however_optimizers_are_built(build):
    """By one seed and one name for all, weights of equal layers were rounded by the same words."""
    params = build(_equal_layers())
    assert len(params) == 4
    noise = torch.stack([p.detach().float() for p in params])
    assert 0.2 < (noise != 1).float().mean() < 0.8  # an update of 1e-3 in a gap of 2^-8 or 2^-7
    # Of independent layers the correlation has a deviation of 1 / sqrt(n); 5 of these are a chance of 4e-6.
    correlations = torch.corrcoef(noise) - torch.eye(4)
    assert correlations.abs().max() < 5 / noise.shape[1] ** 0.5


def test_words_of_an_optimizer_without_names_are_saved_and_loaded():
    """Also into the first optimizer of another process, and with a seed of two words."""
    _, second = (hs.AdamW([torch.nn.Parameter(torch.ones(64).bfloat16())], lr=1e-3, seed=7) for _ in range(2))
    group_names._NAMELESS.clear()
    first = hs.AdamW([torch.nn.Parameter(torch.ones(64).bfloat16())], lr=1e-3, seed=7)
    first.load_state_dict(second.state_dict())
    copied = copy.deepcopy(second)
    runs = [optimizer.param_groups[0]["params"][0] for optimizer in (first, second, copied)]
    for optimizer in (first, second, copied):
        step_by_ones(optimizer)
    assert torch.equal(runs[0], runs[1])
    assert torch.equal(runs[0], runs[2])


def test_the_first_optimizer_without_names_and_named_ones_have_the_seed_itself():
    def seeds(params):
        return hs.AdamW(params, seed=7).state_dict()["param_groups"][0]["halfstep"]["seeds"]

    p = torch.nn.Parameter(torch.ones(2))
    bare, again, named = seeds([p]), seeds([p]), seeds([("w", p)])
    assert bare == named
    assert bare != again


def test_the_seed_and_only_the_seed_changes_the_noise():
    def run(seed):
        params = named()
        optimizer = hs.AdamW(params, lr=1e-4, seed=seed)
        step_named(params, optimizer)
        return snapshot(optimizer)

    assert_same_snapshots(run(5), run((0, 5)))
    assert any((a != b).any() for a, b in zip(run(5), run(6), strict=True))


def test_names_can_be_given_beside_the_parameters():
    params = named()
    told, beside = named(), named()
    step_named(told, hs.AdamW(told, lr=1e-2))
    optimizer = hs.AdamW([p for _, p in beside], lr=1e-2, names=beside)
    step_named(beside, optimizer)
    assert all(torch.equal(p, q) for (_, p), (_, q) in zip(told, beside, strict=True))
    assert optimizer.param_groups[0]["param_names"] == [name for name, _ in params]
    with pytest.raises(ValueError, match=r"^AdamW: a parameter of shape \(5, 4\) has no name in names"):
        hs.AdamW([params[0][1]], names=beside)
    with pytest.raises(TypeError, match=r"^AdamW: names holds Parameter, not pairs \(name, parameter\)"):
        hs.AdamW([params[0][1]], names=[params[0][1]])


def three(**options):
    params = {name: torch.nn.Parameter(torch.ones(40, dtype=torch.bfloat16)) for name in "abc"}
    return params, hs.AdamW(list(params.items()), lr=1e-2, **options)


def step_each(params, optimizer):
    for i, p in enumerate(params.values()):
        p.grad = torch.full_like(p, i + 1.0) if p.requires_grad else None
    optimizer.step()


def test_a_list_that_was_filtered_in_place_keeps_the_names_of_its_parameters():
    (frozen, ours), (filtered, other) = three(), three()
    for params, optimizer in ((frozen, ours), (filtered, other)):
        step_each(params, optimizer)
        params["a"].requires_grad_(False)
    other.param_groups[0]["params"] = [p for p in other.param_groups[0]["params"] if p.requires_grad]
    other.state.pop(filtered["a"])
    for params, optimizer in ((frozen, ours), (filtered, other)):
        step_each(params, optimizer)
    assert all(torch.equal(frozen[name], filtered[name]) for name in "abc")
    assert other.param_groups[0]["param_names"] == ["b", "c"]

    fresh, loaded = three()
    loaded.param_groups[0]["params"] = [fresh["b"], fresh["c"]]
    loaded.load_state_dict(other.state_dict())
    for name in "bc":
        assert torch.equal(loaded.state[fresh[name]]["exp_avg"], other.state[filtered[name]]["exp_avg"])
    misnamed = hs.AdamW([(name, torch.nn.Parameter(torch.ones(40).bfloat16())) for name in "ab"])
    with pytest.raises(ValueError, match=r"parameter 'a' is not in group 0 of the state dict"):
        misnamed.load_state_dict(other.state_dict())


def test_a_parameter_that_comes_back_into_its_list_has_its_name():
    params, optimizer = three()
    group = optimizer.param_groups[0]
    group["params"] = [params["c"]]
    step_each(params, optimizer)
    group["params"] = [params["c"], params["a"], params["b"]]
    step_each(params, optimizer)
    assert group["param_names"] == ["c", "a", "b"]


def test_a_tensor_in_the_place_of_a_parameter_has_its_name():
    """As accelerate replaces parameters for a device."""
    params, optimizer = three()
    replaced = torch.nn.Parameter(params["b"].detach().clone())
    optimizer.param_groups[0]["params"] = [params["a"], replaced, params["c"]]
    assert [name for name, _, _ in optimizer.plans()] == ["a", "b", "c"]


def test_what_was_put_into_a_list_of_the_optimizer_is_refused_before_a_step():
    params, optimizer = three()
    step_each(params, optimizer)
    before = snapshot(optimizer)
    optimizer.param_groups[0]["params"].append(torch.nn.Parameter(torch.ones(3)))
    with pytest.raises(ValueError, match=r"^AdamW: .* Use add_param_group"):
        optimizer.step()
    optimizer.param_groups[0]["params"] = list(params.values())
    optimizer.param_groups[1:] = []
    assert_same_snapshots(before, snapshot(optimizer))


STEPPED = {
    "AdamW": hs.AdamW,
    "near_float32": lambda params: hs.AdamW(params, recipe="near_float32"),
    "Lamb": hs.Lamb,
    "round_weights": lambda params: hs.round_weights(torch.optim.AdamW(params)),
}


@pytest.mark.parametrize("named", [True, False])
@pytest.mark.parametrize("make", STEPPED)
def test_a_replaced_parameter_goes_on_with_the_state_of_its_name(make, named):
    """As accelerate replaces parameters when it shards a model; moments and counts did start again."""
    runs = []
    for replaced in (False, True):
        pairs = [(name, torch.nn.Parameter(torch.ones(3, dtype=torch.bfloat16))) for name in "ab"]
        params = [p for _, p in pairs]
        optimizer = STEPPED[make](pairs if named else params)
        for step in range(4):
            if replaced and step == 2:
                params = [torch.nn.Parameter(p.detach().clone()) for p in params]
                optimizer.param_groups[0]["params"] = list(params)
            for i, p in enumerate(params):
                p.grad = torch.full_like(p, 1.0 + i + step)
            optimizer.step()
        assert set(optimizer.state) == set(params)
        optimizer.load_state_dict(optimizer.state_dict())
        runs.append(params)
    if named:  # others have other words, as they are a second optimizer
        assert all(map(torch.equal, *runs))


@pytest.mark.parametrize("make", STEPPED)
def test_state_of_a_parameter_that_was_replaced_by_none_is_told(make):
    params = [torch.nn.Parameter(torch.ones(3, dtype=torch.bfloat16)) for _ in "ab"]
    optimizer = STEPPED[make](params)
    step_by_ones(optimizer)
    optimizer.param_groups[0]["params"] = [torch.nn.Parameter(torch.ones(3, dtype=torch.bfloat16))]
    for _ in range(2):
        with pytest.raises(
            ValueError, match=r"group 0 were replaced, and the state of '1' belongs to no para"
        ):
            step_by_ones(optimizer)
    optimizer.state.pop(params[1])
    step_by_ones(optimizer)


def test_a_replaced_parameter_of_another_shape_starts_again_and_the_log_says_so(caplog):
    """As an embedding that grows."""
    p, grown = torch.nn.Parameter(torch.ones(3)), torch.nn.Parameter(torch.ones(4))
    optimizer = hs.AdamW([("a", p)])
    step_by_ones(optimizer)
    optimizer.param_groups[0]["params"][0] = grown
    step_by_ones(optimizer)
    assert "'a' was replaced by a parameter of another shape: its state starts again." in caplog.text
    assert set(optimizer.state) == {grown}


def test_a_frozen_and_an_added_parameter_are_no_replacement():
    a, b, c = (torch.nn.Parameter(torch.ones(3)) for _ in range(3))
    optimizer = hs.AdamW([("a", a), ("b", b)])
    step_by_ones(optimizer)
    optimizer.param_groups[0]["params"] = [b]
    optimizer.add_param_group({"params": [("c", c)]})
    step_by_ones(optimizer)
    assert [int(optimizer.state[p]["step"]) for p in (a, b, c)] == [1, 2, 1]


@pytest.mark.parametrize("named", [True, False])
def test_parameters_that_are_trained_in_turn_are_no_replacements(named):
    pairs = [(name, torch.nn.Parameter(torch.ones(3))) for name in "ab"]
    params = [p for _, p in pairs]
    optimizer = hs.AdamW(pairs if named else params)
    for step in range(6):
        optimizer.param_groups[0]["params"] = [params[step % 2]] if step else list(params)
        step_by_ones(optimizer)
    assert [int(optimizer.state[p]["step"]) for p in params] == [3, 4]

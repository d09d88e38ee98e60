"""Parameters that come without names get those of a registered model, or of the module that owns them."""

import functools
import gc
import logging

import pytest
import torch
from torch import nn

import halfstep_torch as hs
from halfstep_torch import say_once
from halfstep_torch.leaves import found_names

NAMES = ["0.weight", "0.bias", "1.weight", "1.bias"]


@pytest.fixture(autouse=True)
def _nothing_is_registered():
    for known in (found_names._REGISTERED, found_names._TABLES, found_names._FOUND):
        known.clear()
    say_once.say_once.cache_clear()


def net(seed=0):
    torch.manual_seed(seed)
    return nn.Sequential(nn.Linear(16, 32), nn.Linear(32, 16)).to(torch.bfloat16)


def names_in(optimizer):
    return [name for group in optimizer.param_groups for name in group.get("param_names", [None])]


def weights_after(model, optimizer, steps=2):
    for step in range(steps):
        x = torch.randn(4, 16, generator=torch.Generator().manual_seed(step)).bfloat16()
        model(x).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()
    return [p.detach().clone() for p in model.parameters()]


@pytest.mark.parametrize("registered", [False, True])
@pytest.mark.parametrize("make", [hs.AdamW, hs.Muon, hs.SGD, hs.Adafactor])
def test_without_names_a_step_has_the_bits_of_named_parameters(make, registered):
    told, bare = net(), net()
    if registered:
        hs.register_names(bare)
    wanted = weights_after(told, make(told.named_parameters(), lr=1e-3))
    got = weights_after(bare, make(bare.parameters(), lr=1e-3))
    assert all(torch.equal(a, b) for a, b in zip(got, wanted, strict=True))


@pytest.mark.parametrize("way", ["groups", "keyword", "list", "one at a time", "reversed"])
def test_the_order_and_the_groups_of_bare_parameters_change_no_bit(way):
    told, bare = net(), net()
    wanted = weights_after(told, hs.AdamW(told.named_parameters(), lr=1e-3))
    params = list(bare.parameters())
    if way == "one at a time":
        optimizers = [hs.AdamW([p], lr=1e-3) for p in params]
        assert [names_in(optimizer) for optimizer in optimizers] == [[name] for name in NAMES]
        for step in range(2):
            x = torch.randn(4, 16, generator=torch.Generator().manual_seed(step)).bfloat16()
            bare(x).square().mean().backward()
            for optimizer in optimizers:
                optimizer.step(zero_grad=True)
        got = [p.detach() for p in params]
    else:
        groups = [{"params": iter(params[2:])}, {"params": params[0]}, {"params": [params[1]], "lr": 1e-3}]
        given = {"groups": groups, "list": params, "reversed": params[::-1], "keyword": bare.parameters()}
        got = weights_after(bare, hs.AdamW(params=given[way], lr=1e-3))
    assert all(torch.equal(a, b) for a, b in zip(got, wanted, strict=True))


def test_names_of_the_caller_win():
    model = net()
    hs.register_names(model)
    pairs = [(f"mine.{name}", p) for name, p in model.named_parameters()]
    assert names_in(hs.AdamW(pairs))[0] == "mine.0.weight"
    assert names_in(hs.AdamW(model.parameters(), names=pairs))[0] == "mine.0.weight"
    group = {"params": list(model.parameters()), "param_names": [f"mine.{name}" for name in NAMES]}
    assert names_in(hs.AdamW([group]))[0] == "mine.0.weight"


class PeftModel(nn.Module):
    """As PEFT's: the model is two levels down."""

    def __init__(self, model):
        super().__init__()
        self.base_model = nn.Module()
        self.base_model.model = model

    def get_base_model(self):
        return self.base_model.model


def distributed(model):
    wrapper = nn.Module()
    wrapper.module = model
    return wrapper


WRAPPERS = {
    "peft": PeftModel,
    "compiled": functools.partial(torch.compile, backend="eager"),
    "distributed": distributed,
    "data parallel": nn.DataParallel,
    "all": lambda model: torch.compile(distributed(PeftModel(model)), backend="eager"),
}


@pytest.mark.parametrize("registered", [False, True])
@pytest.mark.parametrize("wrapper", WRAPPERS)
def test_names_are_those_of_the_model_in_a_wrapper(wrapper, registered):
    model = WRAPPERS[wrapper](net())
    if registered:
        hs.register_names(model)
    assert names_in(hs.AdamW(model.parameters())) == NAMES


def test_a_model_that_was_registered_before_it_was_wrapped_or_changed_keeps_its_names():
    model = net()
    hs.register_names(model)
    wrapped = nn.ModuleDict({"inner": torch.compile(model, backend="eager")})
    assert names_in(hs.AdamW(wrapped.parameters())) == NAMES
    model[0].weight = nn.Parameter(model[0].weight.detach().clone())  # as fully_shard replaces parameters
    assert names_in(hs.AdamW(wrapped.parameters())) == NAMES


def test_parts_of_a_model_have_the_names_of_the_whole(caplog):
    model = nn.ModuleDict({"body": net(), "head": nn.Linear(16, 2)})
    with caplog.at_level(logging.INFO):
        optimizer = hs.AdamW(model["body"].parameters())
    assert names_in(optimizer) == [f"body.{name}" for name in NAMES]
    [said] = caplog.messages
    assert said.startswith(
        "AdamW: the parameters have the names of ModuleDict, the outermost module that owns"
    )
    optimizer.add_param_group({"params": model["head"].parameters()})
    assert names_in(optimizer)[-2:] == ["head.weight", "head.bias"]


def test_a_group_that_nobody_owns_is_refused_beside_named_ones():
    model = net()
    optimizer = hs.AdamW(model.parameters())
    with pytest.raises(ValueError, match=r"^AdamW: a parameter of shape \(3,\) of a new group has no name"):
        optimizer.add_param_group({"params": [nn.Parameter(torch.ones(3))]})
    optimizer.add_param_group({"params": [("scale", nn.Parameter(torch.ones(3)))]})
    assert names_in(optimizer)[-1] == "scale"


def log_of(caplog, params):
    optimizer = hs.AdamW(params)
    assert names_in(optimizer) == [None]
    return " ".join(caplog.messages)


def test_two_models_whose_names_clash_have_no_names_and_the_log_says_so(caplog):
    actor, critic = net(), net()
    said = log_of(caplog, [*actor.parameters(), *critic.parameters()])
    assert "AdamW: two models have a parameter '0.weight', so the parameters have no names." in said
    assert "register_names(model, prefix=...)" in said
    hs.register_names(actor, prefix="actor")
    hs.register_names(critic, prefix="critic")
    optimizer = hs.AdamW([*actor.parameters(), *critic.parameters()])
    assert names_in(optimizer) == [f"{model}.{name}" for model in ("actor", "critic") for name in NAMES]
    hs.register_names(critic, prefix="actor")
    with pytest.raises(ValueError, match=r"'actor.0.weight' and 'actor.0.weight' have the same name"):
        hs.AdamW([*actor.parameters(), *critic.parameters()])


def test_two_models_with_other_names_have_them():
    image, text = nn.ModuleDict({"image": net()}), nn.ModuleDict({"text": net()})
    optimizer = hs.AdamW([{"params": image.parameters()}, {"params": text.parameters()}])
    assert names_in(optimizer) == [f"{kind}.{name}" for kind in ("image", "text") for name in NAMES]


def test_a_parameter_that_two_models_own_has_no_name_and_the_log_says_so(caplog):
    trunk = net()
    one, other = nn.ModuleDict({"a": trunk}), nn.ModuleDict({"b": trunk})
    said = log_of(caplog, trunk.parameters())
    assert "0.weight' of ModuleDict is '" in said
    hs.register_names(one)
    assert names_in(hs.AdamW(trunk.parameters()))[0] == "a.0.weight"
    hs.register_names(other)
    with pytest.raises(ValueError, match=r"is 'a.0.weight' in one model of register_names and 'b.0.weight'"):
        hs.AdamW(trunk.parameters())


def test_a_parameter_that_no_module_owns_has_no_name(caplog):
    model, alone = net(), nn.Parameter(torch.ones(3))
    said = log_of(caplog, [*model.parameters(), alone])
    assert "AdamW: a parameter of shape (3,) is in no module, so the parameters have no names." in said
    caplog.clear()
    assert log_of(caplog, [alone]) == ""
    hs.register_names(model)
    with pytest.raises(ValueError, match=r"a parameter of shape \(3,\) is in no model of register_names"):
        hs.AdamW([*model.parameters(), alone])
    assert names_in(hs.AdamW([alone])) == [None]
    with pytest.raises(ValueError, match=r"^Muon: a parameter of shape \(3,\) has no name"):
        hs.Muon([alone])


def test_only_models_are_registered():
    with pytest.raises(TypeError, match=r"^register_names: 3 is no module\. Pass register_names\(model\)"):
        hs.register_names(3)
    with pytest.raises(TypeError, match=r"^register_names: 3 is no text"):
        hs.register_names(net(), 3)


def test_nothing_keeps_a_model_alive():
    import weakref

    models = [net(), net()]
    hs.register_names(models[0])
    for model in models:
        hs.AdamW(model.parameters())
    left = [weakref.ref(model) for model in models]
    del model, models
    gc.collect()
    assert [reference() for reference in left] == [None, None]


def test_sums_of_gradients_have_the_words_of_names_too():
    told, bare = net(), net()
    for model, params in ((told, told.named_parameters()), (bare, bare.parameters())):
        handle = hs.accumulate_gradients(params)
        for step in range(3):
            x = torch.randn(4, 16, generator=torch.Generator().manual_seed(step)).bfloat16()
            model(x).square().mean().backward()
        handle.remove()
    assert all(torch.equal(a.grad, b.grad) for a, b in zip(told.parameters(), bare.parameters(), strict=True))


class Holder(nn.Module):
    """Which holds itself, so that it waits for the garbage collector once it is dropped."""

    def __init__(self, *models):
        super().__init__()
        self.students = nn.ModuleList(models)
        self.me = [self]


@pytest.mark.parametrize("count", [1, 2])
def test_a_dropped_module_that_is_not_collected_yet_names_nothing(count):
    models = [
        nn.Sequential(nn.Linear(3, 3)) if count == 1 else nn.ModuleDict({f"m{i}": nn.Linear(3, 3)})
        for i in range(count)
    ]
    holder = Holder(*models)
    params = [param for model in models for param in model.parameters()]
    gc.disable()
    try:
        del holder
        names = names_in(hs.AdamW(params))
    finally:
        gc.enable()
    assert names == [name for model in models for name, _ in model.named_parameters()]


def test_a_warning_names_the_module_that_was_chosen_where_an_inner_one_has_other_names(caplog):
    model = net()
    holder = Holder(model)
    for _ in range(2):
        assert names_in(hs.AdamW(model.parameters()))[0] == "students.0.0.weight"
    [warning] = caplog.messages
    assert "the parameters have the names of Holder, the outermost module that owns them, such as" in warning
    caplog.clear()
    hs.register_names(model)
    assert names_in(hs.AdamW(model.parameters())) == NAMES
    assert not caplog.messages
    del holder


def test_models_that_are_frozen_for_a_fork_are_not_found_and_the_log_says_so(caplog):
    model = net()
    gc.freeze()
    try:
        optimizer = hs.AdamW(model.parameters())
        assert names_in(optimizer) == [None]
        weights_after(model, optimizer, steps=1)
        hs.register_names(model)
        assert names_in(hs.AdamW(model.parameters())) == NAMES
    finally:
        gc.unfreeze()
    [warning] = caplog.messages
    assert "register_names(model) before. Models from before gc.freeze() are not found." in warning


def test_one_search_finds_the_names_of_all_models_that_are_alive(monkeypatch):
    models, searches, search = [net() for _ in range(5)], [], found_names._search
    monkeypatch.setattr(found_names, "_search", lambda: [searches.append(1), search()])
    for model in models:
        assert names_in(hs.AdamW(model.parameters())) == NAMES
    assert len(searches) == 1


@pytest.mark.parametrize("registered", [False, True])
def test_parameters_whose_names_were_found_can_be_swapped(registered):
    """As `Module.to` does with a model of FSDP2: a tensor with a weak reference cannot be."""
    model = net()
    if registered:
        hs.register_names(model)
    optimizers = [hs.AdamW(model.parameters())]
    optimizers.append(hs.round_weights(torch.optim.SGD(model.parameters(), lr=1e-3)))
    for dtype in (torch.bfloat16, torch.float32, torch.bfloat16):
        torch.__future__.set_swap_module_params_on_conversion(True)
        try:
            model.to(dtype)
        finally:
            torch.__future__.set_swap_module_params_on_conversion(False)
        assert model[0].weight.dtype == dtype
        for optimizer in optimizers:
            optimizer.state.clear()
            for param in model.parameters():
                param.grad = torch.ones_like(param)
            optimizer.step()
            optimizer.zero_grad()


@pytest.mark.parametrize("registered", [False, True])
def test_the_way_out_for_a_tensor_in_no_module_is_a_pair(registered, caplog):
    model, alpha = net(), nn.Parameter(torch.zeros(()))
    if registered:
        hs.register_names(model)
        with pytest.raises(ValueError, match="is in no model of register_names") as error:
            hs.AdamW([*model.parameters(), alpha])
        said = str(error.value)
    else:
        said = log_of(caplog, [*model.parameters(), alpha])
    assert '[*model.named_parameters(), ("log_alpha", log_alpha)]' in said
    with pytest.raises(ValueError, match="some parameters have names, and others none") as error:
        hs.AdamW([*model.named_parameters(), alpha])
    assert '("log_alpha", log_alpha)' in str(error.value)
    optimizer = hs.AdamW([*model.named_parameters(), ("log_alpha", alpha)])
    assert names_in(optimizer) == [*NAMES, "log_alpha"]

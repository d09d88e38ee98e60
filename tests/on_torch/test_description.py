"""`describe` and `memory_report` say what a step then does: bytes are counted in the state itself."""

import pytest
import torch

import halfstep_torch as hs


def model(dtype=torch.bfloat16):
    layers = {
        "embedding": torch.nn.Embedding(40, 128),
        "norm": torch.nn.LayerNorm(128),
        "out": torch.nn.Linear(128, 64, bias=False),
    }
    layers["norm"].to(torch.float32)
    built = torch.nn.ModuleDict({name: layer.to(dtype) for name, layer in layers.items()})
    built["norm"].float()
    return built


SETTINGS = {
    "default": (hs.AdamW, {}),
    "8 bits": (hs.AdamW, hs.recipes.eight_bit),
    "4 bits": (hs.AdamW, hs.recipes.four_bit),
    "split": (hs.AdamW, hs.recipes.full_precision),
    "lion": (hs.Lion, {"mu_dtype": hs.codebook("dynamic4"), "param_storage": "compensated"}),
    "lamb16": (hs.Lamb16, {"param_storage": "master"}),
    "sgd": (hs.SGD, {}),
    "stored": (
        lambda params: hs.Optimizer(
            params,
            hs.chain(
                hs.store_state(hs.scale_by_adam(), hs.scaled("float16")), hs.scale_by_learning_rate(0.1)
            ),
        ),
        {},
    ),
}


@pytest.mark.parametrize("name", SETTINGS)
def test_the_bytes_are_those_of_the_state_after_a_step(name):
    make, options = SETTINGS[name]
    net = model()
    optimizer = make(net.named_parameters(), **options)
    described, reported = hs.describe(optimizer), hs.memory_report(net, optimizer)
    for p in net.parameters():
        p.grad = torch.ones_like(p)
    optimizer.step()
    for leaf, p in zip(described.leaves, net.parameters(), strict=True):
        state = optimizer.state[p]
        assert leaf.state_bytes == sum(x.numel() * x.element_size() for x in state.values()), leaf.name
        assert set(leaf.moments) <= set(state)
    assert reported.all.state == sum(leaf.state_bytes for leaf in described.leaves)
    assert reported.all.weights == sum(p.numel() * p.element_size() for p in net.parameters())
    assert hs.describe(optimizer) == described
    assert hs.memory_report(net, optimizer) == reported


def test_what_a_parameter_does_not_get_has_its_reason():
    small = torch.nn.Parameter(torch.ones(10, 10, dtype=torch.bfloat16))
    flat = torch.nn.Parameter(torch.ones(5000, dtype=torch.bfloat16))
    wide = torch.nn.Parameter(torch.ones(64, 128))
    optimizer = hs.AdamW(
        [("small", small), ("flat", flat), ("wide", wide)], mu_dtype=hs.scaled("int8"), nu_dtype="bfloat16"
    )
    leaves = {leaf.name: leaf for leaf in hs.describe(optimizer).leaves}
    assert leaves["small"].moments["exp_avg"].format == "float32"
    assert leaves["small"].moments["exp_avg"].why == "100 elements are fewer than min_size=4096"
    assert leaves["flat"].moments["exp_avg"].why == "1 axis is fewer than min_ndim=2"
    assert leaves["wide"].moments["exp_avg"].format == "int8, blocks of 128"
    assert leaves["wide"].moments["exp_avg_sq"].rounding == "stochastic"
    assert (leaves["small"].storage, leaves["small"].why) == ("round_stochastically", "")
    assert leaves["wide"].why == "float32 weights need no round_stochastically"
    text = str(hs.describe(optimizer))
    assert len(text.splitlines()) == 4
    assert "exp_avg float32, exact" in text


def test_groups_and_what_is_not_stepped_are_counted_apart():
    net = model()
    groups = [
        {"params": list(net["out"].named_parameters())},
        {"params": [("e", net["embedding"].weight)], "param_storage": "split16"},
    ]
    report = hs.memory_report(net, hs.AdamW(groups))
    assert [group.name for group in report.groups] == ["group 0", "group 1", "not stepped"]
    out, embedding, norm = report.groups
    assert (out.total - 8) / out.params == 2 + 2 + 4
    assert (embedding.total - 8) / embedding.params == 2 + 2 + 2 + 8
    assert (norm.state, norm.weights, norm.float32_adamw) == (0, 4 * 256, 4 * 256)
    assert report.all.float32_adamw == 16 * (out.params + embedding.params) + 4 * 256
    assert "not stepped" in str(report)


def test_a_model_on_the_meta_device_is_counted():
    net = torch.nn.Linear(1 << 16, 1 << 16, bias=False, dtype=torch.bfloat16, device="meta")
    report = hs.memory_report(net, hs.AdamW(net.named_parameters(), **hs.recipes.sixteen_bit))
    assert report.all.total == 8 * 2**32 + 8
    assert "32.00 GiB" in str(report)


@pytest.mark.parametrize("call", [hs.describe, lambda x: hs.memory_report(torch.nn.Linear(1, 1), x)])
def test_another_optimizer_is_refused(call):
    with pytest.raises(TypeError, match=r"optimizer is SGD\. Pass a halfstep_torch optimizer\.$"):
        call(torch.optim.SGD([torch.nn.Parameter(torch.ones(1))]))


def test_the_repr_has_the_entries_of_every_group_and_no_names():
    optimizer = hs.SGD([("a.b", torch.nn.Parameter(torch.ones(1)))], lr=0.5)
    optimizer.add_param_group({"params": [("c", torch.nn.Parameter(torch.ones(1)))], "lr": 0.25})
    assert ["lr: 0.5" in repr(optimizer), "lr: 0.25" in repr(optimizer)] == [True, True]
    assert "a.b" not in repr(optimizer)
    assert "spec_version" not in repr(optimizer)


def test_frozen_parameters_have_no_state_and_none_is_counted():
    net = model().requires_grad_(False)
    net["out"].requires_grad_(True)
    optimizer = hs.AdamW(net.named_parameters())
    for p in net["out"].parameters():
        p.grad = torch.zeros_like(p)
    report = hs.memory_report(net, optimizer)
    optimizer.step()
    kept = sum(x.nbytes for state in optimizer.state.values() for x in state.values())
    assert report.all.state == hs.memory_report(net, optimizer).all.state == kept
    trained = sum(p.numel() for p in net["out"].parameters())
    assert report.all.float32_adamw == 4 * report.all.params + 12 * trained
    frozen = [leaf for leaf in hs.describe(optimizer).leaves if not leaf.name.startswith("out/")]
    assert {(leaf.state_bytes, leaf.why) for leaf in frozen} == {(0, "requires_grad is False")}

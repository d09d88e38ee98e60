"""`describe` and `memory_report` say what a step then does: bytes are counted in the state itself."""

import pytest
import torch

import halfstep_torch as hs
from on_torch.steps import step_by_ones


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
    "lion": (hs.Lion, {"mu_dtype": hs.codebook("dynamic8"), "param_storage": "compensated"}),
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
    names = [name for name, _ in net.named_parameters()]
    step_by_ones(optimizer)
    for name, p in zip(names, net.parameters(), strict=True):
        weight, *kept = [row for row in described.arrays if row.leaf == name]
        arrays = {key: x for key, x in optimizer.state[p].items() if key != "step"}
        assert weight.name == "weight"
        assert sum(row.nbytes for row in kept) == sum(x.numel() * x.element_size() for x in arrays.values())
        assert {row.name for row in kept} == {key for key in arrays if not key.endswith("_scale")}
    held = (x for state in optimizer.state.values() for x in state.values())
    assert reported.state == sum(x.numel() * x.element_size() for x in held)
    assert reported.nbytes["weights"] == sum(p.numel() * p.element_size() for p in net.parameters())
    assert hs.describe(optimizer) == described
    assert hs.memory_report(net, optimizer) == reported


def test_what_a_parameter_does_not_get_has_its_reason():
    small = torch.nn.Parameter(torch.ones(10, 10, dtype=torch.bfloat16))
    flat = torch.nn.Parameter(torch.ones(5000, dtype=torch.bfloat16))
    wide = torch.nn.Parameter(torch.ones(64, 128))
    optimizer = hs.AdamW(
        [("small", small), ("flat", flat), ("wide", wide)], mu_dtype=hs.scaled("int8"), nu_dtype="bfloat16"
    )
    found = hs.describe(optimizer)
    asked = "asked for int8, blocks of 128, but"
    assert found.of("small", "exp_avg").format == "float32"
    assert found.of("small", "exp_avg").why == f"{asked} 100 elements are fewer than min_size=4096"
    assert found.of("flat", "exp_avg").why == f"{asked} 1 axis is fewer than min_ndim=2"
    assert found.of("wide", "exp_avg").format == "int8, blocks of 128"
    assert found.of("wide", "exp_avg_sq").rounding == "stochastic"
    assert (found.of("small").rounding, found.of("small").why) == ("stochastic", "round_stochastically")
    assert (found.of("wide").rounding, found.of("wide").why) == ("none", "float32 weights pass through")
    assert "small  [10, 10]" in str(found).splitlines()
    with pytest.raises(KeyError, match="There is no momentum of 'wide'"):
        found.of("wide", "momentum")


def test_groups_and_what_is_not_stepped_are_counted_apart():
    net = model()
    groups = [
        {"params": list(net["out"].named_parameters())},
        {"params": [("e", net["embedding"].weight)], "param_storage": "split16"},
    ]
    report = hs.memory_report(net, hs.AdamW(groups))
    assert list(report.parts) == ["group 0", "group 1", "not stepped"]
    out, embedding, norm = report.parts.values()
    assert (out.total - 8) / out.size == 2 + 2 + 4
    assert (embedding.total - 8) / embedding.size == 2 + 2 + 2 + 8
    assert (norm.state, norm.nbytes["weights"], norm.float32) == (0, 4 * 256, 4 * 256)
    assert report.float32 == 16 * (out.size + embedding.size) + 4 * 256
    assert "not stepped" in str(report)


def test_a_model_on_the_meta_device_is_counted():
    net = torch.nn.Linear(1 << 16, 1 << 16, bias=False, dtype=torch.bfloat16, device="meta")
    report = hs.memory_report(net, hs.AdamW(net.named_parameters(), **hs.recipes.sixteen_bit))
    assert report.total == 8 * 2**32 + 8
    assert "34.36 GB" in str(report)
    assert "It saves 34.36 GB: 50% of AdamW in float32." in str(report)


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
    assert report.state == hs.memory_report(net, optimizer).state == kept
    trained = sum(p.numel() for p in net["out"].parameters())
    assert report.float32 == 4 * report.size + 12 * trained
    frozen = [row for row in hs.describe(optimizer).arrays if not row.leaf.startswith("out.")]
    assert {(row.name, row.why) for row in frozen} == {("weight", "requires_grad is False")}


class Power(hs.Rule):
    """A rule with an operation that has no generated form where its number is none of Python's."""

    exponent: float = hs.number(0.75)

    def update(self, g, p, n, m, op):
        return op.sign(g) * op.power(op.abs(g), n.exponent)


class ByHost(hs.Rule):
    """A rule that asks for a number of an array, which a graph has not."""

    def update(self, g, p, n, m, op):
        return op.apply(lambda x: x * float(x.reshape(-1)[0] * 0 + 2), g)


@pytest.mark.parametrize(("rule", "operation"), [(Power(), "pow"), (ByHost(), "float")])
@pytest.mark.parametrize("clipped", [False, True])
def test_the_operation_without_a_generated_form_is_named_before_the_first_step(rule, operation, clipped):
    first = [hs.clip_by_global_norm(1.0)] if clipped else []
    tx = hs.chain(*first, rule, hs.scale_by_learning_rate(0.1), hs.round_stochastically())
    ends = []
    for compile in (False, True):
        p = torch.nn.Parameter(torch.linspace(1, 2, 300).bfloat16())
        optimizer = hs.Optimizer([("w", p)], tx, compile=compile)
        why = "round_stochastically" + compile * (
            f"; plain steps, as there is no generated form of {operation}"
        )
        assert hs.describe(optimizer).of("w").why == why
        step_by_ones(optimizer)
        ends.append(p.detach())
    assert torch.equal(*ends)


def test_a_rule_of_ones_own_with_a_kernel_has_no_such_reason():
    class Root(hs.Rule):
        def update(self, g, p, n, m, op):
            return op.sqrt(op.abs(g))

    tx = hs.chain(Root(), hs.scale_by_learning_rate(0.1), hs.round_stochastically())
    optimizer = hs.Optimizer([("w", torch.nn.Parameter(torch.ones(9).bfloat16()))], tx)
    assert hs.describe(optimizer).of("w").why == "round_stochastically"

"""Muon: what it steps and what AdamW does, that the split is printed, and what is refused."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import torch

import halfstep_jax
import halfstep_torch
from halfstep.rules import muon_split
from on_torch.steps import by_muon, step_by_ones

NAMES = {
    "embed_tokens/weight": False,
    "patch_embedding/kernel": False,
    "wte/weight": False,
    "lm_head/weight": False,
    "head/weight": False,
    "blocks/0/multihead/kernel": True,
    "blocks/0/overhead/kernel": True,
    "blocks/0/query/kernel": True,
}


def torch_split(named, **options) -> dict[str, bool]:
    """Return of every leaf whether Muon steps it."""
    return by_muon(halfstep_torch.Muon(named, **options))


@pytest.mark.parametrize("name", NAMES)
def test_embeddings_and_heads_go_to_adamw_by_their_names(name):
    params = {name: jnp.ones((4, 4)), "hidden": jnp.ones((4, 4)), "bias": jnp.ones(4)}
    labels = halfstep_jax.muon_labels(params)
    assert labels == {name: "muon" if NAMES[name] else "adamw", "hidden": "muon", "bias": "adamw"}
    named = [(leaf, torch.nn.Parameter(torch.ones(x.shape))) for leaf, x in params.items()]
    assert torch_split(named) == {leaf: label == "muon" for leaf, label in labels.items()}


def test_tied_weights_go_to_adamw_where_both_names_are_given():
    model = torch.nn.Sequential(torch.nn.Linear(4, 4, False), torch.nn.Linear(4, 4, False))
    model.append(torch.nn.Linear(4, 4, False))
    model[2].weight = model[0].weight
    names = list(model.named_parameters(remove_duplicate=False))
    assert torch_split(model.named_parameters(), names=names) == {"2.weight": False, "1.weight": True}


@pytest.mark.parametrize(
    "matrices",
    [
        {"embed": True, "a/*": False},
        lambda name, x: {"embed": True}.get(name, None if name == "b" else not name.startswith("a/")),
    ],
    ids=["patterns", "function"],
)
def test_a_predicate_overrides_the_names(matrices):
    params = {"embed": jnp.ones((4, 4)), "a": {"x": jnp.ones((4, 4))}, "b": jnp.ones((4, 4))}
    labels = {"embed": "muon", "a": {"x": "adamw"}, "b": "muon"}
    assert halfstep_jax.muon_labels(params, matrices) == labels
    named = [(name, torch.nn.Parameter(torch.ones(4, 4))) for name in ("embed", "a.x", "b")]
    assert torch_split(named, matrices=matrices) == {"embed": True, "a.x": False, "b": True}


def test_declared_axes_step_stacks_and_convolutions():
    params = {"layers": jnp.ones((3, 4, 8)), "conv": jnp.ones((3, 3, 4, 8)), "w": jnp.ones((4, 4))}
    axes = {"layers": halfstep_jax.MatrixAxes(1, 2), "conv": halfstep_jax.MatrixAxes((0, 1, 2), 3)}
    tx = halfstep_jax.muon(1.0, matrices=axes, mu_dtype="float32")
    updates, _ = jax.jit(tx.update)(params, tx.init(params), params)
    for layer in updates["layers"]:
        np.testing.assert_allclose(layer, updates["layers"][0], rtol=1e-5)
    assert halfstep_jax.muon_labels(params)["conv"] == "adamw"
    p = torch.nn.Parameter(torch.ones(8, 4, 3, 3))
    declared = {"conv/weight": halfstep_torch.MatrixAxes((1, 2, 3), 0)}
    assert torch_split([("conv.weight", p)], matrices=declared) == {"conv.weight": True}


SCANNED = {
    "layers/kernel": (3, 4, 5),
    "layers/bias": (3, 5),
    "layers/ln/scale": (3, 5),
    "layers/RMSNorm_0/weight": (3, 5),
    "layers/shift": (3, 5),
    "head_norm/kernel": (4, 4),
    "dense/kernel": (3, 4),
}


def test_stacked_biases_and_scales_are_no_matrices():
    params = {name: jnp.ones(shape) for name, shape in SCANNED.items()}
    kernel = {"layers/kernel": halfstep_jax.MatrixAxes(1, 2)}
    labels = halfstep_jax.muon_labels(params, kernel)
    assert {name for name, label in labels.items() if label != "adamw"} == {"layers/kernel", "dense/kernel"}
    assert halfstep_jax.muon_labels(params, {"layers/*": False})["layers/kernel"] == "adamw"
    named = [(name, torch.nn.Parameter(torch.ones(shape))) for name, shape in SCANNED.items()]
    stepped = torch_split(named, matrices={"layers/kernel": halfstep_torch.MatrixAxes(2, 1)})
    assert stepped == {name: label != "adamw" for name, label in labels.items()}


def test_a_kernel_in_a_stack_of_layers_is_refused_until_it_is_said_what_it_is():
    params = {name: jnp.ones(shape) for name, shape in SCANNED.items()}
    with pytest.raises(ValueError, match="muon: 'layers/kernel'") as caught:
        halfstep_jax.muon(1e-3).init(params)
    assert str(caught.value) == (
        "muon: 'layers/kernel' [3, 4, 5] is in a stack of 3 layers, as 'layers/RMSNorm_0/weight' shows, and "
        "which axes span its matrices is not known. Say matrices={'layers/kernel': MatrixAxes(1, 2)}, inputs "
        "and outputs, or False for AdamW."
    )
    named = [(name, torch.nn.Parameter(torch.ones(shape))) for name, shape in SCANNED.items()]
    with pytest.raises(ValueError, match=r"MatrixAxes\(2, 1\)"):
        halfstep_torch.Muon(named)
    # Flax's attention: heads are no layers, and its bias has two axes.
    heads = {
        "q": {"kernel": jnp.ones((16, 4, 8)), "bias": jnp.ones((4, 8))},
        "o": {"kernel": jnp.ones((4, 8, 16))},
    }
    assert set(jax.tree.leaves(halfstep_jax.muon_labels({"attn": heads, "w": jnp.ones((4, 4))}))) == {
        "adamw",
        "muon",
    }


def test_the_split_is_printed(caplog):
    muon_split._say.cache_clear()
    params = {"embed": jnp.ones((5, 7)), "w": jnp.ones((7, 7)), "b": jnp.ones(7)}
    halfstep_jax.muon(1e-3).init(params)
    (record,) = caplog.records
    table = record.getMessage().splitlines()
    assert [line.split() for line in table[2:]] == [
        ["b", "[7]", "AdamW", "1", "axis"],
        ["embed", "[5,", "7]", "AdamW", "an", "embedding,", "by", "its", "name"],
        ["w", "[7,", "7]", "Muon", "a", "matrix", "between", "layers"],
    ]
    caplog.clear()
    halfstep_torch.Muon([("a", torch.nn.Parameter(torch.ones(7, 7)))])
    assert "a     [7, 7]  Muon" in caplog.text


def test_each_part_has_its_own_settings_and_chain():
    named = [("w", torch.nn.Parameter(torch.ones(4, 4))), ("b", torch.nn.Parameter(torch.ones(4)))]
    optimizer = halfstep_torch.Muon(named, lr=0.02, adam_lr=1e-3, adam_weight_decay=0.0, betas=(0.8, 0.9))
    (group,) = optimizer.param_groups
    assert (group["lr"], group["weight_decay"], group["momentum"]) == (0.02, 0.1, 0.95)
    assert (group["adam_lr_ratio"], group["adam_weight_decay"], group["betas"]) == (0.05, 0.0, (0.8, 0.9))
    step_by_ones(optimizer)
    assert optimizer.state[named[0][1]].keys() == {"step", "momentum_buffer"}
    assert optimizer.state[named[1][1]].keys() == {"step", "exp_avg", "exp_avg_sq"}
    # Adam's first step is lr long; Muon's factor of a matrix of ones is the matrix over its norm, about.
    np.testing.assert_allclose(named[1][1].detach(), 1 - 1e-3, rtol=1e-6)
    groups = halfstep_torch.muon_groups([("w", named[0][1]), ("b", named[1][1])])
    assert [group["use_muon"] for group in groups] == [True, False]


@pytest.mark.parametrize("nesterov", [False, True])
def test_muon_s_own_switches_are_none_of_adamw_s_in_jax(nesterov):
    params = {"w": jnp.ones((4, 4)), "b": jnp.ones(4)}
    grads = {"w": jnp.ones((4, 4)), "b": jnp.arange(1.0, 5.0)}
    muon = halfstep_jax.muon(1e-3, nesterov=nesterov, bias_correction=not nesterov)
    adamw = halfstep_jax.adamw(1e-3, weight_decay=0.0)
    got, _ = jax.jit(muon.update)(grads, muon.init(params), params)
    want, _ = jax.jit(adamw.update)({"b": grads["b"]}, adamw.init({"b": params["b"]}), {"b": params["b"]})
    np.testing.assert_array_equal(got["b"], want["b"])


def of(shape):
    return {"w": jnp.zeros(shape)}


def jax_step(g, **options):
    tx = halfstep_jax.scale_by_muon(**options)
    return tx.update(g, tx.init(g))


def torch_step(shape, **options):
    p = torch.nn.Parameter(torch.zeros(shape))
    halfstep_torch.Optimizer([("w", p)], halfstep_torch.scale_by_muon(**options))


BAD = {
    "'w': shape (5,) is a vector": {"shape": (5,)},
    "'w': shape () is a scalar": {"shape": ()},
    "'w': shape (0, 5) has no elements": {"shape": (0, 5)},
    "'w': shape (2, 3, 4) has 3 axes": {"shape": (2, 3, 4)},
    "axis 3 is none of shape (2, 3)": {"shape": (2, 3), "output_axis": 4, "reduction_axis": 3},
    "reduction_axis=(0, 1) and output_axis=1 have an axis": {
        "shape": (2, 3, 4), "output_axis": 1, "reduction_axis": (0, 1)
    },
    "ns_steps=0 is outside 1 to 20. Use 5": {"ns_steps": 0},
    "ns_steps=21 is outside": {"ns_steps": 21},
    "ns_steps=True is outside": {"ns_steps": True},
    "coefficients (1, 2) are neither three numbers": {"ns_coeffs": (1, 2)},
    "have a slope at 0 that is not positive": {"ns_coeffs": (-1.0, 2.0, 0.0)},
    "coefficients (nan, 0.0, 0.0) have a slope": {"ns_coeffs": (float("nan"), 0.0, 0.0)},
    "1 of 5 steps with coefficients (10.0, 10.0, 10.0) take a singular value of 1 to 30": {
        "ns_coeffs": (10.0, 10.0, 10.0)
    },
    "2 of 5 steps with coefficients (1.0, -4.0, 0.0) take a singular value of 1 to 105": {
        "ns_coeffs": (1.0, -4.0, 0.0)
    },
    "coefficients have 2 rows for ns_steps=5": {"ns_coeffs": ((3.0, -3.0, 1.0),) * 2},
    "eps=0 is not a positive number": {"eps": 0},
    "ns_dtype='float16' is no dtype of the factor": {"ns_dtype": "float16"},
    "scale='spectral' is not a scale": {"scale": "spectral"},
    "beta=1.0": {"beta": 1.0},
}  # fmt: skip


@pytest.mark.parametrize("message", BAD)
def test_bad_arguments_are_refused_with_their_value_and_a_way_out(message):
    options = {"shape": (4, 4)} | BAD[message]
    shape = options.pop("shape")
    for step in (lambda: jax_step(of(shape), **options), lambda: torch_step(shape, **options)):
        with pytest.raises(ValueError) as error:  # noqa: PT011
            step()
        assert message.replace("beta", "") in str(error.value).replace("momentum", "").replace("beta", "")
        assert any(way in str(error.value) for way in ("Use ", "Step it", "Declare ", "Leave ", "Give "))


def test_a_split_that_cannot_be_meant_is_refused():
    named = [("w", torch.nn.Parameter(torch.ones(4, 4))), ("b", torch.nn.Parameter(torch.ones(4)))]
    params = {name: jnp.ones(p.shape) for name, p in named}
    for matrices, message in (
        ({"layers/*": True}, "matches no name of 'w', 'b'"),
        ({"w": False}, "no parameter of 'w', 'b' is a hidden matrix"),
        ({"b": True}, "'b': shape (4,) is a vector"),
        ({"w": halfstep_jax.MatrixAxes(1, 2)}, "'w': axis 2 is none of shape"),
    ):
        for split in (
            lambda m: halfstep_jax.muon_labels(params, m),
            lambda m: torch_split(named, matrices=m),
        ):
            with pytest.raises(ValueError) as error:  # noqa: PT011
                split(matrices)
            assert message in str(error.value).replace("'b', 'w'", "'w', 'b'")
    with pytest.raises(TypeError, match=r"use_muon='no' in a param group is neither.*Use False"):
        halfstep_torch.Muon([{"params": named, "use_muon": "no"}])
    with pytest.raises(TypeError, match="matrices gives 'muon' for 'b'"):
        halfstep_jax.muon_labels(params, lambda name, x: "muon")
    with pytest.raises(TypeError, match="neither a function of"):
        halfstep_jax.muon_labels(params, ["w"])
    with pytest.raises(ValueError, match=r"has no name.*Pass model.named_parameters.*give it names=list"):
        halfstep_torch.Muon([p for _, p in named])


@pytest.mark.parametrize("value", [np.inf, np.nan])
def test_a_gradient_that_is_not_finite_is_refused_by_leaf_before_anything_changes(value):
    named = [(name, torch.nn.Parameter(torch.ones(4, 4))) for name in ("a", "w")]
    optimizer = halfstep_torch.Muon(named)
    step_by_ones(optimizer)
    before = [p.detach().clone() for _, p in named] + [
        optimizer.state[p]["momentum_buffer"].clone() for _, p in named
    ]
    named[1][1].grad[2, 3] = value
    with pytest.raises(ValueError, match=r"gradient of 'w' has an infinity or a NaN.*Nothing was changed"):
        optimizer.step()
    after = [p for _, p in named] + [optimizer.state[p]["momentum_buffer"] for _, p in named]
    assert all(torch.equal(x, y) for x, y in zip(before, after, strict=True))
    g = {"a": jnp.ones((4, 4)), "w": jnp.ones((4, 4)).at[2, 3].set(value)}
    with pytest.raises(ValueError, match=r"gradient of 'w' has an infinity or a NaN.*skip_nonfinite"):
        jax_step(g)


FORMATS = {"float32": "float32", "float16": ("float16", 128, 0, 0), "int8": ("int8", 32, 0, 0)}


@pytest.mark.filterwarnings("ignore:.*too coarse for the factor")
@pytest.mark.parametrize("name", FORMATS)
def test_a_momentum_that_is_not_finite_is_refused_by_leaf_before_anything_changes(name):
    """A finite gradient cannot cure it: int8 says so in the scale of a block."""

    def fmt(package):
        return FORMATS[name] if name == "float32" else package.scaled(*FORMATS[name])

    p = torch.nn.Parameter(torch.ones(4, 64))
    optimizer = halfstep_torch.Muon([("w", p)], mu_dtype=fmt(halfstep_torch))
    step_by_ones(optimizer)
    state = optimizer.state[p]
    bad, code = ("momentum_buffer_scale", 255) if name == "int8" else ("momentum_buffer", float("nan"))
    state[bad].view(-1)[1] = code
    before = p.detach().clone()
    with pytest.raises(ValueError, match=rf"state '{bad}' of 'w' has an infinity or a NaN.*Nothing was"):
        optimizer.step()
    assert torch.equal(p, before)
    assert state["step"] == 1
    tx, g = halfstep_jax.scale_by_muon(mu_dtype=fmt(halfstep_jax)), {"w": jnp.ones((4, 64))}
    _, after = jax.jit(tx.update)({"w": g["w"].at[2, 3].set(jnp.nan)}, tx.init(g))  # which cannot refuse it
    with pytest.raises(ValueError, match=r"momentum of 'w' has an infinity or a NaN.*Go on from a state"):
        tx.update(g, after)

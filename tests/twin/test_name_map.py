"""A Flax model's weights in a torch model: the same function, and the same bits of every step."""

import flax.linen as linen
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
import torch
from torch import nn

import halfstep_jax
import halfstep_torch
from halfstep_jax.leaves import named_leaves
from halfstep_torch.bridge import Place, SourceView, name_map

_FEATURES, _HEADS, _LAYERS, _WORDS = 8, 2, 3, 11


class Block(linen.Module):
    @linen.compact
    def __call__(self, x, _):
        return jnp.tanh(linen.Dense(_FEATURES, name="mix")(x)), None


class FlaxModel(linen.Module):
    @linen.compact
    def __call__(self, words):
        x = linen.Embed(_WORDS, _FEATURES, name="words")(words)
        x = x + linen.MultiHeadDotProductAttention(_HEADS, name="attention")(x, x)
        x = linen.LayerNorm(epsilon=1e-5, name="norm")(x)
        scan = linen.scan(Block, variable_axes={"params": 0}, split_rngs={"params": True}, length=_LAYERS)
        x, _ = scan(name="layers")(x, None)
        x = linen.Conv(5, (3,), padding="VALID", name="filters")(x)
        return linen.Dense(4)(x)


class TorchModel(nn.Module):
    def __init__(self):
        super().__init__()
        self.words = nn.Embedding(_WORDS, _FEATURES)
        self.attention = nn.MultiheadAttention(_FEATURES, _HEADS, batch_first=True)
        self.norm = nn.LayerNorm(_FEATURES)
        self.layers = nn.ModuleList(
            nn.ModuleDict({"mix": nn.Linear(_FEATURES, _FEATURES)}) for _ in range(_LAYERS)
        )
        self.filters = nn.Conv1d(_FEATURES, 5, 3)
        self.head = nn.Linear(5, 4)

    def forward(self, words):
        x = self.words(words)
        x = x + self.attention(x, x, x, need_weights=False)[0]
        x = self.norm(x)
        for layer in self.layers:
            x = torch.tanh(layer["mix"](x))
        return self.head(self.filters(x.mT).mT)


@pytest.fixture(scope="module")
def flax_run():
    """Return a Flax model with its weights, and some words."""
    words = np.random.default_rng(0).integers(0, _WORDS, (2, 6))
    model = FlaxModel()
    return model, jax.jit(model.init)(jax.random.key(1), words)["params"], words


def leaves(params):
    return dict(named_leaves(params))


def with_weights(params, model):
    """Give a torch model the weights of one of JAX; return it, and the view that put them there."""
    view = SourceView(model, name_map(params, model))
    with torch.no_grad():
        for name, x in leaves(params).items():
            view.get_parameter(name).copy_(torch.from_numpy(np.array(x)))
    return model, view


def test_the_model_with_mapped_weights_is_the_same_function(flax_run):
    flax_model, params, words = flax_run
    model, _ = with_weights(params, TorchModel())
    expected = flax_model.apply({"params": params}, words)
    # Sums of at most 24 products in another order, of numbers near 1.
    np.testing.assert_allclose(model(torch.from_numpy(words)).detach(), expected, rtol=0, atol=2e-5)


@pytest.mark.slow
def test_a_run_moves_into_the_mapped_model_with_the_same_bits(flax_run, tmp_path):
    """Blocks and words follow Flax's layout; gradients are torch's own, handed to both."""
    _, params, words = flax_run
    fine = {"min_size": 0, "min_ndim": 1}
    tx = halfstep_jax.adamw(1e-2, nu_dtype=halfstep_jax.scaled("ufloat8_e5m3", 4, **fine), seed=8)
    params = jax.tree.map(lambda p: p.astype(jnp.bfloat16), params)
    update, state = jax.jit(tx.update), tx.init(params)
    updates, state = update(params, state, params)
    params = optax.apply_updates(params, updates)
    halfstep_jax.save_state(tmp_path / "run", params, state, tx)
    model = TorchModel().bfloat16()
    view = SourceView(model, name_map(params, model))
    nu = halfstep_torch.scaled("ufloat8_e5m3", 4, **fine)
    optimizer = view.optimizer(halfstep_torch.AdamW, 1e-2, weight_decay=1e-4, nu_dtype=nu, compile=False)
    halfstep_torch.load_state(tmp_path / "run", view, optimizer)
    for _ in range(3):
        optimizer.zero_grad()
        model(torch.from_numpy(words)).float().square().sum().backward()
        optimizer.step()
        grads = {name: p.grad.view(torch.int16).numpy() for name, p in view.named_parameters()}
        tree = jax.tree_util.tree_map_with_path(
            lambda path, p, grads=grads: jnp.asarray(grads["/".join(key.key for key in path)]).view(p.dtype),
            params,
        )
        updates, state = update(tree, state, params)
        params = optax.apply_updates(params, updates)
    for name, p in leaves(params).items():
        mine = view.get_parameter(name).detach().view(torch.int16).numpy()
        np.testing.assert_array_equal(np.asarray(p).view(np.int16), mine, err_msg=name)
    weight = model.head.weight.detach().float().numpy()
    np.testing.assert_array_equal(weight, np.asarray(params["Dense_0"]["kernel"].astype(jnp.float32)).T)


def test_a_map_prints_what_a_person_can_review(flax_run):
    said = str(name_map(flax_run[1], TorchModel()))
    for line in (
        "attention/query/kernel  attention.in_proj_weight[0:8] as 2x4x8, axes 2 0 1",
        "Dense_0/kernel          head.weight as 4x5, axes 1 0",
        "layers/mix/bias         layers.0.mix.bias, layers.1.mix.bias, layers.2.mix.bias",
        "filters/kernel          filters.weight as 5x8x3, axes 2 1 0",
        "norm/scale              norm.weight",
    ):
        assert line in said.splitlines()


def test_layers_that_fit_more_than_one_are_listed_and_can_be_named():
    params = {f"Dense_{i}": {"kernel": np.ones((4, 4)), "bias": np.ones(4)} for i in range(2)}
    model = nn.ModuleDict({"first": nn.Linear(4, 4), "second": nn.Linear(4, 4)})
    with pytest.raises(ValueError, match=r"Dense_0/bias.*Dense_1/kernel.*first\.bias.*second\.weight"):
        name_map(params, model)
    found = name_map(params, model, {"Dense_0": "second"})
    assert found["Dense_0/kernel"] == Place(("second.weight",), (4, 4), (1, 0))
    assert found["Dense_1/bias"].parameters == ("first.bias",)


class FlaxImages(linen.Module):
    @linen.compact
    def __call__(self, x):
        x = linen.Conv(5, (3, 2), padding="VALID", name="filters")(x)
        x = x.reshape(x.shape[0], -1, 5)
        attention = linen.MultiHeadDotProductAttention
        return attention(_HEADS, qkv_features=_FEATURES, out_features=5, name="attention")(x, x)


class TorchImages(nn.Module):
    """The same, with the four layers of attention each for itself, and channels in front."""

    def __init__(self):
        super().__init__()
        self.filters = nn.Conv2d(3, 5, (3, 2))
        shapes = {name: (5, _FEATURES) for name in ("query", "key", "value")} | {"out": (_FEATURES, 5)}
        self.attention = nn.ModuleDict({name: nn.Linear(*shape) for name, shape in shapes.items()})

    def forward(self, x):
        x = self.filters(x).permute(0, 2, 3, 1).flatten(1, 2)
        query, key, value = (
            self.attention[name](x).unflatten(-1, (_HEADS, -1)).transpose(1, 2)
            for name in ("query", "key", "value")
        )
        x = nn.functional.scaled_dot_product_attention(query, key, value)
        return self.attention["out"](x.transpose(1, 2).flatten(2))


def test_images_and_attention_of_four_layers_are_the_same_function():
    x = np.random.default_rng(1).normal(size=(2, 5, 4, 3)).astype(np.float32)
    shapes = jax.eval_shape(FlaxImages().init, jax.random.key(0), x)["params"]
    rng = np.random.default_rng(2)
    params = jax.tree.map(lambda p: 0.3 * rng.normal(size=p.shape).astype(np.float32), shapes)
    model = TorchImages()
    view = SourceView(model, name_map(shapes, model))
    with torch.no_grad():
        for name, p in leaves(params).items():
            view.get_parameter(name).copy_(torch.from_numpy(p))
    expected = jax.jit(FlaxImages().apply)({"params": params}, x)
    found = model(torch.from_numpy(x).permute(0, 3, 1, 2)).detach()
    # Sums of at most 18 products in another order, of numbers near 1.
    np.testing.assert_allclose(found, expected, rtol=0, atol=2e-5)


def test_leaves_with_the_names_and_shapes_of_torch_stay_as_they_are():
    """As those of Equinox, whose convolutions have biases with further axes."""
    model = nn.Sequential(nn.Conv1d(2, 3, 2), nn.Linear(3, 4))
    params = {name.replace(".", "/"): np.ones(tuple(p.shape)) for name, p in model.named_parameters()}
    params["0/bias"] = np.ones((3, 1))
    model.scale, params["scale"] = nn.Parameter(torch.tensor(2.0)), np.ones(())
    view = SourceView(model, name_map(params, model))
    assert {name: tuple(p.shape) for name, p in view.named_parameters()} == {
        name: x.shape for name, x in params.items()
    }


def test_a_map_that_is_not_the_models_is_refused():
    model = nn.Linear(3, 2)
    right = name_map({"kernel": np.ones((3, 2)), "bias": np.ones(2)}, model)
    kernel = right["kernel"]
    for wrong, message in (
        ({"kernel": kernel}, "the map has bias not at all"),
        (right | {"again": kernel}, "weight not at all, in part or twice"),
        (right | {"bias": Place(("b",), (2,), (0,))}, "'b', which the model does not have"),
        (right | {"kernel": kernel._replace(split=(2, 2))}, "Correct split, axes or rows"),
        (right | {"kernel": kernel._replace(axes=(0, 0))}, "Correct split, axes or rows"),
    ):
        with pytest.raises(ValueError, match=message):
            SourceView(model, wrong)
    model.weight = nn.Parameter(torch.ones(3, 2).T)
    with pytest.raises(ValueError, match="the parameter of 'kernel' is not row-major"):
        SourceView(model, right)


def test_stacked_layers_of_which_one_has_no_gradient_are_refused():
    model = nn.ModuleDict({"layers_0": nn.Linear(3, 3), "layers_1": nn.Linear(3, 3)})
    kernel = Place(("layers_0.weight", "layers_1.weight"), (3, 3), (1, 0))
    bias = Place(("layers_0.bias", "layers_1.bias"), (3,), (0,))
    view = SourceView(model, {"layers/kernel": kernel, "layers/bias": bias})
    optimizer = view.optimizer(halfstep_torch.AdamW, compile=False)
    model["layers_0"](torch.ones(1, 3)).sum().backward()
    with pytest.raises(ValueError, match="some layers of 'layers/kernel' have no gradient"):
        optimizer.step()


def test_a_model_that_was_moved_is_noticed():
    model = nn.Linear(3, 2)
    view = SourceView(model, name_map({"kernel": np.ones((3, 2)), "bias": np.ones(2)}, model))
    optimizer = view.optimizer(halfstep_torch.AdamW, compile=False)
    model.to(torch.bfloat16)
    model(torch.ones(1, 3, dtype=torch.bfloat16)).sum().backward()
    with pytest.raises(ValueError, match="has other memory than when the view was made"):
        optimizer.step()


def test_a_map_that_permutes_wrongly_loads_no_file(tmp_path):
    model, params = nn.Linear(3, 2), {"kernel": np.ones((3, 2), np.float32), "bias": np.ones(2, np.float32)}
    tx = halfstep_jax.adamw(1e-3)
    params = jax.tree.map(jnp.asarray, params)
    halfstep_jax.save_state(tmp_path / "run", params, tx.init(params), tx)
    mapping = name_map(params, model)
    wrong = SourceView(model, mapping | {"kernel": Place(("weight",), (2, 3), (0, 1))})
    optimizer = wrong.optimizer(halfstep_torch.AdamW, weight_decay=1e-4, compile=False)
    before, state = model.weight.detach().clone(), str(optimizer.state_dict())
    with pytest.raises(ValueError, match=r"'params/kernel' is F32\[3, 2\] in the file, F32\[2, 3\] here"):
        halfstep_torch.load_state(tmp_path / "run", wrong, optimizer)
    assert torch.equal(model.weight, before)
    assert str(optimizer.state_dict()) == state


def test_a_closure_is_refused_as_its_gradients_would_come_too_late():
    model = nn.Linear(3, 2)
    view = SourceView(model, name_map({"kernel": np.ones((3, 2)), "bias": np.ones(2)}, model))
    optimizer = view.optimizer(halfstep_torch.AdamW, compile=False)
    with pytest.raises(TypeError, match="takes no closure"):
        optimizer.step(lambda: model(torch.ones(1, 3)).sum())

"""Models of Equinox and of Flax nnx: the names of their leaves, their places in torch, the bits of a run."""

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
import torch
from flax import nnx
from torch import nn

import halfstep_jax
import halfstep_torch
from halfstep_torch.bridge import SourceView, name_map
from twin.test_name_map import leaves, with_weights

_FEATURES, _HEADS, _WORDS = 8, 2, 11


class EquinoxModel(eqx.Module):
    words: eqx.nn.Embedding
    attention: eqx.nn.MultiheadAttention
    norm: eqx.nn.LayerNorm
    layers: list
    filters: eqx.nn.Conv1d
    activation: object

    def __init__(self):
        keys = jax.random.split(jax.random.key(0), 5)
        biases = {f"use_{part}_bias": True for part in ("query", "key", "value", "output")}
        self.words = eqx.nn.Embedding(_WORDS, _FEATURES, key=keys[0])
        self.attention = eqx.nn.MultiheadAttention(_HEADS, _FEATURES, **biases, key=keys[1])
        self.norm = eqx.nn.LayerNorm(_FEATURES)
        self.layers = [eqx.nn.Linear(_FEATURES, _FEATURES, key=key) for key in keys[2:4]]
        self.filters = eqx.nn.Conv1d(_FEATURES, 5, 3, key=keys[4])
        self.activation = jnp.tanh

    def __call__(self, words):
        x = jax.vmap(self.words)(words)
        x = jax.vmap(self.norm)(x + self.attention(x, x, x))
        for layer in self.layers:
            x = self.activation(jax.vmap(layer)(x))
        return self.filters(x.T).T


class NnxModel(nnx.Module):
    def __init__(self):
        rngs = nnx.Rngs(0)
        self.words = nnx.Embed(_WORDS, _FEATURES, rngs=rngs)
        self.attention = nnx.MultiHeadAttention(_HEADS, _FEATURES, decode=False, rngs=rngs)
        self.norm = nnx.LayerNorm(_FEATURES, epsilon=1e-5, rngs=rngs)
        self.layers = nnx.List([nnx.Linear(_FEATURES, _FEATURES, rngs=rngs) for _ in range(2)])
        self.filters = nnx.Conv(_FEATURES, 5, (3,), padding="VALID", rngs=rngs)

    def __call__(self, words):
        x = self.words(words)
        x = self.norm(x + self.attention(x))
        for layer in self.layers:
            x = jnp.tanh(layer(x))
        return self.filters(x)


class TorchModel(nn.Module):
    """The same, with another name for its convolution."""

    def __init__(self):
        super().__init__()
        self.words = nn.Embedding(_WORDS, _FEATURES)
        self.attention = nn.MultiheadAttention(_FEATURES, _HEADS, batch_first=True)
        self.norm = nn.LayerNorm(_FEATURES)
        self.layers = nn.ModuleList(nn.Linear(_FEATURES, _FEATURES) for _ in range(2))
        self.conv = nn.Conv1d(_FEATURES, 5, 3)

    def forward(self, words):
        x = self.words(words)
        x = self.norm(x + self.attention(x, x, x, need_weights=False)[0])
        for layer in self.layers:
            x = torch.tanh(layer(x))
        return self.conv(x.mT).mT


def drawn(shapes):
    rng = np.random.default_rng(2)
    return jax.tree.map(lambda x: jnp.asarray(0.3 * rng.normal(size=x.shape), jnp.float32), shapes)


def equinox_model():
    shapes, rest = eqx.partition(eqx.filter_eval_shape(EquinoxModel), lambda x: hasattr(x, "dtype"))
    return eqx.combine(drawn(shapes), rest)


def equinox_params():
    return eqx.filter(equinox_model(), eqx.is_array)


def nnx_params():
    return drawn(nnx.state(nnx.eval_shape(NnxModel), nnx.Param))


@eqx.filter_jit
def equinox_output(words):
    return equinox_model()(words)


@jax.jit
def nnx_output(words):
    model = nnx.eval_shape(NnxModel)
    nnx.update(model, nnx_params())
    return model(words[None])[0]


_PARAMS = {"equinox": equinox_params, "nnx": nnx_params}
_LAYERS = ("layers/0", "layers/1", "filters")
_ATTENTION = {
    "equinox": [f"attention/{part}_proj" for part in ("query", "key", "value", "output")],
    "nnx": [f"attention/{part}" for part in ("query", "key", "value", "out")],
}


@pytest.mark.parametrize("library", _PARAMS)
def test_names_of_leaves_are_the_attributes_and_indices_that_lead_to_them(library):
    kernel, scale, embedding = {
        "equinox": ("weight", "weight", "weight"),
        "nnx": ("kernel", "scale", "embedding"),
    }[library]
    layers = (*_ATTENTION[library], *_LAYERS)
    expected = {f"{layer}/{one}" for layer in layers for one in (kernel, "bias")}
    expected |= {f"words/{embedding}", f"norm/{scale}", "norm/bias"}
    assert leaves(_PARAMS[library]()).keys() == expected


def test_a_module_of_nnx_and_its_state_have_the_same_names():
    model = nnx.eval_shape(NnxModel)
    state = nnx.state(model, nnx.Param)
    assert leaves(model).keys() == leaves(state).keys() == leaves(nnx.to_pure_dict(state)).keys()


@pytest.mark.parametrize("library", _PARAMS)
def test_the_model_with_mapped_weights_is_the_same_function(library):
    words = np.random.default_rng(0).integers(0, _WORDS, 6)
    expected = {"equinox": equinox_output, "nnx": nnx_output}[library](words)
    model, _ = with_weights(_PARAMS[library](), TorchModel())
    # Sums of at most 24 products in another order, of numbers near 1.
    found = model(torch.from_numpy(words)[None])[0].detach()
    np.testing.assert_allclose(found, expected, rtol=0, atol=2e-5)


@pytest.mark.slow
@pytest.mark.parametrize("library", _PARAMS)
def test_a_run_goes_there_and_back_with_the_same_bits(library, tmp_path):
    params, path = jax.tree.map(lambda p: p.astype(jnp.bfloat16), _PARAMS[library]()), tmp_path / "run"
    tx = halfstep_jax.adamw(1e-2, seed=8)
    rng = np.random.default_rng(1)
    grads = [jax.tree.map(lambda p: jnp.asarray(rng.normal(size=p.shape), p.dtype), params) for _ in range(3)]

    @jax.jit
    def step(params, state, grads):
        updates, state = tx.update(grads, state, params)
        return optax.apply_updates(params, updates), state

    stays = moves = step(params, tx.init(params), grads[0])
    halfstep_jax.save_state(path, *moves, tx)
    model = TorchModel().bfloat16()
    view = SourceView(model, name_map(params, model))
    optimizer = view.optimizer(halfstep_torch.AdamW, 1e-2, weight_decay=1e-4, compile=False)
    halfstep_torch.load_state(path, view, optimizer)
    for p in model.parameters():
        p.grad = torch.zeros_like(p)
    parameters = dict(model.named_parameters())
    for name, place in name_map(params, model).items():
        given = torch.from_numpy(np.asarray(leaves(grads[1])[name], np.float32))
        place.view(parameters[place.parameters[0]].grad).copy_(given)
    optimizer.step()
    halfstep_torch.save_state(path, view, optimizer)
    moves = step(*halfstep_jax.load_state(path, params, tx), grads[2])
    stays = step(*step(*stays, grads[1]), grads[2])
    assert jax.tree.structure(moves) == jax.tree.structure(stays)
    for mine, theirs in zip(jax.tree.leaves(moves), jax.tree.leaves(stays), strict=True):
        assert np.asarray(mine).tobytes() == np.asarray(theirs).tobytes()


def test_an_equinox_model_with_its_functions_is_refused():
    with pytest.raises(TypeError, match=r"is a \w+, no array.*eqx\.filter"):
        name_map(equinox_model(), TorchModel())


def test_equinox_layers_that_fit_more_than_one_are_listed_and_can_be_named():
    layer = eqx.filter_eval_shape(eqx.nn.Linear, 4, 4, key=jax.random.key(0))
    params = {"a": layer, "b": layer}
    model = nn.ModuleDict({"first": nn.Linear(4, 4), "second": nn.Linear(4, 4)})
    with pytest.raises(ValueError, match=r"a/bias.*b/weight.*first\.bias.*second\.weight"):
        name_map(params, model)
    found = name_map(params, model, {"a": "second"})
    assert str(found["a/weight"]) == "second.weight"
    assert str(found["b/bias"]) == "first.bias"

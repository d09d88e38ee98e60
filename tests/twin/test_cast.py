"""A model in 16 bits: which weights are cast, which keep more bits, and that it trains."""

import jax
import jax.numpy as jnp
import pytest
import torch

import halfstep_jax
import halfstep_torch


class Block(torch.nn.Module):
    def __init__(self, tied=False):
        super().__init__()
        self.wte = torch.nn.Embedding(10, 8)
        self.norm = torch.nn.RMSNorm(8)
        self.ln = torch.nn.LayerNorm(8)
        self.head = torch.nn.Linear(8, 10, bias=False)
        if tied:
            self.head.weight = self.wte.weight

    def forward(self, tokens):
        return self.head(self.ln(self.norm(self.wte(tokens))))


def dtypes(model):
    return {name: p.dtype for name, p in model.named_parameters()}


PARAMS = {
    "wte": jnp.ones((10, 8)),
    "block_0": {"LayerNorm_0": {"scale": jnp.ones(8)}, "Dense_0": {"kernel": jnp.full((8, 8), 1.001)}},
    "ids": jnp.arange(3),
}


@pytest.mark.parametrize(
    ("norms", "embeddings"),
    [("split16", "bfloat16"), ("float32", "float32"), ("bfloat16", "split16"), ("float32", "split16")],
)
def test_every_kind_of_weight_is_kept_as_asked_and_the_model_trains(norms, embeddings):
    torch.manual_seed(0)
    model = Block()
    groups = halfstep_torch.cast_model(model, norms=norms, embeddings=embeddings)
    wide = {"float32": torch.float32}
    assert dtypes(model) == {
        "wte.weight": wide.get(embeddings, torch.bfloat16),
        "norm.weight": wide.get(norms, torch.bfloat16),
        "ln.weight": wide.get(norms, torch.bfloat16),
        "ln.bias": wide.get(norms, torch.bfloat16),
        "head.weight": torch.bfloat16,
    }
    optimizer = halfstep_torch.AdamW(groups, lr=1e-2)
    found = halfstep_torch.describe(optimizer)
    assert found.of("head.weight").why == "round_stochastically"
    for leaf, choice in {"ln.weight": norms, "wte.weight": embeddings}.items():
        why = {"split16": "split_params", "float32": "float32 weights pass through"}
        assert found.of(leaf).why == why.get(choice, "round_stochastically")
    losses = []
    for _ in range(20):
        out = model(torch.arange(10))
        assert out.dtype == torch.bfloat16
        losses.append(torch.nn.functional.cross_entropy(out.float(), torch.arange(10)))
        losses[-1].backward()
        optimizer.step(zero_grad=True)
    assert losses[-1] < losses[0]


def test_a_shared_weight_cannot_stay_in_float32_where_its_other_module_is_cast():
    with pytest.raises(ValueError, match=r"is shared with a module that is cast\. Use .split16."):
        halfstep_torch.cast_model(Block(tied=True), embeddings="float32")
    halfstep_torch.cast_model(Block(tied=True), embeddings="split16")


@pytest.mark.parametrize("norms", ["split16", "float32", "bfloat16"])
def test_a_tree_is_cast_by_the_names_of_its_modules(norms):
    params, labels = halfstep_jax.cast_params(PARAMS, norms=norms)
    assert labels["block_0"] == {"LayerNorm_0": {"scale": norms}, "Dense_0": {"kernel": "bfloat16"}}
    assert params["wte"].dtype == jnp.bfloat16
    assert params["ids"].dtype == jnp.int32
    assert params["block_0"]["Dense_0"]["kernel"].tolist()[0][0] == 1.0
    scale = params["block_0"]["LayerNorm_0"]["scale"]
    assert scale.dtype == (jnp.float32 if norms == "float32" else jnp.bfloat16)
    shapes = jax.eval_shape(lambda: PARAMS)
    assert jax.eval_shape(lambda: params) == halfstep_jax.cast_params(shapes, norms=norms)[0]


@pytest.mark.parametrize("choice", ["bf16", "fp32", "split8", None])
def test_a_choice_that_is_none_is_refused(choice):
    meant = {"bf16": 'Did you mean "bfloat16"', "fp32": 'Did you mean "float32"'}.get(choice, "Use")
    with pytest.raises(ValueError, match=f"cast_params: norms={choice!r} is no choice.*{meant}"):
        halfstep_jax.cast_params(PARAMS, norms=choice)
    with pytest.raises(ValueError, match=f"cast_model: embeddings={choice!r} is no choice.*{meant}"):
        halfstep_torch.cast_model(Block(), embeddings=choice)

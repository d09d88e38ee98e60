"""Train a small character transformer in Flax (nnx), with an `optax.chain` that ends in a halfstep link.

What to look at: `make_transform`. The model, `nnx.Optimizer` and the training step are what any nnx project
has; nothing in them knows of halfstep. Weights are stored in the row's dtype and widened to float32 where
they are used (`param_dtype`, `dtype`). So the rows differ in how weights are kept and in nothing else.
Gradients arrive in the dtype of the weights.
"""

from __future__ import annotations

import time
import zlib
from collections.abc import Callable

import jax
import jax.numpy as jnp
import numpy as np
import optax
from flax import nnx

import halfstep_jax as hs
from recipe import Outcome, Recipe, Row, initial_weights
from text import Text


class Block(nnx.Module):
    """Causal self-attention and a GELU layer, each behind a norm and added to what came in."""

    def __init__(self, recipe: Recipe, dtypes: dict, rngs: nnx.Rngs):
        width, self.heads = recipe.width, recipe.heads
        self.norm1 = nnx.RMSNorm(width, epsilon=1e-5, rngs=rngs, **dtypes)
        self.qkv = nnx.Linear(width, 3 * width, use_bias=False, rngs=rngs, **dtypes)
        self.out = nnx.Linear(width, width, use_bias=False, rngs=rngs, **dtypes)
        self.norm2 = nnx.RMSNorm(width, epsilon=1e-5, rngs=rngs, **dtypes)
        self.up = nnx.Linear(width, 4 * width, use_bias=False, rngs=rngs, **dtypes)
        self.down = nnx.Linear(4 * width, width, use_bias=False, rngs=rngs, **dtypes)

    def __call__(self, x: jax.Array) -> jax.Array:
        """Map float32 (batch, context, width) to the same shape."""
        batch, context, width = x.shape
        parts = self.qkv(self.norm1(x)).reshape(batch, context, 3, self.heads, width // self.heads)
        attended = jax.nn.dot_product_attention(
            parts[:, :, 0], parts[:, :, 1], parts[:, :, 2], is_causal=True
        )
        x = x + self.out(attended.reshape(batch, context, width))
        return x + self.down(nnx.gelu(self.up(self.norm2(x)), approximate=True))


class Transformer(nnx.Module):
    """Characters in, logits of the next character out."""

    def __init__(self, recipe: Recipe, vocabulary: int, dtype: str):
        dtypes, rngs = {"param_dtype": jnp.dtype(dtype), "dtype": jnp.float32}, nnx.Rngs(0)
        self.token = nnx.Embed(vocabulary, recipe.width, rngs=rngs, **dtypes)
        self.position = nnx.Embed(recipe.context, recipe.width, rngs=rngs, **dtypes)
        self.blocks = nnx.List([Block(recipe, dtypes, rngs) for _ in range(recipe.layers)])
        self.norm = nnx.RMSNorm(recipe.width, epsilon=1e-5, rngs=rngs, **dtypes)
        self.head = nnx.Linear(recipe.width, vocabulary, use_bias=False, rngs=rngs, **dtypes)

    def __call__(self, characters: jax.Array) -> jax.Array:
        """Map int32 (batch, context) to float32 logits (batch, context, vocabulary)."""
        x = self.token(characters) + self.position(jnp.arange(characters.shape[1]))
        for block in self.blocks:
            x = block(x)
        return self.head(self.norm(x))


def make_transform(row: Row, recipe: Recipe) -> optax.GradientTransformation:
    """Build the row's optimizer; the two bfloat16 rows differ in the last link alone."""
    if row.rounding == "none":
        return optax.adamw(recipe.learning_rate, weight_decay=recipe.weight_decay)
    links = [
        hs.scale_by_adam(mu_dtype="bfloat16", nu_dtype="bfloat16", seed=recipe.seed),
        hs.add_decayed_weights(recipe.weight_decay),
        hs.scale_by_learning_rate(recipe.learning_rate),
    ]
    if row.rounding == "stochastic":
        links.append(hs.round_stochastically(seed=recipe.seed))
    return optax.chain(*links)


def loss_of(model: Transformer, characters: jax.Array, following: jax.Array) -> jax.Array:
    """Return the mean cross entropy of the next character, in nats."""
    return optax.softmax_cross_entropy_with_integer_labels(model(characters), following).mean()


evaluate = nnx.jit(loss_of)


@nnx.jit
def train_step(model: Transformer, optimizer: nnx.Optimizer, moved: dict, characters, following) -> dict:
    """Do one update in place; return, for every weight, whether this or an earlier update changed it."""
    grads = nnx.grad(loss_of)(model, characters, following)
    before = named_weights(model)
    optimizer.update(model, grads)
    return {name: moved[name] | (after != before[name]) for name, after in named_weights(model).items()}


def named_weights(model: Transformer) -> dict[str, jax.Array]:
    """Return the weights by the path of their layer, as `recipe.initial_weights` names them."""
    flat = nnx.to_flat_state(nnx.state(model, nnx.Param))
    return {"/".join(map(str, path[:-1])): variable[...] for path, variable in flat}


def make_model(recipe: Recipe, row: Row, vocabulary: int) -> Transformer:
    """Build the model around the recipe's first weights, in the row's dtype."""
    model = nnx.eval_shape(
        lambda: Transformer(recipe, vocabulary, row.dtype)
    )  # shapes alone: nothing is drawn
    weights = initial_weights(recipe, vocabulary)
    state = nnx.state(model, nnx.Param)
    for path, variable in nnx.to_flat_state(state):
        variable.set_value(jnp.asarray(weights["/".join(map(str, path[:-1]))], dtype=row.dtype))
    nnx.update(model, state)
    return model


def as_arrays(pair: tuple[np.ndarray, np.ndarray]) -> tuple[jax.Array, jax.Array]:
    """Return the characters and those that follow as JAX arrays, int32."""
    return jnp.asarray(pair[0]), jnp.asarray(pair[1])


def train(recipe: Recipe, row: Row, text: Text, on_step: Callable[[float], None]) -> Outcome:
    """Train one row and report it; `on_step` is called after every update with the last validation loss."""
    start, outcome = time.perf_counter(), Outcome("Flax", row.name)
    model = make_model(recipe, row, len(text.vocabulary))
    optimizer = nnx.Optimizer(model, make_transform(row, recipe), wrt=nnx.Param)
    moved = {name: jnp.zeros(weight.shape, bool) for name, weight in named_weights(model).items()}
    held_out = as_arrays(text.validation_windows(recipe.validation_windows, recipe.context))

    def read_loss(step: int) -> None:
        outcome.steps.append(step)
        outcome.losses.append(float(evaluate(model, *held_out)))

    read_loss(0)
    batches = text.batches(recipe.steps, recipe.batch, recipe.context, recipe.seed)
    for step, pair in enumerate(batches, start=1):
        outcome.batches_crc32 = zlib.crc32(pair[0].tobytes() + pair[1].tobytes(), outcome.batches_crc32)
        moved = train_step(model, optimizer, moved, *as_arrays(pair))
        if recipe.evaluates_after(step):
            read_loss(step)
        on_step(outcome.losses[-1])

    weights = named_weights(model).values()
    state = jax.tree.leaves(nnx.state(optimizer, nnx.optimizer.OptState))
    outcome.parameters = sum(weight.size for weight in weights)
    outcome.bytes_per_parameter = sum(array.nbytes for array in [*weights, *state]) / outcome.parameters
    outcome.never_moved = 1 - sum(int(np.sum(m)) for m in moved.values()) / outcome.parameters
    outcome.seconds = time.perf_counter() - start
    return outcome

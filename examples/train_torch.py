"""Train the same small character transformer in PyTorch, with an optimizer of halfstep.

What to look at: `make_optimizer`. The model is plain `torch.nn`. Weights are stored in the row's dtype and
widened to float32 where they are used (`loss_of`). So the rows differ in how weights are kept and in nothing
else. Gradients arrive in the dtype of the weights.
"""

from __future__ import annotations

import time
import zlib
from collections.abc import Callable

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import halfstep_torch as hs
from recipe import Outcome, Recipe, Row, initial_weights
from text import Text


class Block(nn.Module):
    """Causal self-attention and a GELU layer, each behind a norm and added to what came in."""

    def __init__(self, recipe: Recipe):
        super().__init__()
        width, self.heads = recipe.width, recipe.heads
        self.norm1 = nn.RMSNorm(width, eps=1e-5)
        self.qkv = nn.Linear(width, 3 * width, bias=False)
        self.out = nn.Linear(width, width, bias=False)
        self.norm2 = nn.RMSNorm(width, eps=1e-5)
        self.up = nn.Linear(width, 4 * width, bias=False)
        self.down = nn.Linear(4 * width, width, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        """Map float32 (batch, context, width) to the same shape."""
        batch, context, width = x.shape
        parts = self.qkv(self.norm1(x)).view(batch, context, 3, self.heads, width // self.heads)
        query, key, value = parts.permute(2, 0, 3, 1, 4)
        attended = F.scaled_dot_product_attention(query, key, value, is_causal=True)
        x = x + self.out(attended.transpose(1, 2).reshape(batch, context, width))
        return x + self.down(F.gelu(self.up(self.norm2(x)), approximate="tanh"))


class Transformer(nn.Module):
    """Characters in, logits of the next character out."""

    def __init__(self, recipe: Recipe, vocabulary: int):
        super().__init__()
        self.token = nn.Embedding(vocabulary, recipe.width)
        self.position = nn.Embedding(recipe.context, recipe.width)
        self.blocks = nn.ModuleList([Block(recipe) for _ in range(recipe.layers)])
        self.norm = nn.RMSNorm(recipe.width, eps=1e-5)
        self.head = nn.Linear(recipe.width, vocabulary, bias=False)

    def forward(self, characters: Tensor) -> Tensor:
        """Map int32 (batch, context) to float32 logits (batch, context, vocabulary)."""
        x = self.token(characters) + self.position(torch.arange(characters.shape[1]))
        for block in self.blocks:
            x = block(x)
        return self.head(self.norm(x))


def make_optimizer(row: Row, recipe: Recipe, model: nn.Module) -> torch.optim.Optimizer:
    """Build the row's optimizer; the two bfloat16 rows differ in how the weight is stored alone."""
    options = {"lr": recipe.learning_rate, "weight_decay": recipe.weight_decay}
    if row.rounding == "none":
        return torch.optim.AdamW(model.parameters(), **options)
    formats = {"mu_dtype": "bfloat16", "nu_dtype": "bfloat16"}
    return hs.AdamW(
        model.named_parameters(), **options, **formats, param_storage=row.rounding, seed=recipe.seed
    )


def loss_of(model: nn.Module, characters: Tensor, following: Tensor) -> Tensor:
    """Return the mean cross entropy of the next character, in nats, from weights widened to float32."""
    wide = {name: weight.float() for name, weight in model.named_parameters()}
    logits = torch.func.functional_call(model, wide, (characters,))
    return F.cross_entropy(logits.flatten(0, 1), following.flatten())


@torch.no_grad()
def evaluate(model: nn.Module, characters: Tensor, following: Tensor) -> float:
    """Return the loss as a number."""
    return loss_of(model, characters, following).item()


def train_step(
    model: nn.Module, optimizer: torch.optim.Optimizer, moved: dict, characters, following
) -> None:
    """Do one update, and mark in `moved` every weight that it changed."""
    optimizer.zero_grad()
    loss_of(model, characters, following).backward()
    before = {name: weight.detach().clone() for name, weight in model.named_parameters()}
    optimizer.step()
    for name, weight in model.named_parameters():
        moved[name] |= weight.detach() != before[name]


def make_model(recipe: Recipe, row: Row, vocabulary: int) -> Transformer:
    """Build the model and give it the recipe's first weights, in the row's dtype."""
    model = Transformer(recipe, vocabulary)
    weights = initial_weights(recipe, vocabulary)
    with torch.no_grad():
        for path, layer in model.named_modules():
            if isinstance(layer, (nn.Linear, nn.Embedding, nn.RMSNorm)):
                array = torch.from_numpy(weights[path.replace(".", "/")])
                layer.weight.copy_(array.T if isinstance(layer, nn.Linear) else array)
    return model.to(getattr(torch, row.dtype))


def as_tensors(pair: tuple[np.ndarray, np.ndarray]) -> tuple[Tensor, Tensor]:
    """Return the characters and those that follow as int64 tensors: what `cross_entropy` takes."""
    return torch.from_numpy(pair[0]).long(), torch.from_numpy(pair[1]).long()


def train(recipe: Recipe, row: Row, text: Text, on_step: Callable[[float], None]) -> Outcome:
    """Train one row and report it; `on_step` is called after every update with the last validation loss."""
    start, outcome = time.perf_counter(), Outcome("PyTorch", row.name)
    model = make_model(recipe, row, len(text.vocabulary))
    optimizer = make_optimizer(row, recipe, model)
    moved = {name: torch.zeros_like(weight, dtype=torch.bool) for name, weight in model.named_parameters()}
    held_out = as_tensors(text.validation_windows(recipe.validation_windows, recipe.context))

    def read_loss(step: int) -> None:
        outcome.steps.append(step)
        outcome.losses.append(evaluate(model, *held_out))

    read_loss(0)
    batches = text.batches(recipe.steps, recipe.batch, recipe.context, recipe.seed)
    for step, pair in enumerate(batches, start=1):
        outcome.batches_crc32 = zlib.crc32(pair[0].tobytes() + pair[1].tobytes(), outcome.batches_crc32)
        train_step(model, optimizer, moved, *as_tensors(pair))
        if recipe.evaluates_after(step):
            read_loss(step)
        on_step(outcome.losses[-1])

    weights = list(model.parameters())
    state = [t for entry in optimizer.state.values() for t in entry.values() if isinstance(t, Tensor)]
    outcome.parameters = sum(weight.numel() for weight in weights)
    outcome.bytes_per_parameter = sum(t.nbytes for t in [*weights, *state]) / outcome.parameters
    outcome.never_moved = 1 - sum(int(m.sum()) for m in moved.values()) / outcome.parameters
    outcome.seconds = time.perf_counter() - start
    return outcome

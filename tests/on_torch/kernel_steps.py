"""Steps of every recipe, rule, format and weight storage, on parameters of all kinds of shapes."""

import functools

import numpy as np
import pytest
import torch

import halfstep_torch as hs
from halfstep.kernels import build
from on_torch.steps import snapshot

needs_compiler = pytest.mark.skipif(build.find_cc() is None, reason="needs a C compiler")


def adamw(params, **options):
    return hs.AdamW(params, lr=1e-2, weight_decay=0.1, **options)


def chain(*links):
    def make(params, compile):
        return hs.Optimizer(params, hs.chain(*links), compile=compile)

    return make


MAKES = {
    "default": adamw,
    **{name: functools.partial(adamw, recipe=name) for name in ("one_pass", "eight_bit", "four_bit")},
    **{
        name: functools.partial(adamw, recipe=name)
        for name in ("near_float32", "full_precision", "sixteen_bit")
    },
    **{
        x: functools.partial(adamw, param_storage=x) for x in ("feedback", "compensated", "split8", "split16")
    },
    **{x: functools.partial(adamw, param_storage=x) for x in ("master", "nearest")},
    "cautious": functools.partial(adamw, cautious=True),
    "feedback and eight_bit": functools.partial(adamw, recipe="eight_bit", param_storage="feedback"),
    "split16 and four_bit": functools.partial(adamw, recipe="four_bit", param_storage="split16"),
    "fp8": functools.partial(adamw, mu_dtype=hs.scaled("float8_e4m3fn"), nu_dtype=hs.scaled("ufloat8_e5m3")),
    "rows": functools.partial(
        adamw, mu_dtype=hs.scaled("float8_e4m3fn", "row"), nu_dtype=hs.scaled("ufloat8_e5m3", "row")
    ),
    "float16": functools.partial(adamw, mu_dtype=hs.scaled("float16"), nu_dtype=hs.scaled("float16")),
    "tables": functools.partial(adamw, mu_dtype=hs.codebook("dynamic8"), nu_dtype=hs.codebook("udynamic8")),
    "SGD": functools.partial(hs.SGD, lr=0.1, momentum=0.9, nesterov=True, weight_decay=0.1),
    "Lion": functools.partial(hs.Lion, lr=1e-3),
    "Adan": functools.partial(hs.Adan, lr=1e-3),
    "AdEMAMix": functools.partial(hs.AdEMAMix, lr=1e-3),
    "schedule-free": functools.partial(hs.AdamWScheduleFree, lr=1e-2),
    "RMS": chain(hs.scale_by_rms(), hs.scale_by_learning_rate(1e-2), hs.round_stochastically()),
    "Lamb": functools.partial(hs.Lamb, lr=1e-2),
    "Lamb16": functools.partial(hs.Lamb16, lr=1e-2),
    "clipped": chain(
        hs.clip_by_global_norm(1.0),
        hs.scale_by_adam(),
        hs.scale_by_learning_rate(1e-2),
        hs.round_stochastically(),
    ),
}
# Ends of vectors and of blocks, runs whose last block is short, and one long array.
SHAPES = [(), (1,), (5,), (15,), (17,), (64, 128), (3, 100), (17, 384), (33, 130), (9_001,), (8, 1000)]


def parameters(dtype=torch.bfloat16, shapes=SHAPES):
    """Return parameters of all shapes. Every third does not begin at a vector's address."""
    generator, made = torch.Generator().manual_seed(0), []
    for i, shape in enumerate(shapes):
        n = int(np.prod(shape))
        x = torch.zeros(n + 3, dtype=dtype)[3 if i % 3 == 2 else 0 :][:n].view(shape)
        made.append((f"w{i}", torch.nn.Parameter(x.copy_(torch.randn(shape, generator=generator)))))
    return made


def give(params, step: int, *, special: bool) -> None:
    """Give gradients of many sizes; in the second step also infinities, NaN, zeros and subnormal numbers."""
    generator = torch.Generator().manual_seed(step)
    for i, (_, p) in enumerate(params):
        if step == 1 and i % 4 == 3:  # counts that differ
            p.grad = None
            continue
        g = torch.randn(p.shape, generator=generator) * 10.0 ** torch.randint(-7, 3, (), generator=generator)
        if special and step == 1 and p.numel() > 200:
            g.view(-1)[:6] = torch.tensor([float("inf"), float("nan"), 0.0, -0.0, 1e-40, -float("inf")])
        p.grad = g.to(p.dtype)


def after_steps(make, compile, *, dtype=torch.bfloat16, shapes=SHAPES, special=True, steps=3):
    params = parameters(dtype, shapes)
    optimizer = make(params, compile=compile)
    for step in range(steps):
        give(params, step, special=special)
        optimizer.step()
    return snapshot(optimizer)

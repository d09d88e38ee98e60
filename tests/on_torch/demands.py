"""What the tests of PyTorch's demands share: every optimizer of ours, and parameters."""

import functools

import torch

import halfstep_torch as hs
from on_torch.steps import drawn_float32


def rms(params, lr=1e-3, weight_decay=0.0, maximize=False):
    links = (hs.scale_by_rms(), hs.add_decayed_weights(weight_decay), hs.scale_by_learning_rate(lr))
    return hs.Optimizer(params, hs.chain(*links, hs.round_stochastically()), maximize=maximize, compile=False)


MAKERS = {
    "AdamW": functools.partial(hs.AdamW, compile=False),
    "SGD": functools.partial(hs.SGD, compile=False, momentum=0.9),
    "Lion": functools.partial(hs.Lion, compile=False),
    "Lamb": functools.partial(hs.Lamb, compile=False),
    "Lamb16": functools.partial(hs.Lamb16, compile=False),
    "Adan": functools.partial(hs.Adan, compile=False),
    "AdEMAMix": functools.partial(hs.AdEMAMix, compile=False),
    "Optimizer": rms,
}


def parameters(dtype=torch.bfloat16):
    """Return named parameters: a matrix, one that is not row-major, a scalar, one without elements."""
    generator = torch.Generator().manual_seed(0)
    shapes = (4, 3), (3, 5), (), (0, 2)
    drawn = {shape: drawn_float32(shape, generator).to(dtype) for shape in shapes}
    of_names = zip(("w", "t", "scale", "none"), drawn.values(), strict=True)
    return [(name, torch.nn.Parameter(x.T if name == "t" else x)) for name, x in of_names]

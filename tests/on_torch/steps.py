"""What the tests of this folder share: inputs with every kind of number, runs, what is kept of them."""

import io
import unittest.mock

import numpy as np
import torch

import halfstep_torch as hs
from halfstep_spec.numbers.random_words import random_words
from halfstep_torch.engine import plain


def values(name: str, step: int, size: int, binades: int) -> np.ndarray:
    """Return float32 values of either sign, spread over binades around 2^-8, with special ones in front."""
    words = random_words(99, step, name, 0, (size,))
    exponent = np.uint32(119 - binades // 2) + (words >> np.uint32(8)) % np.uint32(binades)
    bits = (words & np.uint32(0x807FFFFF)) | (exponent << np.uint32(23))
    special = [0, 0x80000000, 0x7F800000, 0xFF800000, 0x7FC00000, 0x7F7FFFFF, 0x3F800000, 0x00000001]
    bits[: min(size, len(special))] = special[:size]
    return bits.view(np.float32)


def step_in_pieces(optimizer: hs.Optimizer, length: int) -> None:
    """Take a step by rows of at most so many elements, as where arrays are longer."""
    sizes = unittest.mock.patch.object(plain, "_PIECE", length)
    with torch.no_grad(), sizes:
        optimizer.step_parameters([*optimizer._named()], "pieces")


def snapshot(optimizer: torch.optim.Optimizer) -> list[np.ndarray]:
    """Return every bit of an optimizer's weights and state, to be held against a later snapshot."""
    tensors = []
    for group in optimizer.param_groups:
        for p in group["params"]:
            state = optimizer.state.get(p, {})
            tensors.extend([p.detach(), *(state[key] for key in sorted(state))])
    return [x.contiguous().reshape(-1).view(torch.uint8).numpy().copy() for x in tensors]


def assert_same_snapshots(ours: list[np.ndarray], theirs: list[np.ndarray]) -> None:
    """Compare two snapshots byte by byte."""
    assert len(ours) == len(theirs)
    for i, (a, b) in enumerate(zip(ours, theirs, strict=True)):
        np.testing.assert_array_equal(a, b, err_msg=f"array {i}")


def assert_same_but_for_nan(ours: list[np.ndarray], theirs: list[np.ndarray]) -> None:
    """Compare snapshots of bfloat16: torch's cast of a NaN has other bits in vectors."""
    for a, b in zip(ours, theirs, strict=True):
        if len(a) % 2 == 0:
            a, b = (
                np.where((x.view(np.uint16) & 0x7FFF) > 0x7F80, 0x7FC0, x.view(np.uint16)) for x in (a, b)
            )
        np.testing.assert_array_equal(a, b)


SHAPES = {"a.w": (6, 5), "a.b": (5,), "scale": ()}


def parameters(dtype=torch.bfloat16, shapes=SHAPES):
    """Return named parameters: by default a matrix, a vector and a number."""
    generator = torch.Generator().manual_seed(0)
    drawn = {name: drawn_float32(shape, generator) for name, shape in shapes.items()}
    return [(name, torch.nn.Parameter(x.to(dtype))) for name, x in drawn.items()]


def drawn_float32(shape, generator):
    """Draw normal numbers in float32, whatever the default dtype is."""
    return torch.randn(shape, generator=generator, dtype=torch.float32)


def give_gradients(params, step):
    """Give named parameters the gradients of a step."""
    generator = torch.Generator().manual_seed(100 + step)
    for _, p in params:
        p.grad = drawn_float32(p.shape, generator).to(p.dtype)


def run(params, optimizer, steps):
    """Step named parameters by the gradients of each step."""
    for step in steps:
        give_gradients(params, step)
        optimizer.step()


def step_by_ones(optimizer):
    """Take a step by gradients of 1 of all parameters."""
    for group in optimizer.param_groups:
        for p in group["params"]:
            p.grad = torch.ones_like(p)
    optimizer.step()


def by_muon(optimizer: hs.Muon) -> dict[str, bool]:
    """Return of every parameter, by the name that it was given, whether it has the state of Muon."""
    groups = optimizer.param_groups
    names = {p: name for g in groups for p, name in zip(g["params"], g["param_names"], strict=True)}
    return {names[p]: "momentum_buffer" in plan.arrays for _, p, plan in optimizer.plans()}


def through_a_file(state_dict):
    """Return what a file of torch's, read with care, has of a state dict."""
    buffer = io.BytesIO()
    torch.save(state_dict, buffer)
    buffer.seek(0)
    return torch.load(buffer, weights_only=True)


UNIT = 2.0**-24


def norm_bound(n: int) -> float:
    """Return how far off a float32 norm of n elements is at most, relatively, in any order (contract L1)."""
    return (n / 2 + 2) * UNIT


def reals(shape, scale: float = 1.0, seed: int = 3) -> torch.Tensor:
    generator = torch.Generator().manual_seed(seed)
    return (torch.randn(shape, generator=generator, dtype=torch.float64) * scale).float()

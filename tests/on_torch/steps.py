"""What the tests of this folder share: settings of a step, inputs with every kind of number, runs."""

import dataclasses
import io
import itertools
import unittest.mock

import numpy as np
import torch

import halfstep_torch as hs
from backends.on_torch import from_torch, to_torch
from compare import assert_same
from halfstep_spec import ScaleByAdam, Step, decode, round_to
from halfstep_spec.numbers.random_words import random_words
from halfstep_spec.vectors import Array
from halfstep_torch.engine import row_plan
from halfstep_torch.engine.row_plan import RowSizes

SEED, LEAF = 2**33 + 7, "encoder/0/weight"
LR, DECAY = 1e-2, 0.1


@dataclasses.dataclass(frozen=True)
class Setting:
    """How weights and moments are stored, and how they are rounded ("n" to nearest, "s" stochastically)."""

    param: str
    mu: str
    nu: str
    mu_rounding: str
    nu_rounding: str
    storage: str
    decay: str = "decoupled"

    def __str__(self):
        return "-".join(dataclasses.astuple(self))

    def optimizer(self, params, **options):
        """Return the public class under this setting."""
        make = hs.AdamW if self.decay == "decoupled" else hs.Adam
        unchecked = {"nearest": "nearest_unchecked", "stochastic": "stochastic"}
        return make(
            params,
            lr=LR,
            weight_decay=DECAY,
            mu_dtype=self.mu,
            nu_dtype=self.nu,
            mu_rounding=unchecked[self.mu_rounding],
            nu_rounding=unchecked[self.nu_rounding],
            param_storage=self.storage,
            seed=SEED,
            **options,
        )

    def spec(self) -> Step:
        """Return the reference under this setting."""
        adam = ScaleByAdam(
            mu_dtype=self.mu,
            nu_dtype=self.nu,
            mu_rounding=self.mu_rounding,
            nu_rounding=self.nu_rounding,
            seed=SEED,
        )
        return Step(adam, DECAY, self.decay, self.param, self.storage)


DTYPES = ("bfloat16", "float16", "float32")
ROUNDINGS = ("nearest", "stochastic")
# float32 is not rounded: one of the two roundings is enough there.
MOMENTS = tuple((d, r) for d, r in itertools.product(DTYPES, ROUNDINGS) if (d, r) != ("float32", "nearest"))
# Plain float16 is refused as a second moment.
SECOND_MOMENTS = tuple((d, r) for d, r in MOMENTS if d != "float16")
GRID = tuple(
    Setting(p, mu, nu, mu_r, nu_r, storage)
    for p, (mu, mu_r), (nu, nu_r), storage in itertools.product(DTYPES, MOMENTS, SECOND_MOMENTS, ROUNDINGS)
)
DEFAULT = Setting("bfloat16", "bfloat16", "bfloat16", "stochastic", "stochastic", "stochastic")


def values(name: str, step: int, size: int, binades: int) -> np.ndarray:
    """Return float32 values of either sign, spread over binades around 2^-8, with special ones in front."""
    words = random_words(99, step, name, 0, (size,))
    exponent = np.uint32(119 - binades // 2) + (words >> np.uint32(8)) % np.uint32(binades)
    bits = (words & np.uint32(0x807FFFFF)) | (exponent << np.uint32(23))
    special = [0, 0x80000000, 0x7F800000, 0xFF800000, 0x7FC00000, 0x7F7FFFFF, 0x3F800000, 0x00000001]
    bits[: min(size, len(special))] = special[:size]
    return bits.view(np.float32)


def patterns(x: np.ndarray, dtype: str) -> np.ndarray:
    """Return float32 values as patterns of `dtype`, rounded to nearest."""
    return round_to(x, dtype)


def weights(setting: Setting, size: int) -> np.ndarray:
    """Return patterns of first weights, special values rolled against those of the gradients."""
    return np.roll(patterns(values("weights", 0, size, 20), setting.param), 3)


def gradient(setting: Setting, step: int, size: int) -> np.ndarray:
    """Return patterns of the gradient of a step."""
    return np.roll(patterns(values("gradients", step, size, 24), setting.param), 5 * step)


def spec_run(setting: Setting, steps: int, size: int, leaf: str = LEAF):
    """Return the patterns of weights, exp_avg and exp_avg_sq after so many steps of the reference."""
    reference, p = setting.spec(), weights(setting, size)
    state = reference.init(p)
    with np.errstate(all="ignore"):
        for t in range(1, steps + 1):
            g = decode(gradient(setting, t, size), setting.param)
            p, state = reference.step(p, g, state, leaf, LR)
    arrays = zip(
        (p, *(stored.codes for stored in state.rule.moments.values())),
        (setting.param, setting.mu, setting.nu),
        strict=True,
    )
    return [Array(dtype, array) for array, dtype in arrays]


def tensor(bits: np.ndarray, dtype: str, shape=None) -> torch.Tensor:
    """Return patterns as a tensor of its own memory."""
    x = to_torch(Array(dtype, bits.copy()))
    return x if shape is None else x.reshape(shape)


def torch_run(setting: Setting, steps: int, size: int, shape=None, **options):
    """Return the same as `spec_run`, of halfstep_torch."""
    p = torch.nn.Parameter(tensor(weights(setting, size), setting.param, shape))
    optimizer = setting.optimizer([(LEAF.replace("/", "."), p)], **options)
    for t in range(1, steps + 1):
        p.grad = tensor(gradient(setting, t, size), setting.param, shape)
        optimizer.step()
    state = optimizer.state[p]
    return [from_torch(x.reshape(-1)) for x in (p.detach(), state["exp_avg"], state["exp_avg_sq"])]


def assert_equal_runs(ours, theirs, context: str) -> None:
    """Compare weights and both moments to the bit."""
    for name, a, b in zip(("p", "exp_avg", "exp_avg_sq"), ours, theirs, strict=True):
        assert_same(a, b, f"{context}: {name}")


def step_in_pieces(optimizer: hs.Optimizer, length: int) -> None:
    """Take a step by rows of at most so many elements, as where arrays are longer."""
    sizes = unittest.mock.patch.object(row_plan, "row_sizes", return_value=RowSizes(length, length, length))
    with torch.no_grad(), sizes:
        optimizer.step_alone([*optimizer._named()], "pieces")


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


def parameters(dtype=torch.bfloat16):
    """Return named parameters: a matrix, a vector and a number."""
    generator = torch.Generator().manual_seed(0)
    shapes = {"a.w": (6, 5), "a.b": (5,), "scale": ()}
    return [
        (name, torch.nn.Parameter(torch.randn(shape, generator=generator).to(dtype)))
        for name, shape in shapes.items()
    ]


def run(params, optimizer, steps):
    """Step named parameters by gradients that the number of the step decides."""
    for step in steps:
        for i, (_, p) in enumerate(params):
            generator = torch.Generator().manual_seed(10 * step + i)
            p.grad = torch.randn(p.shape, generator=generator).to(p.dtype)
        optimizer.step()


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


def mlp(dtype=torch.bfloat16) -> torch.nn.Module:
    torch.manual_seed(0)
    layers = [torch.nn.Linear(6, 8), torch.nn.Tanh(), torch.nn.LayerNorm(8), torch.nn.Linear(8, 1)]
    return torch.nn.Sequential(*layers).to(dtype)


def inputs(step: int, dtype=torch.bfloat16) -> torch.Tensor:
    generator = torch.Generator().manual_seed(step)
    return torch.randn((16, 6), generator=generator).to(dtype)


def train(model, optimizer, steps, dtype=torch.bfloat16):
    for step in steps:
        optimizer.zero_grad()
        model(inputs(step, dtype)).square().mean().backward()
        optimizer.step()

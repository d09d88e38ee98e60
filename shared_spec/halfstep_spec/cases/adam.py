"""Adam: ten steps over the grid of param dtype, moment dtypes, roundings and decay."""

import functools
import itertools

import numpy as np

from halfstep_spec.adam import AdamState, ScaleByAdam
from halfstep_spec.aliases import AdamStep
from halfstep_spec.cases.inputs import reals
from halfstep_spec.formats import PLAIN_STATE_DTYPES
from halfstep_spec.random_words import seed_words
from halfstep_spec.rounding import decode, round_to
from halfstep_spec.vectors import Array, Case

NOTES = {
    "Default": "the roundings that users get: mu to nearest, nu stochastically",
    "Swapped": "mu stochastically, nu to nearest all the same (nearest_unchecked)",
    "L2": "decay enters the gradient, before the moments",
    "Nearest": "weights rounded to nearest by nobody but P1",
    "Variant": "nesterov, eps_root, other rates, a high seed",
    "Special": "gradients that are infinite, NaN, zero or so large that their square overflows",
}

_STEPS, _SIZE = 10, 16
_HYPERPARAMETERS = ("b1", "b2", "eps", "eps_root", "weight_decay")


def cases() -> list[Case]:
    """Return the cases of adam.json."""
    return [*_grid_cases(), *_variant_cases(), *_special_cases()]


def _grid_cases():
    dtypes = PLAIN_STATE_DTYPES
    roundings = {"Default": ("nearest", "stochastic"), "Swapped": ("stochastic", "nearest")}
    grid = itertools.product(dtypes, dtypes, dtypes, roundings.items(), ("decoupled", "l2"))
    for param, mu, nu, (flag, (mu_rounding, nu_rounding)), decay in grid:
        if flag == "Swapped" and mu == nu == "float32":
            continue  # float32 moments are not rounded: the same question twice
        adam = ScaleByAdam(
            mu_dtype=mu, nu_dtype=nu, mu_rounding=mu_rounding, nu_rounding=nu_rounding, seed=42
        )
        flags = (flag, "L2") if decay == "l2" else (flag,)
        yield trajectory(AdamStep(adam, 0.1, decay, param), "grid", flags)


def _variant_cases():
    low = functools.partial(ScaleByAdam, mu_dtype="bfloat16", nu_dtype="bfloat16")
    for param in PLAIN_STATE_DTYPES:
        yield trajectory(
            AdamStep(low(), 0.1, param_dtype=param, param_storage="nearest"),
            "nearest weights",
            ("Nearest",),
        )
    rows = {
        "no decay": (low(), 0.0),
        "nesterov": (low(nesterov=True), 0.1),
        "nesterov, float32": (ScaleByAdam(nesterov=True), 0.1),
        "eps_root": (low(eps=1e-6, eps_root=1e-4), 0.1),
        "rates that need no correction": (low(b1=0.0, b2=0.5), 0.1),
        "slow rates, both stochastic": (
            low(b1=0.999, b2=0.9999, mu_rounding="stochastic"),
            0.1,
        ),
        "a seed of two words": (low(seed=(123 << 32) + 456), 0.1),
    }
    for comment, (adam, weight_decay) in rows.items():
        yield trajectory(AdamStep(adam, weight_decay), comment, ("Variant",))


def _special_cases():
    inf, nan = float("inf"), float("nan")
    gradient = np.array(
        [0, -0.0, inf, -inf, nan, 3e38, -3e38, 2e19, 1, -1, 1e4, 0, 0, 1e-3, -1e-3, 2], np.float32
    )
    for dtype in ("float32", "bfloat16"):
        adam = ScaleByAdam(mu_dtype=dtype, nu_dtype=dtype)
        step = AdamStep(adam, 0.1, param_dtype=dtype)
        g = np.stack([gradient, *reals(f"special {dtype}", 2 * _SIZE, (-4, 0)).reshape(2, _SIZE)])
        p = round_to(reals("special weights", _SIZE, (-4, 0)), dtype)
        yield adam_case(
            step, f"special gradients, then ordinary ones; {dtype}", p, g, None, 1e-3, ("Special",), ("R6",)
        )


def trajectory(step: AdamStep, comment: str, flags: tuple[str, ...]) -> Case:
    """Return a case of ten steps from zero state with fresh gradients."""
    p = round_to(reals("trajectory weights", _SIZE, (-4, 0)), step.param_dtype)
    g = reals("trajectory gradients", _STEPS * _SIZE, (-5, 1)).reshape(_STEPS, _SIZE)
    a = step.adam
    moments = f"mu {a.mu_dtype} {a.mu_rounding}, nu {a.nu_dtype} {a.nu_rounding}"
    comment = f"{comment}: {step.param_dtype} weights, {moments}, {step.decay} decay"
    with np.errstate(under="raise"):  # contract A8: no float32 intermediate may be subnormal
        return adam_case(step, comment, p, g, None, 1e-3, flags, ("A5", "A6"))


def adam_case(step: AdamStep, comment, p, g, state: AdamState | None, lr, flags, clauses) -> Case:
    """Return a case of one step per row of `g`, from `state` (None: zeros).

    Args:
        step: what is asked.
        comment: why.
        p: patterns of the weights.
        g: float32 gradients, (steps, size); they reach the step in the weights' dtype.
        state: moments and count to start from.
        lr: the learning rate of every step.
        flags: of the case.
        clauses: of the contract.
    """
    adam, leaf = step.adam, "layers/0/kernel"
    state = state or adam.init(p.shape)
    gradients = round_to(g, step.param_dtype)
    inputs = {
        "p": Array.of(p, step.param_dtype),
        "g": Array.of(gradients, step.param_dtype),
        "count": Array.of(np.int32(state.count)),
        "mu": Array.of(state.mu, adam.mu_dtype),
        "nu": Array.of(state.nu, adam.nu_dtype),
        "seed": Array.of(np.array(seed_words(adam.seed))),
        "learning_rate": Array.of(np.float32(lr)),
    }
    values = {**vars(adam), "weight_decay": step.weight_decay}
    inputs |= {name: Array.of(np.float32(values[name])) for name in _HYPERPARAMETERS}
    rows = []
    with np.errstate(invalid="ignore", over="ignore"):
        for gradient in decode(gradients, step.param_dtype):
            p, state = step.step(p, gradient, state, leaf, lr)
            rows.append((p, state.mu, state.nu))
    p_out, mu_out, nu_out = (np.stack(column) for column in zip(*rows, strict=True))
    outputs = {
        "p": Array.of(p_out, step.param_dtype, "bits"),
        "mu": Array.of(mu_out, adam.mu_dtype, "bits"),
        "nu": Array.of(nu_out, adam.nu_dtype, "bits"),
    }
    arguments = {
        "leaf": leaf,
        "mu_dtype": adam.mu_dtype,
        "nu_dtype": adam.nu_dtype,
        "mu_rounding": adam.mu_rounding,
        "nu_rounding": adam.nu_rounding,
        "nesterov": adam.nesterov,
        "decay": step.decay,
        "param_storage": step.param_storage,
    }
    return Case("adam_step", comment, arguments, inputs, outputs, flags, clauses)

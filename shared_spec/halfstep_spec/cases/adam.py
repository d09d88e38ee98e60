"""Adam: ten steps over the grid of param dtype, moment dtypes, roundings and decay."""

import functools
import itertools

import numpy as np

from halfstep_spec.adam import ScaleByAdam
from halfstep_spec.aliases import AdamStep, StepState
from halfstep_spec.cases.inputs import reals
from halfstep_spec.formats import Format
from halfstep_spec.random_words import seed_words
from halfstep_spec.rounding import decode, round_to
from halfstep_spec.tables import TABLES
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
_DTYPES = ("float32", "bfloat16", "float16")
_HYPERPARAMETERS = ("b1", "b2", "eps", "eps_root", "weight_decay")


def cases() -> list[Case]:
    """Return the cases of adam.json."""
    return [*_grid_cases(), *_variant_cases(), *_special_cases()]


def _grid_cases():
    dtypes = _DTYPES
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
    for param in _DTYPES:
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


def adam_case(step: AdamStep, comment, p, g, state: StepState | None, lr, flags, clauses) -> Case:
    """Return a case of one step per row of `g`, from `state` (None: zeros).

    Args:
        step: what is asked.
        comment: why.
        p: patterns of the weights.
        g: float32 gradients, (steps, *shape); they reach the step in the weights' dtype.
        state: moments and count to start from.
        lr: the learning rate of every step.
        flags: of the case.
        clauses: of the contract.
    """
    adam, leaf = step.adam, "layers/0/kernel"
    state = state or step.init(p)
    gradients = round_to(g, step.param_dtype)
    inputs = {
        "g": Array.of(gradients, step.param_dtype),
        "count": Array.of(np.int32(state.adam.count)),
        "seed": Array.of(np.array(seed_words(adam.seed))),
        "learning_rate": Array.of(np.float32(lr)),
    }
    values = {**vars(adam), "weight_decay": step.weight_decay}
    inputs |= {name: Array.of(np.float32(values[name])) for name in _HYPERPARAMETERS}
    inputs |= stored_arrays(step, p, state)
    rows = []
    with np.errstate(invalid="ignore", over="ignore"):
        for gradient in decode(gradients, step.param_dtype):
            p, state = step.step(p, gradient, state, leaf, lr)
            rows.append(stored_arrays(step, p, state))
    outputs = {
        name: Array.of(np.stack([row[name].bits for row in rows]), array.dtype, "bits")
        for name, array in rows[0].items()
    }
    arguments = {
        "leaf": leaf,
        "mu_dtype": _argument(adam.mu_dtype),
        "nu_dtype": _argument(adam.nu_dtype),
        "mu_rounding": adam.mu_rounding,
        "nu_rounding": adam.nu_rounding,
        "nesterov": adam.nesterov,
        "decay": step.decay,
        "param_storage": step.param_storage,
    }
    return Case("adam_step", comment, arguments, inputs, outputs, flags, clauses)


def stored_arrays(step: AdamStep, p: np.ndarray, state: StepState) -> dict[str, Array]:
    """Return everything that a checkpoint of one leaf holds, but the count."""
    arrays = {"p": Array.of(p, step.param_dtype)}
    formats = step.adam.formats(p.shape)
    for name, fmt, stored in zip(("mu", "nu"), formats, (state.adam.mu, state.adam.nu), strict=True):
        arrays[name] = Array.of(stored.codes, fmt.code_dtype)
        if stored.scale is not None:
            arrays[f"{name}_scale"] = Array.of(stored.scale)
    if state.extra is not None:
        dtypes = {"compensated": "bfloat16", "master": "float32"}
        extra = state.extra.view(np.uint32) if step.param_storage == "master" else state.extra
        arrays["extra"] = Array.of(extra, dtypes.get(step.param_storage))
    return arrays


def _argument(dtype: str | Format) -> object:
    """Return a moment's dtype as plain data: a name, or the arguments of `scaled` or of `mapped`."""
    if isinstance(dtype, str):
        return dtype
    blocks = {name: getattr(dtype, name) for name in ("block_size", "min_size", "min_ndim")}
    return {"table" if dtype.dtype in TABLES else "dtype": dtype.dtype} | blocks

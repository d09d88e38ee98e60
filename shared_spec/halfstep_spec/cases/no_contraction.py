"""Inputs on which a compiler's favourite liberties show: one case for each, naming the clause that it breaks.

After WebAssembly's float_exprs.wast: every element is chosen so that the tempting variant of the step gives
other bits than the contract. The variants below exist to choose inputs; nothing is expected of their results.
"""

import dataclasses

import numpy as np

from halfstep_spec.cases.inputs import reals
from halfstep_spec.cases.steps import LEAF, step_case
from halfstep_spec.numbers.moments import bias_correction, ema
from halfstep_spec.rule import RuleState
from halfstep_spec.rules.adam import ScaleByAdam
from halfstep_spec.rules.step import Step, StepState
from halfstep_spec.storage.formats import Encoded
from halfstep_spec.storage.state_dtypes import as_format
from halfstep_spec.vectors import Case

NOTES = {
    "Fused": "a product and a sum contracted into one rounding",
    "Reassociated": "factors taken in another order",
    "Reciprocal": "a division where the contract multiplies by a reciprocal, or the other way round",
    "SkippedRounding": "a value read before it was rounded for storage",
    "Double": "a number that is computed in double precision and then rounded",
    "Approximate": "a function that is not correctly rounded",
}

_CANDIDATES, _KEPT = 4096, 16
_F = np.float32


@dataclasses.dataclass(frozen=True)
class _Temptation:
    """A liberty: its name, its flag, the clauses it breaks, and the setting in which it shows."""

    name: str
    flag: str
    clauses: tuple[str, ...]
    weight_decay: float = 0.0
    dtype: str = "float32"
    nesterov: bool = False
    eps_root: float = 0.0
    sees_weights: bool = False


_TEMPTATIONS = (
    _Temptation("fma(b1, mu, (1 - b1) g)", "Fused", ("A2", "M1")),
    _Temptation("fma(1 - b1, g, b1 mu)", "Fused", ("A2", "M1")),
    _Temptation("fma(b2, nu, (1 - b2) (g g))", "Fused", ("A2", "M1")),
    _Temptation("fma(1 - b2, g g, b2 nu)", "Fused", ("A2", "M1")),
    _Temptation("((1 - b2) g) g", "Reassociated", ("A2", "A5")),
    _Temptation("mu + (1 - b1) (g - mu)", "Reassociated", ("A2", "M1")),
    _Temptation("fma(nu, r2, eps_root)", "Fused", ("A2", "A5"), eps_root=0.3),
    _Temptation("fma(b1, mu r1', (1 - b1) (g r1))", "Fused", ("A2", "A5"), nesterov=True),
    _Temptation("fma(1 - b1, g r1, b1 (mu r1'))", "Fused", ("A2", "A5"), nesterov=True),
    _Temptation("1 - b1 from a double", "Double", ("A4", "M1")),
    _Temptation("1 - b2 from a double", "Double", ("A4", "M1")),
    _Temptation("mu / c1", "Reciprocal", ("A3",)),
    _Temptation("nu / c2", "Reciprocal", ("A3",)),
    _Temptation("(mu r1) (1 / denominator)", "Reciprocal", ("A3",)),
    _Temptation("(mu r1) rsqrt(nu r2), eps dropped", "Approximate", ("A3", "A5")),
    _Temptation("sqrt one unit too small", "Approximate", ("A3",)),
    _Temptation("1 - b^t by pow", "Approximate", ("M2",)),
    _Temptation("fma(weight_decay, p, u)", "Fused", ("A2", "D1"), 0.1, sees_weights=True),
    _Temptation("fma(-lr, u, p)", "Fused", ("A2", "D2", "P1"), sees_weights=True),
    _Temptation("(1 - lr weight_decay) p - lr u", "Reassociated", ("A2", "A6"), 0.1, sees_weights=True),
    _Temptation("u from mu before it was stored", "SkippedRounding", ("A5",), dtype="bfloat16"),
    _Temptation("u from nu before it was stored", "SkippedRounding", ("A5",), dtype="bfloat16"),
)


def cases() -> list[Case]:
    """Return the cases of no_contraction.json."""
    return [_case(temptation) for temptation in _TEMPTATIONS]


def _case(temptation: _Temptation) -> Case:
    adam = ScaleByAdam(
        mu_dtype=temptation.dtype,
        nu_dtype=temptation.dtype,
        mu_rounding="nearest",
        nu_rounding="nearest",
        nesterov=temptation.nesterov,
        eps_root=temptation.eps_root,
    )
    step = Step(adam, temptation.weight_decay, param_dtype="float32", param_storage="nearest")
    lr = 0.9 if temptation.sees_weights else 2.0**-10  # a power of two keeps every bit of u in sight
    p, g, m, v = _candidates(temptation)
    fmt = as_format(temptation.dtype)
    state = RuleState(6, {"mu": fmt.encode(m, None), "nu": fmt.encode(v, None)})
    right = _tempted("", step, p, g, state, lr)
    wrong = _tempted(temptation.name, step, p, g, state, lr)
    shows = np.any(
        [a.view(np.uint32) != b.view(np.uint32) for a, b in zip(right, wrong, strict=True)], axis=0
    )
    keep = np.flatnonzero(shows)[:_KEPT]
    if keep.size < _KEPT:
        raise ValueError(
            f"no_contraction: only {keep.size} candidates show {temptation.name!r}. Widen the candidates."
        )
    kept = {name: Encoded(stored.codes[keep], None) for name, stored in state.moments.items()}
    state = StepState(RuleState(state.count, kept), None)
    case = step_case(
        step,
        f"tempting: {temptation.name}",
        p[keep].view(np.uint32),
        g[None, keep],
        state,
        lr,
        (temptation.flag,),
        temptation.clauses,
    )
    _must_agree(case, [array[keep] for array in right])
    return case


def _candidates(temptation: _Temptation):
    name = temptation.name
    p = reals(f"{name} p", _CANDIDATES, (-3, 0)) if temptation.sees_weights else np.zeros(_CANDIDATES, _F)
    g, m = reals(f"{name} g", _CANDIDATES, (-3, 2)), reals(f"{name} m", _CANDIDATES, (-3, 2))
    return p, g, m, np.abs(reals(f"{name} v", _CANDIDATES, (-9, -4)))


def _must_agree(case: Case, right: list[np.ndarray]) -> None:
    """Hold the step below, with no temptation, against the spec's own: else the choice means nothing."""
    p, mu, nu = (array.view(np.uint32) for array in right)
    ours = [case.outputs["p"].bits[0]]
    theirs = [p]
    if case.outputs["mu"].dtype == "float32":
        ours += [case.outputs["mu"].bits[0], case.outputs["nu"].bits[0]]
        theirs += [mu, nu]
    if not all(np.array_equal(a, b) for a, b in zip(ours, theirs, strict=True)):
        raise ValueError(f"no_contraction: {case.comment}: the untempted step is not the spec's.")


def _fma(a, b, c) -> np.ndarray:
    """Return a b + c rounded once: the product is exact in float64, and float64's rounding hardly shows."""
    wide = [np.asarray(x, np.float64) for x in (a, b, c)]
    return np.asarray(wide[0] * wide[1] + wide[2], _F)


def _tempted(name: str, step: Step, p, g, state: RuleState, lr):
    """Return (p, mu, nu) after one step that takes the liberty `name`, or none."""
    adam, t = step.rule, state.count + 1
    assert isinstance(adam, ScaleByAdam)
    m, v = (moment.decode(state.moments[name], state.count, LEAF) for name, moment in adam.moments.items())
    m, v = _tempted_moments(name, adam, g, m, v)
    stored = tuple(as_format(adam.mu_dtype).decode(as_format(adam.mu_dtype).encode(x, None)) for x in (m, v))
    m = m if name == "u from mu before it was stored" else stored[0]
    v = v if name == "u from nu before it was stored" else stored[1]
    u = _tempted_update(name, adam, g, m, v, t)
    return _tempted_weights(name, step, p, u, _F(lr)), *stored


def _tempted_moments(name: str, adam: ScaleByAdam, g, m, v):
    b1, b2, c1, c2 = _F(adam.b1), _F(adam.b2), _F(1) - _F(adam.b1), _F(1) - _F(adam.b2)
    new_m = {
        "fma(b1, mu, (1 - b1) g)": lambda: _fma(b1, m, c1 * g),
        "fma(1 - b1, g, b1 mu)": lambda: _fma(c1, g, b1 * m),
        "mu + (1 - b1) (g - mu)": lambda: m + c1 * (g - m),
        "1 - b1 from a double": lambda: b1 * m + _F(1 - adam.b1) * g,
    }.get(name, lambda: ema(m, g, b1))
    new_v = {
        "fma(b2, nu, (1 - b2) (g g))": lambda: _fma(b2, v, c2 * (g * g)),
        "fma(1 - b2, g g, b2 nu)": lambda: _fma(c2, g * g, b2 * v),
        "((1 - b2) g) g": lambda: b2 * v + (c2 * g) * g,
        "1 - b2 from a double": lambda: b2 * v + _F(1 - adam.b2) * (g * g),
    }.get(name, lambda: ema(v, g * g, b2))
    return new_m(), new_v()


def _tempted_update(name: str, adam: ScaleByAdam, g, m, v, t: int):
    b1, eps, eps_root = _F(adam.b1), _F(adam.eps), _F(adam.eps_root)
    c1, c1_next, c2 = (bias_correction(b, k) for b, k in ((adam.b1, t), (adam.b1, t + 1), (adam.b2, t)))
    if name == "1 - b^t by pow":
        c1, c2 = _F(1) - b1**t, _F(1) - _F(adam.b2) ** t
    r1, r1_next, r2 = (_F(1) / c for c in (c1, c1_next, c2))
    m_hat = m / c1 if name == "mu / c1" else m * r1
    if adam.nesterov:
        first, second = m * r1_next, g * r1
        m_hat = {
            "fma(b1, mu r1', (1 - b1) (g r1))": lambda: _fma(b1, first, (_F(1) - b1) * second),
            "fma(1 - b1, g r1, b1 (mu r1'))": lambda: _fma(_F(1) - b1, second, b1 * first),
        }.get(name, lambda: ema(first, second, b1))()
    v_hat = {
        "nu / c2": lambda: v / c2 + eps_root,
        "fma(nu, r2, eps_root)": lambda: _fma(v, r2, eps_root),
    }.get(name, lambda: v * r2 + eps_root)()
    root = np.sqrt(v_hat)
    if name == "sqrt one unit too small":
        root = np.nextafter(root, _F(0))
    return {
        "(mu r1) (1 / denominator)": lambda: m_hat * (_F(1) / (root + eps)),
        "(mu r1) rsqrt(nu r2), eps dropped": lambda: m_hat * (1 / np.sqrt(np.float64(v_hat))).astype(_F),
    }.get(name, lambda: m_hat / (root + eps))()


def _tempted_weights(name: str, step: Step, p, u, lr):
    weight_decay = _F(step.weight_decay)
    if name == "(1 - lr weight_decay) p - lr u":
        return (_F(1) - lr * weight_decay) * p - lr * u
    if name == "fma(weight_decay, p, u)":
        u = _fma(weight_decay, p, u)
    elif step.weight_decay:
        u = u + weight_decay * p
    return _fma(-lr, u, p) if name == "fma(-lr, u, p)" else p + (-lr) * u

"""What 16 bits cost a run: updates and decay that rounding drops, moments that freeze, norms that are wrong.

Nothing here knows how a transform works. It takes trial steps: as it is, and with gradients of zero. What
they leave where it was is what would be lost.
"""

import collections
import dataclasses
from collections.abc import Iterable, Mapping
from typing import Any

import jax
import jax.numpy as jnp
import optax

from halfstep_jax.leaves import check_params, leaf_name
from halfstep_jax.numbers.global_norm import global_norm
from halfstep_jax.weights.params import CompensateState, RoundStochasticallyState
from halfstep_jax.weights.wide_params import KeepMasterParamsState, SplitParamsState

_FUNCTION = "diagnose"
_NARROW = (jnp.bfloat16, jnp.float16)
_KEEPERS = (RoundStochasticallyState, CompensateState, SplitParamsState, KeepMasterParamsState)
# The names of second moments, and of the first ones beside them.
_PAIRS = {"nu": "mu"}
# Fields of states that hold part of the weights, or gradients.
_NO_MOMENTS = ("compensation", "extra", "master", "acc_grads")


@dataclasses.dataclass(frozen=True)
class MomentDiagnosis:
    """How one kind of moment fares.

    Attributes:
        dtypes: how many elements are kept in each dtype.
        frozen: share of them that cannot shrink: one step without a gradient takes nothing off them. (Of
            codes with scales nothing is said.)
        zero: of a second moment, the share that is zero where the first one is not.
    """

    dtypes: dict[str, int]
    frozen: float
    zero: float = 0.0


@dataclasses.dataclass(frozen=True)
class Diagnosis:
    """What `diagnose` returns; `print` shows it as a table.

    Attributes:
        updates_lost: share of the updates of 16-bit weights that are not zero and move nothing; 0 where they
            are rounded stochastically, or what is lost is kept.
        decay_lost: the same of weight decay alone; None where there is none.
        leaves: `updates_lost` of each 16-bit weight, by name.
        moments: of every kind of moment, by its name in the state.
        norm: of all gradients, in float32, and
        plain_norm: as `optax.global_norm` has it.
        advice: a line for each thing found; none where all is well.
    """

    updates_lost: float
    decay_lost: float | None
    leaves: dict[str, float]
    moments: dict[str, MomentDiagnosis]
    norm: float
    plain_norm: float
    advice: tuple[str, ...]

    def __str__(self) -> str:
        decay = "none" if self.decay_lost is None else f"{self.decay_lost:.1%}"
        rows = [("updates lost", f"{self.updates_lost:.1%}"), ("decay lost", decay)]
        rows += [(f"  {name}", f"{lost:.1%}") for name, lost in _worst(self.leaves)]
        for name, one in self.moments.items():
            kinds = ", ".join(one.dtypes)
            rows.append((name, f"{kinds}; frozen {one.frozen:.1%}; zero {one.zero:.1%}"))
        rows.append(("norm of gradients", f"{self.norm:.6g} (optax.global_norm has {self.plain_norm:.6g})"))
        width = max(len(name) for name, _ in rows)
        table = [f"{name:<{width}}  {value}" for name, value in rows]
        return "\n".join([*table, *(f"- {line}" for line in self.advice or ("Nothing is lost.",))])


def diagnose(tx: optax.GradientTransformation, params: Any, grads: Any, state: Any = None) -> Diagnosis:
    """Say what rounding would lose in the next step of any Optax transform, of this package or not.

    Best after some steps of training, with their state. The transform takes three trial steps: with these
    gradients, and with gradients of zero from a fresh state and from one of ones, from which decay and the
    rates of moments show. Not under `jax.jit`.

    An update counts as lost if it is not zero and `optax.apply_updates` leaves the weight where it is.
    Stochastic rounding moves few weights too, but by the right amount on average, and `compensate`,
    `split_params` and `keep_master_params` add later what rounding loses: their updates are not lost.
    Float32 weights lose nothing.

    Args:
        tx: the transform that trains.
        params: the weights.
        grads: of the next step.
        state: of `tx`; None for a fresh one.

    Returns:
        A `Diagnosis`; `print` shows it.

    Raises:
        TypeError: if a weight is not float32, bfloat16 or float16.

    Example:
        >>> params = {"w": jnp.ones((64, 64), jnp.bfloat16)}
        >>> diagnose(optax.adamw(1e-5), params, params).updates_lost
        1.0

    Source: ours.
    """
    check_params(_FUNCTION, params)
    state = tx.init(params) if state is None else state
    lost = _lost(params, tx.update(grads, state, params)[0], state)
    zeros = jax.tree.map(jnp.zeros_like, grads)
    decay = _decay(tx, params, zeros)
    decays = any(bool((u != 0).any()) for u in jax.tree.leaves(decay))
    found = (
        _share(lost.values()),
        _share(_lost(params, decay, state).values()) if decays else None,
        {name: _share([count]) for name, count in lost.items()},
        _moments(tx, params, zeros, state),
        float(global_norm(jax.tree.leaves(grads), exact=False)),
        float(optax.tree.norm(grads)),
    )
    return Diagnosis(*found, advice=_advice(*found))


def _decay(tx: optax.GradientTransformation, params, zeros):
    """Return the updates that weights get without gradients because of what they are: zero where none.

    What a first step does to weights of zero too, such as by averages that do not start at zero, is no decay.
    """
    nothing = jax.tree.map(jnp.zeros_like, params)
    decayed, other = (tx.update(zeros, tx.init(p), p)[0] for p in (params, nothing))
    return jax.tree.map(lambda u, v: jnp.where(u == v, jnp.zeros_like(u), u), decayed, other)


Count = tuple[int, int]


def _lost(params, updates, state) -> dict[str, Count]:
    """Return of every 16-bit weight how many elements stay where they are, of how many with an update."""
    keeps = _keeps(state)
    named = jax.tree_util.tree_flatten_with_path(params)[0]
    us, after = (jax.tree.leaves(tree) for tree in (updates, optax.apply_updates(params, updates)))
    counts = {}
    for (path, p), u, new in zip(named, us, after, strict=True):
        if p.dtype in _NARROW:
            lost = 0 if keeps else int(((u != 0) & (new == p)).sum())
            counts[leaf_name(path)] = lost, p.size if keeps else int((u != 0).sum())
    return counts


def _keeps(state) -> bool:
    """Whether weights are rounded stochastically, or what rounding loses is kept."""
    nodes = jax.tree.leaves(state, is_leaf=lambda x: isinstance(x, _KEEPERS))
    return any(isinstance(node, _KEEPERS) for node in nodes)


def _share(counts: Iterable[Count]) -> float:
    """Return which share of what has an update is lost."""
    lost, of = zip((0, 0), *counts, strict=True)
    return sum(lost) / max(sum(of), 1)


def _moments(tx, params, zeros, state) -> dict[str, MomentDiagnosis]:
    """Return how the moments fare, by name: rates show in what a step without a gradient leaves of them."""
    shapes = {p.shape for p in jax.tree.leaves(params)}
    paths, treedef = jax.tree_util.tree_flatten_with_path(state)
    names = [_moment_name(path) if getattr(x, "shape", ()) in shapes else "" for path, x in paths]
    asked = [bool(name) and x.dtype in _NARROW for name, (_, x) in zip(names, paths, strict=True)]
    ones = [_above_one(x) if one else x for one, (_, x) in zip(asked, paths, strict=True)]
    nothing = jax.tree.map(jnp.zeros_like, params)
    left = jax.tree.leaves(tx.update(zeros, treedef.unflatten(ones), nothing)[1])
    fates: dict[str, _Fate] = collections.defaultdict(_Fate)
    for name, (path, x), one, now in zip(names, paths, asked, left, strict=True):
        if name:
            shrinks = bool((now != _above_one(x)).any()) if one else True
            fates[name].note(x, jax.tree_util.keystr(path[:-1]), shrinks)
    by_path = {leaf_name(path): x for path, x in paths}
    for path, x in by_path.items():
        parts = path.split("/")
        for second, first in _PAIRS.items():
            other = by_path.get("/".join(first if part == second else part for part in parts))
            if second in parts and other is not None and jnp.issubdtype(other.dtype, jnp.floating):
                fates[second].zero += int(((x == 0) & (other != 0)).sum())
    return {name: fate.diagnosis for name, fate in fates.items()}


def _above_one(x: jax.Array) -> jax.Array:
    """Return the next number above 1 throughout: there the gap below is the largest share of the number."""
    return jnp.full_like(x, 1 + jnp.finfo(x.dtype).eps)


def _moment_name(path) -> str:
    """Return the field of an Optax state in which an array stands; "" if it is part of the weights."""
    fields = [key.name for key in path if isinstance(key, jax.tree_util.GetAttrKey)]
    fields = [name for name in fields if name != "inner_state" and not name.endswith("_scale")]
    return "" if not fields or fields[-1] in _NO_MOMENTS else fields[-1]


class _Fate:
    """What is known of one kind of moment."""

    def __init__(self):
        self.dtypes: dict[str, int] = collections.defaultdict(int)
        self.zero = 0
        # The arrays of a state have one rate. Of few elements that are rounded stochastically, none may
        # happen to shrink.
        self._sizes: dict[str, int] = collections.defaultdict(int)
        self._shrinks: dict[str, bool] = collections.defaultdict(bool)

    def note(self, x: jax.Array, place: str, shrinks: bool) -> None:
        """Note of an array, and of its place in the state, whether any element has shrunk."""
        self.dtypes[x.dtype.name] += x.size
        self._sizes[place] += x.size
        self._shrinks[place] |= shrinks

    @property
    def diagnosis(self) -> MomentDiagnosis:
        """What is told of it."""
        total = max(sum(self.dtypes.values()), 1)
        frozen = sum(size for place, size in self._sizes.items() if not self._shrinks[place])
        return MomentDiagnosis(dict(self.dtypes), frozen / total, self.zero / total)


def _worst(leaves: Mapping[str, float]) -> list[tuple[str, float]]:
    """Return the five leaves that lose most."""
    return sorted(((name, lost) for name, lost in leaves.items() if lost), key=lambda one: -one[1])[:5]


def _advice(
    updates_lost: float,
    decay_lost: float | None,
    leaves: Mapping[str, float],
    moments: Mapping[str, MomentDiagnosis],
    norm: float,
    plain_norm: float,
) -> tuple[str, ...]:
    """Return a line for each thing found."""
    lines = []
    if updates_lost > 0.05 or (decay_lost or 0) > 0.05:
        decay = f" and {decay_lost:.0%} of the decay" if decay_lost else ""
        lines.append(
            f"Rounding drops {updates_lost:.0%} of the updates{decay}. Use a transform of halfstep_jax, or "
            "its round_stochastically as the last link. A learning rate that was tuned while weights stood "
            "still is too high without that: try a lower one."
        )
    for name, one in moments.items():
        if one.frozen > 0.05:
            lines.append(
                f"{one.frozen:.0%} of {name} cannot shrink: 1 - its rate is below half a gap of its dtype. "
                "Keep it in float32, or round it stochastically, as halfstep_jax does."
            )
        if one.zero > 0.01:
            lines.append(
                f"{one.zero:.0%} of {name} is zero where {_PAIRS[name]} is not: they move by mu / eps. "
                "Keep it in a dtype with the range of float32, such as bfloat16."
            )
    if abs(plain_norm - norm) > 0.01 * norm:
        lines.append(
            f"The norm of the gradients is {norm:.4g}; optax.global_norm takes it for {plain_norm:.4g}. "
            "Clip by clip_by_global_norm of halfstep_jax."
        )
    return tuple(lines)

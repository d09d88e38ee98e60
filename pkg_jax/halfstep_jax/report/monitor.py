"""A monitor of a run: every N steps it measures on the device the losses by rounding."""

import functools
from typing import Any

import jax
import jax.numpy as jnp
import optax
from jax.core import Tracer

from halfstep import monitor
from halfstep.description import WEIGHT
from halfstep.diagnosis import Ends
from halfstep.monitor import corner, say
from halfstep.rules.fed_back import rate_that_rose
from halfstep.weight_storage import FED_BACK
from halfstep_jax.leaf_calls import Tree
from halfstep_jax.leaves import named_leaves
from halfstep_jax.report.description import describe, leaf_at_end, weights_that_links_store
from halfstep_jax.report.moment_probe import NARROW, PAIRS, SUMS
from halfstep_jax.storage.ends import count_at_ends, moment_pairs
from halfstep_jax.storage.format_tag import check_tags
from halfstep_jax.weights.chain_check import chain_fault

_INJECTED = "hyperparams/"
_KNOW_THE_RATE = "Pass the largest rate of the run as peak_lr, or the whole schedule as learning_rate."


class Monitor(monitor.Monitor):  # noqa: D101 (its base has it)
    _package = "halfstep_jax"
    _second = next(iter(PAIRS))

    def __init__(self, tx: optax.GradientTransformation, every: int = 100, **extra_args: object):
        super().__init__(every)
        self._tx, self._extra_args = tx, extra_args
        self._measure: Any = None  # a compiled function, once described
        self._made: Tree = None  # the state that tx makes, as shapes
        self._formats: dict[tuple[str, str], str] = {}
        self._feeds_back, self._largest_rate = False, 0.0

    def read(self, params: Tree, state: Tree) -> dict[str, float] | None:
        """Return the numbers of the last step at every `every`-th call, else None.

        Args:
            params: the weights after the step.
            state: of `tx` after the step.

        Raises:
            TypeError: inside a function that JAX traces, such as under `jax.jit`: it would measure nothing.
            ValueError: if `state` is of a recipe other than that of `tx`.
        """
        if any(isinstance(x, Tracer) for x in jax.tree.leaves((params, state))):
            raise TypeError(
                "Monitor: read is inside a function that JAX traces, and would run once, without numbers. "
                "Call it in the training loop, with the params and state that the compiled step returns."
            )
        return self._row(params, state)

    def _corners(self, params: Tree, state: Tree) -> list[jax.Array]:
        return _corners(params)

    def _measured(self, before: Tree, params: Tree, state: Tree) -> list[float]:
        self._describe(params)
        check_tags("Monitor", self._made, state)
        self._watch_rate(state)
        return jax.device_get(self._measure(before, params, state)).tolist()

    def _watch_rate(self, state: Tree) -> None:
        """Say once that a rate of `inject_hyperparams` rose far above its `peak_lr`."""
        injected = {
            path.rpartition("/")[2]: float(jnp.max(x)) for path, x in named_leaves(state) if _INJECTED in path
        }
        if self._feeds_back and {"learning_rate", "peak_lr"} <= injected.keys():
            known = max(injected["peak_lr"], self._largest_rate)
            say(self._package, {"rate": rate_that_rose(injected["learning_rate"], known, _KNOW_THE_RATE)})
            self._largest_rate = max(injected["learning_rate"], self._largest_rate)

    def _ends(self, params: Tree, state: Tree) -> dict[str, dict[str, Ends]]:
        self._describe(params)
        ends: dict[str, dict[str, Ends]] = {}
        by_path = dict(named_leaves(state))
        pairs = [
            (self._formats.get((leaf, name), ""), leaf, x, other)
            for leaf, name, x, other in moment_pairs(by_path, PAIRS)
        ]
        if pairs:
            texts, leaves, *arrays = zip(*pairs, strict=True)
            counts = jax.device_get(_count_ends(texts, *arrays)).tolist()
            for text, leaf, x, (low, high) in zip(texts, leaves, arrays[0], counts, strict=True):
                ends.setdefault(text, {})[leaf] = (low, high, x.size)
        return ends

    def _describe(self, params: Tree) -> None:
        """Ask once which weights a link stores, and in which formats moments are kept."""
        if self._measure is not None:
            return
        self._made = jax.eval_shape(self._tx.init, params)
        fault = chain_fault(self._tx, params, self._extra_args)
        stored = weights_that_links_store(self._tx, params) - (fault.leaves if fault else frozenset())
        rows = describe(self._tx, params, **self._extra_args).arrays
        self._feeds_back = any(row.name == WEIGHT and row.rounding == FED_BACK for row in rows)
        self._formats = {(row.leaf, row.name): row.format for row in rows if row.name != WEIGHT}
        self._measure = jax.jit(functools.partial(_measured, stored))


@functools.partial(jax.jit, static_argnums=0)
def _count_ends(texts: tuple[str, ...], second, first) -> jax.Array:
    """Return int32 rows: how many second moments of each weight are at their smallest and largest number."""
    rows = [count_at_ends(*of_weight) for of_weight in zip(texts, second, first, strict=True)]
    return jnp.stack([jnp.stack([jnp.asarray(x, jnp.int32) for x in row]) for row in rows])


@jax.jit
def _corners(params) -> list[jax.Array]:
    """Return copies of the first elements of each weight: the next step may donate the weights."""
    return [jnp.copy(p[corner(p.shape)]) for p in jax.tree.leaves(params)]


def _measured(stored: set[str], before, params, state) -> jax.Array:
    """Return lost updates as a share, the squares of both norms, and how many weights are not finite."""
    moments, taken = _moments_by_leaf(params, state), _is_taken(state)
    sums = [jnp.zeros(5)]
    for old, (name, p) in zip(before, named_leaves(params), strict=True):
        now, kept = p[corner(p.shape)], [x[corner(x.shape)] for x in moments[name]]
        due = functools.reduce(jnp.logical_or, [x != 0 for x in kept]) if kept else jnp.ones(now.shape, bool)
        due &= taken
        counts = p.dtype in NARROW
        lost = due & (now == old) if counts and name not in stored else jnp.zeros(now.shape, bool)
        moved, scale = now.astype(jnp.float32) - old.astype(jnp.float32), p.size / max(now.size, 1)
        p32 = p.astype(jnp.float32)
        of_each = [lost, due & counts, moved**2, p32**2, ~jnp.isfinite(p32)]
        shares = jnp.array([scale, scale, scale, 1, 1], jnp.float32)
        sums.append(jnp.stack([x.sum(dtype=jnp.float32) for x in of_each]) * shares)
    lost, due, moved, weights, nonfinite = jnp.stack(sums).sum(0)
    return jnp.stack([lost / jnp.maximum(due, 1), moved, weights, nonfinite])


def _is_taken(state) -> jax.Array:
    """Return whether the last call of `update` was meant to move weights.

    It was not while `optax.MultiSteps` or `accumulate_gradients` adds gradients, nor if `apply_if_finite` or
    `skip_nonfinite` left the step out.
    """
    taken = jnp.array(True)
    for path, x in named_leaves(state):
        field = path.rsplit("/", 1)[-1]
        if field == "mini_step":
            taken &= (x == 0).all()
        elif field == "last_finite":
            taken &= x.all()
    return taken


def _moments_by_leaf(params, state) -> dict[str, list[jax.Array]]:
    """Return the float arrays in a state that are like each weight, but sums of gradients, by weight."""
    weights = dict(named_leaves(params))
    moments: dict[str, list[jax.Array]] = {name: [] for name in weights}
    for path, x in named_leaves(state):
        leaf = leaf_at_end(path, weights)
        shape = getattr(x, "shape", None)
        if not {*SUMS}.isdisjoint(path.split("/")):
            continue
        if leaf in weights and shape == weights[leaf].shape and jnp.issubdtype(x.dtype, jnp.floating):
            moments[leaf].append(x)
    return moments

"""A monitor of a run: every N steps it measures on the device what rounding loses."""

import functools
from collections.abc import Callable

import jax
import jax.numpy as jnp
import optax

from halfstep import monitor
from halfstep.description import WEIGHT
from halfstep.monitor import NUMBERS, corner
from halfstep_jax.description import describe, leaf_at_end, weights_that_links_store
from halfstep_jax.leaf_calls import Tree
from halfstep_jax.leaves import named_leaves
from halfstep_jax.moment_probe import NARROW, PAIRS, SUMS
from halfstep_jax.storage.ends import count_at_ends, moment_pairs
from halfstep_jax.weights.chain_check import chain_fault


class Monitor(monitor.Monitor):  # noqa: D101 (its base has it)
    _package = "halfstep_jax"
    _second = next(iter(PAIRS))

    def __init__(self, tx: optax.GradientTransformation, every: int = 100, **extra_args: object):
        super().__init__(every)
        self._tx, self._extra_args = tx, extra_args
        self._measure = None
        self._formats: dict[tuple[str, str], str] = {}

    def read(self, params: Tree, state: Tree) -> dict[str, float] | None:
        """Return the numbers of the last step at every `every`-th call, else None.

        Args:
            params: the weights after the step.
            state: of `tx` after the step.

        Raises:
            TypeError: inside a function that JAX traces, such as under `jax.jit`: it would measure nothing.
        """
        if any(isinstance(x, jax.core.Tracer) for x in jax.tree.leaves((params, state))):
            raise TypeError(
                "Monitor: read is inside a function that JAX traces, and would run once, without numbers. "
                "Call it in the training loop, with the params and state that the compiled step returns."
            )
        return self._row(params, state)

    def _corners(self, params: Tree, state: Tree) -> list[jax.Array]:
        return _corners(params)

    def _measured(self, before: Tree, params: Tree, state: Tree) -> tuple[list[float], set[str]]:
        measure = self._measure or self._compiled(params)
        numbers = jax.device_get(measure(before, params, state)).tolist()
        return numbers, {text for (_, name), text in self._formats.items() if name in PAIRS}

    def _compiled(self, params: Tree) -> Callable:
        fault = chain_fault(self._tx, params, self._extra_args)
        stored = weights_that_links_store(self._tx, params) - (fault.leaves if fault else frozenset())
        rows = describe(self._tx, params, **self._extra_args).arrays
        self._formats = {(row.leaf, row.name): row.format for row in rows if row.name != WEIGHT}
        self._measure = jax.jit(functools.partial(_measured, stored, self._formats))
        return self._measure


@jax.jit
def _corners(params) -> list[jax.Array]:
    """Return copies of the first elements of each weight: the next step may donate the weights."""
    return [jnp.copy(p[corner(p.shape)]) for p in jax.tree.leaves(params)]


def _measured(stored: set[str], formats: dict[tuple[str, str], str], before, params, state) -> jax.Array:
    """Return the numbers of a step, in the order of `NUMBERS`, norms as squares."""
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
    second = list(moment_pairs(dict(named_leaves(state)), PAIRS))
    counts = [count_at_ends(formats.get((leaf, name), ""), x, other) for leaf, name, x, other in second]
    size = max(sum(x.size for _, _, x, _ in second), 1)
    ends = (jnp.asarray(sum(x), jnp.float32) / size for x in zip((0, 0), *counts, strict=True))
    numbers = jnp.stack([lost / jnp.maximum(due, 1), moved, weights, *ends, nonfinite])
    assert numbers.shape == (len(NUMBERS),)
    return numbers


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

"""Train two small models with any optimizer, and compare paths with float32's.

*Digits*: a 64-128-128-10 network on scikit-learn's bundled digits, batches of 128, four seeds. *Transformer*:
the demo's character transformer (`examples/`), three seeds. Seeds are of the first weights, the batches and
the random words. Of each setting the row has: *bytes* of weights and state per parameter, counted from the
arrays, and those of the *state* alone; *loss*, that of training on digits and that on validation text of the
transformer; *over*, the same less float32's; *dist* = |w - w32| / |w32 - w0|; *proj*, the projection of the
movement on float32's. Figures are means over seeds, and spreads are standard deviations.
"""

import contextlib
import dataclasses
import functools
import pathlib
import sys
from collections.abc import Callable, Iterable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
from flax import nnx
from sklearn.datasets import load_digits
from tqdm import tqdm

import halfstep_jax as hs

# Behind this folder, whose `report` is another than that of the examples.
sys.path.append(str(pathlib.Path(__file__).parents[1] / "examples"))

import recipe as demo
import train_flax
from text import load_text

BATCH, LR, DECAY, SIZES = 128, 1e-3, 0.01, (64, 128, 128, 10)
Transform = optax.GradientTransformation
Known = Callable[[Any, Any], Any]
"""What returns the weights that are judged, from the model's and the state."""


@dataclasses.dataclass(frozen=True)
class Ends:
    """How the seeds of a run end.

    Attributes:
        start: first weights, (seeds, parameters).
        end: last weights.
        losses: one per seed.
        bytes: of weights and state per parameter.
        state: bytes of the state alone.
    """

    start: np.ndarray
    end: np.ndarray
    losses: np.ndarray
    bytes: float
    state: float

    def beside(self, truth: "Ends") -> dict[str, float]:
        """Return the figures of a run, and how it compares with float32's."""
        moved = truth.end - truth.start
        length, over = np.linalg.norm(moved, axis=1), self.losses - truth.losses
        dist = np.linalg.norm(self.end - truth.end, axis=1) / length
        proj = ((self.end - self.start) * moved).sum(1) / length**2
        figures = {"bytes": self.bytes, "state": self.state, "loss": float(self.losses.mean())}
        for name, values in (("over", over), ("dist", dist), ("proj", proj)):
            spread = "spread" if name == "dist" else f"{name} spread"
            figures |= {name: float(values.mean()), spread: float(values.std())}
        return figures


@dataclasses.dataclass(frozen=True)
class Task:
    """A model, its data and how long it is trained.

    Attributes:
        steps: of a whole run.
        seeds: how many.
    """

    steps: int = 1500
    seeds: int = 4

    def rate(self, rate: float) -> optax.Schedule:
        """Return the schedule of a rate that is meant for digits: a cosine from it to 0."""
        return optax.cosine_decay_schedule(rate, self.steps)

    def train(self, tx: Transform, known: Known, weights: str, order: int, alike: bool = False) -> Ends:
        """Train all seeds; `order` shuffles batches, and `alike` gives all seeds the same random words."""
        x, y = data()
        tx = optax.with_extra_args_support(tx)

        def run(seed):
            params = initial(seed, weights)
            state = tx.init(params)
            if not alike:
                state = with_seed(state, seed)
            key = jax.random.key(1000 * order + seed + 1)

            def step(carry, t):
                params, state = carry
                rows = jax.random.randint(jax.random.fold_in(key, t), (BATCH,), 0, x.shape[0])
                updates, state = tx.update(jax.grad(loss)(params, x[rows], y[rows]), state, params)
                return (optax.apply_updates(params, updates), state), None

            (params, state), _ = jax.lax.scan(step, (params, state), jnp.arange(self.steps))
            full = known(params, state)
            return initial(seed, "float32"), full, loss(full, x, y), params, state

        start, full, losses, params, state = jax.jit(jax.vmap(run))(jnp.arange(self.seeds))
        count = sum(leaf.size for leaf in jax.tree.leaves(params))
        held, kept = (sum(leaf.nbytes for leaf in jax.tree.leaves(tree)) / count for tree in (params, state))
        return Ends(flat(start), flat(full), np.asarray(losses), held + kept, kept)


@dataclasses.dataclass(frozen=True)
class Transformer(Task):
    """The character transformer, at constant rates of 0.3 of those for digits: AdamW's is 3e-4."""

    steps: int = 400
    seeds: int = 3

    def rate(self, rate: float) -> optax.Schedule:
        """Return the constant schedule of a rate that is meant for digits."""
        return optax.constant_schedule(0.3 * rate)

    def train(self, tx: Transform, known: Known, weights: str, order: int, alike: bool = False) -> Ends:
        """Train all seeds, one after the other."""
        text, tx = load_text(), optax.with_extra_args_support(tx)
        kept = demo.STOCHASTIC if weights == "bfloat16" else demo.FLOAT32

        def model(seed: int):
            made = train_flax.make_model(demo.Recipe(steps=self.steps, seed=seed), kept, len(text.vocabulary))
            return nnx.split(made)

        structure, setting = model(0)[0], demo.Recipe(steps=self.steps)
        held_out = jnp.asarray(np.stack(text.validation_windows(setting.validation_windows, setting.context)))

        def loss(weights, pair):
            return train_flax.loss_of(nnx.merge(structure, weights), pair[0], pair[1])

        @jax.jit
        def run(weights, state, batches):
            def step(carry, pair):
                weights, state = carry
                updates, state = tx.update(jax.grad(loss)(weights, pair), state, weights)
                return (optax.apply_updates(weights, updates), state), None

            (weights, state), _ = jax.lax.scan(step, (weights, state), batches)
            weights = known(weights, state)
            return weights, loss(weights, held_out)

        ends, losses, size = [], [], 0
        for seed in range(self.seeds):
            first = model(seed)[1]
            state = tx.init(first) if alike else with_seed(tx.init(first), seed)
            pairs = text.batches(self.steps, setting.batch, setting.context, seed + 100 * order)
            batches = jnp.asarray(np.stack([np.stack(pair) for pair in pairs]))
            last, lost = run(first, state, batches)
            ends.append((_vector(first), _vector(last)))
            losses.append(float(lost))
            size = sum(leaf.nbytes for leaf in jax.tree.leaves(state)) / ends[0][0].size
        start, end = (np.stack(vectors) for vectors in zip(*ends, strict=True))
        return Ends(start, end, np.array(losses), size + (2 if weights == "bfloat16" else 4), size)


@dataclasses.dataclass(frozen=True)
class Setting:
    """One way to train.

    Attributes:
        labels: the first columns of its row.
        make: from a task to a transform, or to that and what returns the weights that are judged.
        against: settings with the same text are compared with the first of them.
        weights: dtype of the weights.
        order: which shuffling of the batches.
        share: of the steps.
        shown: whether it has a row.
        alike: whether all seeds draw the same random words.
    """

    labels: dict[str, str]
    make: Callable[[Task], Any]
    against: str = ""
    weights: str = "float32"
    order: int = 0
    share: float = 1.0
    shown: bool = True
    alike: bool = False

    @property
    def name(self) -> str:
        """What `--only` looks into, and claims call it."""
        return " ".join(self.labels.values())


def run_all(settings: Iterable[Setting], task: Task) -> list[dict[str, Any]]:
    """Return the rows of settings on a task."""
    rows, truths = [], {}
    for setting in tqdm(list(settings), unit="row"):
        of_setting = dataclasses.replace(task, steps=round(task.steps * setting.share))
        made = setting.make(of_setting)
        alone = isinstance(made, optax.GradientTransformation)
        tx, known = (made, hs.float32_params) if alone else made
        ends = of_setting.train(tx, known, setting.weights, setting.order, setting.alike)
        truth = truths.setdefault(setting.against, ends)
        if setting.shown:
            rows.append(setting.labels | {"weights": setting.weights} | ends.beside(truth))
            tqdm.write(str(rows[-1]), file=sys.stderr)
    return rows


Side = float | str | tuple[float, str]
Claim = tuple[str, Side, Side]
"""A figure, and two sides of which the left is less: a number, a row, or a factor and a row."""


def check(claims: Iterable[Claim], rows: Iterable[dict[str, Any]], labels: Iterable[str]) -> dict[str, bool]:
    """Return which claims hold, by sentence; one about a row that was left out is left out."""
    by = {" ".join(row[label] for label in labels): row | {"bias": abs(row["proj"] - 1)} for row in rows}

    def value(figure: str, side: Side) -> tuple[float, str]:
        if isinstance(side, float | int):
            return side, f"{side:g}"
        factor, name = side if isinstance(side, tuple) else (1, side)
        return factor * by[name][figure], f"{factor:.3g} of {name}" if factor != 1 else name

    held = {}
    for figure, left, right in claims:
        with contextlib.suppress(KeyError):
            (low, of_left), (high, of_right) = value(figure, left), value(figure, right)
            held[f"{figure}: {of_left} < {of_right}"] = low < high
    return held


@functools.cache
def data() -> tuple[jax.Array, jax.Array]:
    """Return images scaled to [0, 1] and labels."""
    digits = load_digits()
    return jnp.asarray(digits.data / 16, jnp.float32), jnp.asarray(digits.target)


def initial(seed: jax.Array | int, dtype: str):
    """Return weights that bfloat16 represents, so that all rows start at the same point."""
    keys = jax.random.split(jax.random.key(seed), len(SIZES) - 1)
    layers = {}
    for i, (key, n_in, n_out) in enumerate(zip(keys, SIZES[:-1], SIZES[1:], strict=True)):
        kernel = jax.random.normal(key, (n_in, n_out)) * np.float32(n_in**-0.5)
        layers[f"layer{i}"] = {"kernel": kernel, "bias": jnp.zeros(n_out)}
    return jax.tree.map(lambda w: w.astype(jnp.bfloat16).astype(dtype), layers)


def with_seed(state, seed: jax.Array | int):
    """Return a state whose random words are those of a seed, if it draws any."""
    if not optax.tree.get_all_with_path(state, "seed"):
        return state
    return optax.tree.set(state, seed=jnp.stack([jnp.uint32(0), jnp.asarray(seed, jnp.uint32)]))


def logits(params, x: jax.Array) -> jax.Array:
    """Return what the network makes of images; arithmetic in float32, whatever the weights are stored in."""
    for i in range(len(SIZES) - 1):
        layer = params[f"layer{i}"]
        x = x @ layer["kernel"].astype(jnp.float32) + layer["bias"].astype(jnp.float32)
        # Smooth: at relu's kinks paths part, and the table would measure chaos (dist 0.09 for bf16).
        x = jax.nn.gelu(x) if i < len(SIZES) - 2 else x
    return x


def loss(params, x: jax.Array, y: jax.Array) -> jax.Array:
    """Return the mean cross-entropy."""
    return optax.losses.softmax_cross_entropy_with_integer_labels(logits(params, x), y).mean()


def flat(tree) -> np.ndarray:
    """Return all weights of every seed: (seeds, parameters), float64."""
    leaves = [np.asarray(leaf, np.float64).reshape(leaf.shape[0], -1) for leaf in jax.tree.leaves(tree)]
    return np.concatenate(leaves, axis=1)


def _vector(tree) -> np.ndarray:
    return np.concatenate([np.asarray(leaf, np.float64).ravel() for leaf in jax.tree.leaves(tree)])

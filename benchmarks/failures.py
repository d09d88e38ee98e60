"""What breaks in silence, and how it is measured: one row for each failure, the same for every optimizer.

A function is a row: its docstring is the text above the table. A row that follows a run drives an optimizer
and AdamW in float64 (`runs.Float32Run`) through the same gradients, and compares; Muon is held against
torch's own with float32 weights. The others look at a single matter: NaN, bits, bytes.
"""

import dataclasses
import functools
import io
import textwrap
from collections.abc import Callable, Iterable
from typing import Any

import jax
import numpy as np
import torch
from peers import Entry
from runs import Float32Run

SHAPE = (128, 128)
Figures = dict[str, float | None]
Bounds = dict[str, tuple[float, float]]
ROWS: list["Row"] = []
REPLICAS: dict[str, np.ndarray] = {}
"""The bits with which the second process ended, by name."""


@dataclasses.dataclass(frozen=True)
class Row:
    """A failure.

    Attributes:
        key: under which figures are kept: the function's name.
        title: a heading.
        text: what is done, and what figures are.
        columns: name of a figure -> how it is printed.
        bounds: name of a figure -> lowest and highest that are right.
        measure: entry -> figures.
        moment: whether it is about the second moment, which some have not.
    """

    key: str
    title: str
    text: str
    columns: dict[str, str]
    bounds: Bounds
    measure: Callable[[Entry], Figures]
    moment: bool

    @property
    def description(self) -> dict:
        """What a record says of it."""
        return {name: getattr(self, name) for name in ("key", "title", "text", "columns", "bounds")}


def experiment(
    title: str, columns: dict[str, str], bounds: Bounds, compare: Callable | None = None, moment=False
):
    """Make a row of a function of an entry or, with `compare`, of one that starts a run and drives it."""

    def register(function: Callable) -> Callable:
        text = " ".join(textwrap.dedent(function.__doc__).split())
        measure = function if compare is None else _followed(function, compare)
        ROWS.append(Row(function.__name__, title, text, columns, bounds, measure, moment))
        return function

    return register


def _followed(drive: Callable[[Callable], Any], compare: Callable[[Any, Any], Figures]) -> Callable:
    truths: dict[str, Any] = {}

    def measure(entry: Entry) -> Figures:
        if entry.rule not in truths:
            alone = functools.partial(entry.start, dtype=torch.float32)
            truths[entry.rule] = drive(Float32Run if entry.rule == "AdamW" else alone)
        return compare(drive(entry.start), truths[entry.rule])

    return measure


def _rng(seed: int) -> np.random.Generator:
    return np.random.default_rng(seed)


def _bfloat16(x: np.ndarray) -> np.ndarray:
    return torch.tensor(x).to(torch.bfloat16).to(torch.float64).numpy()


@functools.cache
def weights() -> np.ndarray:
    """Return first weights, of the size that a transformer begins with."""
    return _bfloat16(_rng(0).normal(scale=0.02, size=SHAPE))


@functools.cache
def pool(sigma: float = 1.0, count: int = 16) -> list[np.ndarray]:
    """Return gradients: normal, around 0.01, with a lognormal size of each element."""
    rng = _rng(1)
    size = 0.01 * np.exp(sigma * rng.normal(size=SHAPE))
    return [_bfloat16(size * rng.normal(size=SHAPE)) for _ in range(count)]


def _steady(start: Callable, gradient: np.ndarray, steps: int, **numbers) -> np.ndarray:
    run = start(weights(), **numbers)
    native = run.native(gradient)
    for _ in range(steps):
        run.step(native)
    return run.weight() - weights()


def _shares(moved: dict[str, np.ndarray], due: dict[str, np.ndarray]) -> Figures:
    """The movement along the one that is due, as a share of it."""
    return {name: float(np.sum(x * due[name]) / np.sum(due[name] ** 2)) for name, x in moved.items()}


def _ratio(kept: np.ndarray, truth: np.ndarray) -> Figures:
    low, median, high = np.quantile(kept / truth, (0.05, 0.5, 0.95))
    return {"median": float(median), "5 %": float(low), "95 %": float(high)}


def _quotients(largest: dict[str, float], truth: dict[str, float]) -> Figures:
    return {name: float(value / truth[name]) for name, value in largest.items()}


def _walked(moved: np.ndarray, due: np.ndarray) -> Figures:
    def size(x):
        return float(np.sqrt(np.mean(x**2)))

    return {"rms": size(moved), "of float64's": size(moved) / size(due)}


# Five standard errors of the mean of 16,384 stochastically rounded weights at a learning rate of 1e-7.
_SHARE = (0.97, 1.03)
_SPREAD = {"median": ".2f", "5 %": ".2f", "95 %": ".2f"}
_RATES = (1e-5, 1e-6, 1e-7)
_SIZES = (1e-8, 1e-2, 1e4)


@experiment(
    "Small updates", dict.fromkeys(map(str, _RATES), ".3f"), dict.fromkeys(map(str, _RATES), _SHARE), _shares
)
def small(start: Callable) -> dict[str, np.ndarray]:
    """A steady gradient for 1,000 steps, at three learning rates; weights are around 0.02.

    The share of the movement due that arrives.
    """
    return {str(lr): _steady(start, pool()[0], 1000, lr=lr) for lr in _RATES}


@experiment("Weight decay", {"share": ".3f"}, {"share": _SHARE}, _shares)
def decay(start: Callable) -> dict[str, np.ndarray]:
    """No gradient, a learning rate of 1e-3 and a weight decay of 0.1, for 1,000 steps.

    The share of the decay due, which is 9.5 %, that arrives.
    """
    return {"share": _steady(start, np.zeros(SHAPE), 1000, lr=1e-3, weight_decay=0.1)}


@experiment(
    "The second moment after a tenfold drop",
    _SPREAD,
    {"median": (0.95, 1.05), "5 %": (0.5, 1.05), "95 %": (0.95, 2)},
    _ratio,
    moment=True,
)
def drop(start: Callable) -> np.ndarray:
    """3,500 steps; after 500 of them gradients become ten times smaller.

    The second moment, relative to float64's: median, 5 % and 95 %.
    """
    run, gradients = start(weights()), pool(1.5, 64)
    natives = [[run.native(g * scale) for g in gradients] for scale in (1, 0.1)]
    for step, i in enumerate(_rng(2).integers(len(gradients), size=3500)):
        run.step(natives[step >= 500][i])
    return run.second_moment()


@experiment("The second moment without gradients", _SPREAD, {"median": (0.9, 1.1)}, _ratio, moment=True)
def zeros(start: Callable) -> np.ndarray:
    """96 steps with gradients, then 2,000 steps in which they are 0.

    The second moment, relative to float64's: median, 5 % and 95 %.
    """
    run = start(weights())
    for g in [*map(run.native, pool())] * 6:
        run.step(g)
    zero = run.native(np.zeros(SHAPE))
    for _ in range(2000):
        run.step(zero)
    return run.second_moment()


@experiment(
    "Steady gradients, tiny and huge",
    dict.fromkeys(map(str, _SIZES), ".3f"),
    dict.fromkeys(map(str, _SIZES), _SHARE),
    _shares,
)
def sizes(start: Callable) -> dict[str, np.ndarray]:
    """A steady gradient of one size for 500 steps, at a learning rate of 1e-3, with eps at 1e-30.

    The share of the movement due that arrives.
    """
    return {str(size): _steady(start, pool()[0] * (size / 0.01), 500, eps=1e-30) for size in _SIZES}


@experiment(
    "One batch 100 and 10,000 times larger",
    {"x100": ".2f", "x10000": ".2f"},
    {"x100": (0, 1.2), "x10000": (0, 1.2)},
    _quotients,
)
def spike(start: Callable) -> dict[str, float]:
    """After 300 steps, one gradient is larger than the others.

    The largest movement of a weight in that step and the 100 after it, relative to float64's.
    """
    largest = {}
    for factor in (100, 10_000):
        run = start(np.zeros(SHAPE))
        # Of either sign, so that weights stay small, and their rounding with them.
        natives = [run.native(g * sign) for g in pool() for sign in (1, -1)]
        order = _rng(3).integers(len(natives), size=400)
        for i in order[:300]:
            run.step(natives[i])
        before, steps = run.weight(), []
        for g in [run.native(pool()[0] * factor), *(natives[i] for i in order[300:])]:
            run.step(g)
            after = run.weight()
            steps.append(np.abs(after - before).max())
            before = after
        largest[f"x{factor}"] = max(steps)
    return largest


@experiment("Rows touched once in 1,000 steps", {"share": ".3f"}, {"share": (0.9, 1.1)}, _shares)
def once(start: Callable) -> dict[str, np.ndarray]:
    """Each row has a gradient in one step of 1,000, twice in all, like an embedding's.

    The share of the movement due that arrives.
    """
    run = start(weights())
    zero, natives = run.native(np.zeros(SHAPE)), {}
    for row in range(SHAPE[0]):
        g = np.zeros(SHAPE)
        g[row] = pool()[0][row]
        natives[7 * row] = run.native(g)
    for step in range(2000):
        run.step(natives.get(step % 1000, zero))
    return {"share": run.weight() - weights()}


@experiment(
    "Idle weights beside live ones",
    {"rms": ".2f", "of float64's": ".2f"},
    {"of float64's": (0, 1.5)},
    _walked,
)
def idle(start: Callable) -> np.ndarray:
    """After 200 steps, the gradients of every second column are 0.

    How far that column moves in the next 1,000 steps: root mean square in learning rates, and relative to
    float64's.
    """
    run = start(weights())
    live = np.ones(SHAPE)
    live[:, 1::2] = 0
    natives = [[run.native(g * mask) for g in pool()] for mask in (1, live)]
    for step in range(200):
        run.step(natives[0][step % 16])
    before = run.weight()
    for step in range(1000):
        run.step(natives[1][step % 16])
    return ((run.weight() - before) / 1e-3)[:, 1::2]


def _bits(run: Any) -> np.ndarray:
    """Return the bits of the model's weight."""
    stored = run.stored
    return stored.view(torch.int16).numpy().copy() if isinstance(stored, torch.Tensor) else np.asarray(stored)


def _differ(one: np.ndarray, other: np.ndarray) -> float:
    return float(np.mean(one.view(np.int16) != other.view(np.int16)))


@experiment(
    "NaN",
    {"stays NaN": ".0f", "others NaN": ".0f", "0x7fffffff stays NaN": ".2f"},
    {"stays NaN": (1, 1), "0x7fffffff stays NaN": (1, 1)},
)
def nan(entry: Entry) -> Figures:
    """One element of a gradient is NaN: whether its weight is NaN two steps later, and how many others are.

    Then 10,000 float32 NaN 0x7fffffff, the NaN that NVIDIA's GPUs make: the share that is NaN after the
    rounding to bfloat16 that the library uses for its weights.
    """
    run = entry.start(weights())
    natives = [run.native(g) for g in pool()]
    for g in natives[:3]:
        run.step(g)
    broken = np.array(pool()[3])
    broken[0, 0] = np.nan
    run.step(run.native(broken))
    run.step(natives[4])
    lost = np.isnan(run.weight())
    pattern = np.full(10_000, 0x7FFFFFFF, np.uint32).view(np.float32)
    cast = entry.cast(pattern)
    cast = cast.to(torch.float32).numpy() if isinstance(cast, torch.Tensor) else np.asarray(cast, np.float32)
    return {
        "stays NaN": float(lost[0, 0]),
        "others NaN": float(lost.sum() - lost[0, 0]),
        "0x7fffffff stays NaN": float(np.isnan(cast).mean()),
    }


def _trained(run: Any, gradients: Iterable[np.ndarray]) -> Any:
    for g in gradients:
        run.step(run.native(g))
    return run


@experiment("Compiled against eager", {"differ": ".1%"}, {"differ": (0, 0)})
def compiled(entry: Entry) -> Figures:
    """Ten steps from the same seed, compiled and not: the share of weights whose bits differ."""
    ends = []
    for how in (True, False):
        torch.manual_seed(0)
        ends.append(_bits(_trained(entry.start(weights(), compiled=how), pool()[:10])))
    return {"differ": _differ(*ends)}


@experiment(
    "Resumed from a file",
    {"differ": ".1%", "generator kept": ".1%"},
    {"differ": (0, 0), "generator kept": (0, 0)},
)
def resume(entry: Entry) -> Figures:
    """Ten steps, a file, a new process (torch's generator stands elsewhere) and six more steps.

    The share of weights whose bits differ from a run without the break; then the same with the generator's
    state kept in the file too.
    """
    torch.manual_seed(0)
    run = _trained(entry.start(weights()), pool()[:10])
    file, generator = _saved(entry, run), torch.get_rng_state()
    whole = _bits(_trained(run, pool()[10:]))
    differ = {}
    for name, kept in {"differ": None, "generator kept": generator}.items():
        # A new process, whose generator stands elsewhere.
        torch.manual_seed(1)
        resumed = _loaded(entry, file)
        if kept is not None:
            torch.set_rng_state(kept)
        differ[name] = _differ(whole, _bits(_trained(resumed, pool()[10:])))
    return differ


def _saved(entry: Entry, run: Any) -> bytes:
    file = io.BytesIO()
    if entry.framework == "torch":
        torch.save({"w": run.param.detach(), "optimizer": run.optimizer.state_dict()}, file)
    else:
        leaves = [np.asarray(x) for x in jax.tree.leaves((run.params, run.held))]
        # NumPy's files know no bfloat16, and no array without axes is viewed as bytes.
        as_bytes = {str(i): x.reshape(-1).view(np.uint8) for i, x in enumerate(leaves)}
        np.savez(file, **as_bytes)
    return file.getvalue()


def _loaded(entry: Entry, file: bytes) -> Any:
    run = entry.start(weights())
    if entry.framework == "torch":
        held = torch.load(io.BytesIO(file))
        run.param.data.copy_(held["w"])
        run.optimizer.load_state_dict(held["optimizer"])
    else:
        leaves, tree = jax.tree.flatten((run.params, run.held))
        with np.load(io.BytesIO(file)) as held:
            arrays = [held[str(i)].view(x.dtype).reshape(x.shape) for i, x in enumerate(leaves)]
        run.params, run.held = tree.unflatten([jax.numpy.asarray(x) for x in arrays])
    return run


def replica(entry: Entry, rank: int, device: Any = None) -> np.ndarray:
    """Return the bits with which a process ends whose torch generator was seeded with its rank."""
    torch.manual_seed(rank)
    how = {"device": device} if entry.framework == "JAX" else {}
    return _bits(_trained(entry.start(weights(), **how), pool()[:10]))


@experiment("One and two processes", {"differ": ".1%"}, {"differ": (0, 0)})
def processes(entry: Entry) -> Figures:
    """Ten steps with the same gradients in two processes; each seeds torch's generator with its rank.

    In JAX, on one device and on two. The share of weights whose bits differ.
    """
    return {"differ": _differ(replica(entry, 0), REPLICAS[entry.name])}


@experiment("Bytes of state", {"bytes per parameter": ".3f"}, {})
def state(entry: Entry) -> Figures:
    """The bytes of the optimizer's arrays for a weight of 1024 x 1024, without the weight, counted."""
    how = {"compiled": False} if entry.framework == "torch" else {}
    run = entry.start(np.zeros((1024, 1024)), **how)
    run.step(run.native(np.ones((1024, 1024))))
    return {"bytes per parameter": sum(x.nbytes for x in run.tensors()) / 1024**2}

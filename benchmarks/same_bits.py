"""What breaks in silence beside the path of the weights: NaN, the same bits twice, bytes."""

import io
from collections.abc import Iterable
from typing import Any

import jax
import numpy as np
import torch
from experiments import Figures, experiment, pool, weights
from peers import Entry

REPLICAS: dict[str, np.ndarray] = {}
"""The bits with which the second process ended, by name: for each seed of `SEEDS`."""
SEEDS = (1, 0)
"""Of torch's generator in the second process: its rank, and that of the first process."""


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
    """One element of a gradient is NaN. Is its weight NaN two steps later, and how many others are?

    Then the library rounds 10,000 float32 NaN to bfloat16, as it rounds its weights. Their pattern is
    0x7fffffff, which NVIDIA's GPUs make. The figure is the share that is still NaN.
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
    """Ten steps from the same seed, compiled and eager.

    The figure is the share of weights whose bits differ.
    """
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
    """Ten steps, a file, a new process (with torch's generator in another state) and six more steps.

    The figures are the shares of weights whose bits differ from a run without the break: without the
    generator's state in the file, and with it.
    """
    torch.manual_seed(0)
    run = _trained(entry.start(weights()), pool()[:10])
    file, generator = _saved(entry, run), torch.get_rng_state()
    whole = _bits(_trained(run, pool()[10:]))
    differ = {}
    for name, kept in {"differ": None, "generator kept": generator}.items():
        # A new process, whose generator is in another state.
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


def replica(entry: Entry, seed: int, device: Any = None) -> np.ndarray:
    """Return the bits with which a process ends whose torch generator had such a seed."""
    torch.manual_seed(seed)
    how = {"device": device} if entry.framework == "JAX" else {}
    return _bits(_trained(entry.start(weights(), **how), pool()[:10]))


@experiment(
    "One and two processes",
    {"differ": ".1%", "equal seeds": ".1%"},
    {"differ": (0, 0), "equal seeds": (0, 0)},
)
def processes(entry: Entry) -> Figures:
    """Ten steps with the same gradients in two processes; each seeds torch's generator with its rank.

    JAX runs on one device and on two. The figures are the share of weights whose bits differ, and the same
    share if both processes have the same seed.
    """
    first = replica(entry, 0)
    return {
        name: _differ(first, second)
        for name, second in zip(("differ", "equal seeds"), REPLICAS[entry.name], strict=True)
    }


@experiment("Bytes of state", {"bytes per parameter": ".3f"}, {})
def state(entry: Entry) -> Figures:
    """The bytes of the optimizer's arrays for a weight of 1024 x 1024, counted; the weight is left out."""
    how = {"compiled": False} if entry.framework == "torch" else {}
    run = entry.start(np.zeros((1024, 1024)), **how)
    run.step(run.native(np.ones((1024, 1024))))
    return {"bytes per parameter": sum(x.nbytes for x in run.tensors()) / 1024**2}

"""Replicas of one model in several processes, which must agree in seed and step or drift apart silently.

Two processes hold replicas if their parameters have the same names, shapes and gradients, as under
DistributedDataParallel. Processes that train different models are not compared. The first process to make a
step leaves its seeds and steps in the store of the process group. Each later process compares its values with
these, so no process waits. At every hundredth step they compare gradients in the same way. If gradients
differ at the same count, the counts no longer agree.
"""

import collections
import hashlib
import json
from collections.abc import Iterable, Sequence
from typing import Any, Protocol

import torch
from torch import Tensor

from halfstep_torch.numbers.seeds import LinkSeed
from halfstep_torch.say_once import Advice, say_once

# Comparisons of replicas by kind in this process, which separate a second run of a model from the first.
_COMPARED: collections.Counter = collections.Counter()


class Replica(Protocol):
    """The part of a stepped parameter's slot that processes compare."""

    name: str
    param: Tensor

    @property
    def step(self) -> int:
        """The count after this step."""
        ...

    @property
    def grad(self) -> Tensor:
        """The gradient in this process."""
        ...


def check_replicas(caller: str, slots: Sequence[Replica], seeds: Sequence[LinkSeed]) -> str | None:
    """Raise RuntimeError if another process steps a replica with other seeds, or at another step.

    Args:
        caller: the name in messages.
        slots: the stepped parameters, each with its name, `param`, `grad` and step.
        seeds: the seeds of links in every param group.

    Returns:
        The key of the comparison, for `check_counts`. It is "" in a single process, and None if zero
        gradients cannot separate replicas from other models. Then call it again at the next step.
    """
    distributed = torch.distributed
    if not (distributed.is_available() and distributed.is_initialized()):
        return ""
    if distributed.get_world_size() == 1 or not slots:
        return ""
    if getattr(distributed.distributed_c10d, "_get_default_store", None) is None:
        say_once(
            f"{caller}: this torch does not say where processes can compare notes, so seeds and steps of "
            "replicas are not compared. Use one seed on all ranks, and load the same state."
        )
        return ""
    if not any(bool(slot.grad.count_nonzero()) for slot in slots):
        return None
    store = _store()
    # Backends that start processes themselves, such as MPI, have no store.
    return compare(caller, store, distributed.get_rank(), slots, seeds, _COMPARED) if store else ""


def check_counts(caller: str, key: str, slots: Sequence[Replica]) -> None:
    """Warn if replicas with the same key have other gradients at the count of this step."""
    if key and slots and torch.distributed.is_initialized() and (store := _store()):
        compare_gradients(caller, store, torch.distributed.get_rank(), key, slots)


def compare_gradients(
    caller: str,
    store: Any,  # the result of `_store`
    rank: int,
    key: str,
    slots: Sequence[Replica],
) -> None:
    """Compare gradients with gradients in a store, or leave them there."""
    step = max(slot.step for slot in slots)
    report = _digest([*map(_corner, _grads(slots)), *map(_sum_of_bits, _grads(slots))])
    first = json.loads(store.compare_set(f"{key}/{step}", "", json.dumps([rank, report])))
    if first[1] != report:
        say_once(
            Advice(
                f"{caller}: counts of replicas",
                f"{caller}: replicas of a model on ranks {first[0]} and {rank} have different gradients at "
                f"step {step}. If they still train one model, their counts of steps have come apart, as "
                "after join with uneven inputs, and they round weights differently. Load one rank's "
                "state_dict on all ranks.",
            )
        )


def _store() -> Any:  # a torch.distributed.Store, which some builds of torch lack; or None
    return torch.distributed.distributed_c10d._get_default_store()


def compare(
    caller: str,
    store: Any,  # a torch.distributed.Store, which some builds of torch lack
    rank: int,
    slots: Sequence[Replica],
    seeds: Sequence[LinkSeed],
    compared: collections.Counter,
) -> str:
    """Compare seeds and steps with the entries of a store, or leave them there. Return their key.

    `compared` counts this process's comparisons of slots like these.
    """
    of_grads = [*map(_corner, _grads(slots)), *map(_sum_of_bits, _grads(slots))]
    kind = _digest([*((slot.name, tuple(slot.param.shape)) for slot in slots), *of_grads])
    key = f"halfstep/{kind}/{compared[kind]}"
    compared[kind] += 1
    steps = [slot.step for slot in slots]
    report = {"seeds": _plain(seeds), "first": min(steps), "last": max(steps), "steps": _digest(steps)}
    first = json.loads(store.compare_set(key, "", json.dumps({**report, "rank": rank})))
    other_rank = first.pop("rank")
    if first == report:
        return key
    what = "seeds" if first["seeds"] != report["seeds"] else "steps"
    ours, others = (_in_words(notes, what) for notes in (report, first))
    raise RuntimeError(
        f"{caller}: replicas of a model would drift apart: rank {rank} has the {what} {ours}, rank "
        f"{other_rank} {others}. Use one seed on all ranks, and load the same state."
    )


def _grads(slots: Iterable[Replica]) -> Iterable[Tensor]:
    return (slot.grad for slot in slots)


def _corner(x: Tensor) -> str:
    """Return the bits of some elements in a tensor of any layout."""
    corner = x[tuple(slice(0, 4) for _ in range(x.dim()))].to("cpu", torch.float32).contiguous()
    return corner.view(-1).view(torch.int32).numpy().tobytes().hex()


def _sum_of_bits(x: Tensor) -> int:
    """Return the sum of a tensor's bit patterns as integers, because its corner may be zeros."""
    integers = {2: torch.int16, 4: torch.int32, 8: torch.int64}[x.element_size()]
    return int(x.detach().view(integers).sum(dtype=torch.int64))


def _digest(what: object) -> str:
    return hashlib.sha256(json.dumps(what).encode()).hexdigest()[:32]


def _plain(seeds: LinkSeed) -> LinkSeed:
    """Return seeds in the form of JSON."""
    return [_plain(seed) for seed in seeds] if isinstance(seeds, (list, tuple)) else seeds


def _in_words(notes: dict, what: str) -> str:
    if what == "steps":
        return (
            str(notes["first"]) if notes["first"] == notes["last"] else f"{notes['first']} to {notes['last']}"
        )
    return str(sorted({seed for seed in _flat(notes["seeds"]) if seed is not None}))


def _flat(seeds: LinkSeed) -> Iterable[int | None]:
    return [x for part in seeds for x in _flat(part)] if isinstance(seeds, list) else [seeds]

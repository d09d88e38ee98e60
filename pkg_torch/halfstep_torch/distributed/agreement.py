"""Checks before a step that all processes of a mesh can make the same step."""

import hashlib
import json
from collections.abc import Mapping, Sequence

import torch

from halfstep_torch.distributed.collectives import reduce_max
from halfstep_torch.distributed.shards import Mesh


class Attempt:
    """A context that catches an error, for `agree` to raise.

    Attributes:
        error: the error, or None.
    """

    error: Exception | None = None

    def __enter__(self) -> "Attempt":
        return self

    def __exit__(self, _: object, error: BaseException | None, __: object) -> bool:
        self.error = error if isinstance(error, Exception) else None
        return self.error is not None


def agree(caller: str, meshes: Sequence[Mesh], error: BaseException | None, notes: Sequence[Mapping]) -> None:
    """Raise `error`, and in every other process of the meshes an error that names it, so that none hangs.

    Without an error, raise RuntimeError in all processes of a mesh unless they have the same notes. The notes
    for each mesh are JSON values by their name in the message.
    """
    problems = [_problem(mesh, error, of_mesh) for mesh, of_mesh in zip(meshes, notes, strict=True)]
    if error is not None:
        raise error
    for problem in filter(None, problems):
        raise RuntimeError(f"{caller}: {problem}")


def any_of(meshes: Sequence[Mesh], here: bool) -> bool:
    """Return whether a condition holds in any process of the meshes."""
    return any([_largest(mesh, [int(here)])[0] for mesh in meshes]) or here


def _problem(mesh: Mesh, error: BaseException | None, notes: Mapping[str, object]) -> str:
    """Return why the processes of a mesh cannot make a step together, or "" if they can."""
    digests = [0 if error else _digest(value) for value in notes.values()]
    failed, *largest = _largest(mesh, [int(error is not None), *digests, *(-digest for digest in digests)])
    if failed:
        return (
            f"another process of the mesh of shape {tuple(mesh.shape)} cannot make this step, and says why. "
            "No weight has changed, here or there."
        )
    for (what, value), high, low in zip(notes.items(), largest, largest[len(digests) :], strict=False):
        if high != -low:
            value = _differing(mesh, value) if isinstance(value, dict) else value
            return (
                f"the processes of the mesh of shape {tuple(mesh.shape)} would drift apart: they differ in "
                f"the {what}. Process {torch.distributed.get_rank()} has {_shortened(value)}. "
                "Give all of them the same, and load the same state."
            )
    return ""


def _differing(mesh: Mesh, entries: Mapping[str, object]) -> Mapping[str, object]:
    """Return the entries that differ between processes, or all entries if their number differs."""
    if len(set(map(abs, _largest(mesh, [len(entries), -len(entries)])))) > 1:
        return entries
    digests = [_digest(entry) for entry in entries.items()]
    largest = _largest(mesh, [*digests, *(-digest for digest in digests)])
    pairs = zip(entries.items(), largest, largest[len(digests) :], strict=False)
    return {key: value for (key, value), high, low in pairs if high != -low} or entries


def _largest(mesh: Mesh, numbers: Sequence[int]) -> list[int]:
    """Return the maximum of each number over the processes of the mesh."""
    told = torch.tensor(numbers, dtype=torch.int64, device=mesh.device_type)
    return reduce_max(told, mesh).tolist()


def _digest(value: object) -> int:
    return int.from_bytes(hashlib.sha256(json.dumps(value).encode()).digest()[:7], "big")


def _shortened(value: object) -> str:
    text = json.dumps(value)
    return text if len(text) <= 200 else f"{text[:200]} ..."

"""Pieces of another library's parameters, with float32 copies of 16-bit parameters."""

from collections.abc import Iterable, Mapping, Sequence
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from halfstep.random_words import Role
from halfstep_torch.engine.compile_choice import CompileChoice
from halfstep_torch.engine.float32_copies import Float32Copies
from halfstep_torch.engine.loss_scale import Unscaled
from halfstep_torch.engine.plan import Stream
from halfstep_torch.engine.step_numbers import KeysAhead, leaves_of


class Member(NamedTuple):
    """A parameter and the float32 copy that the optimizer steps."""

    name: str
    param: Tensor
    copy: Tensor


class Piece:
    """Members that are stepped together, with float32 copies of 16-bit weights."""

    def __init__(
        self,
        members: Sequence[Member],
        seed: int,
        memory: Mapping[torch.dtype, dict[torch.device, list[Tensor]]],
    ):
        self.members, self._stays = members, on_cpu(members)
        self._stream, self._steps = Stream(seed, "", before=False, roles=(Role.PARAM,)), None
        alike: dict[tuple[torch.device, torch.dtype], list[int]] = {}
        for i, (_, param, _) in enumerate(members):
            if param.dtype != torch.float32:
                alike.setdefault((param.device, param.dtype), []).append(i)
        self._copies = [
            (places, Float32Copies([members[i].param for i in places], memory[dtype]))
            for (_, dtype), places in alike.items()
        ]

    def fill(self, scale: float | None) -> None:
        """Set the weights and unscaled gradients of the copies, and of float32 weights."""
        for _, param, copy in self.members:
            if param.dtype == torch.float32 and param.grad is not None:
                grad = param.grad if scale is None else Unscaled([param.grad], scale)[0]
                copy.data, copy.grad = param.detach(), grad
        for places, copies in self._copies:
            copies.fill()
            if scale is not None:
                inverse = float(np.float32(1) / np.float32(scale))
                for grad in copies.grads:
                    grad.mul_(inverse)
            for i, weight, grad in zip(places, copies.weights, copies.grads, strict=True):
                copy = self.members[i].copy
                if copy.grad is not grad:
                    copy.data, copy.grad = weight, grad

    def round(self, caller: str, steps: list[int], choice: CompileChoice) -> None:
        """Round the weights from the stepped copies, with their step counts."""
        if self._steps is None or steps != [step + 1 for step in self._steps]:
            names = [member.name for member in self.members]
            self._keys = KeysAhead([self._stream], leaves_of([self._stream], names))
        keys, self._steps = self._keys.at(steps), steps
        for places, copies in self._copies:
            for i, weight in zip(places, copies.weights, strict=True):
                copy = self.members[i].copy
                if copy.data_ptr() != weight.data_ptr():  # the optimizer replaced its memory
                    weight.copy_(copy.data)
                    copy.data = weight
            copies.round(caller, keys[:, places], choice)

    def release(self, alone: bool) -> None:
        """Remove the gradients of the copies, so that the optimizer does not step this piece again.

        If a piece is kept and is the only one, its gradients stay, and the next step fills them again.
        """
        for _, param, copy in self.members:
            owned = not self._stays or param.dtype == torch.float32
            if owned or not alone:
                copy.grad = None
            if owned:
                copy.data = copy.data.new_empty(0)


def cuts_of(members: Sequence[Member], piece_size: int | None) -> list[tuple[int, int]]:
    """Return the start and stop of each piece of `piece_size` elements, or one piece for None."""
    cuts, start, size = [], 0, 0
    for i, member in enumerate(members):
        if i > start and piece_size is not None and size + member.param.numel() > piece_size:
            cuts.append((start, i))
            start, size = i, 0
        size += member.param.numel()
    return [*cuts, (start, len(members))] if members else []


def on_cpu(members: Iterable[Member]) -> bool:
    """Whether all members are on the CPU."""
    return all(member.param.device.type == "cpu" for member in members)

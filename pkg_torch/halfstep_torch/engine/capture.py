"""Steps that a CUDA graph may capture (`capturable=True`), and the checks of a capture."""

from collections.abc import Iterator, Sequence

import torch
from torch import Tensor

from halfstep.kernels.graph import NoGeneratedForm
from halfstep_torch.engine.ahead import Ahead
from halfstep_torch.engine.batches import Batch
from halfstep_torch.engine.groups import read_on_device, tensors_of
from halfstep_torch.engine.kernels.kernel import Kernel
from halfstep_torch.engine.signals import is_capturing
from halfstep_torch.engine.slots import Slot
from halfstep_torch.leaves.group_names import Group
from halfstep_torch.say_once import say_once

_REMEDY = "Use capturable=False"
_SET_TO_NONE = (
    "replays read the gradients where they are now. Keep them there by zero_grad(set_to_none=False), or "
    "capture backward too."
)


def may_capture(device: torch.device) -> bool:
    """Whether graphs can capture work on a device."""
    return device.type != "cpu"


class Captures:
    """The steps of a launch's capturable batches.

    Attributes:
        captured: the steps that graphs replay.
    """

    def __init__(self) -> None:
        self._aheads: dict[int, Ahead] = {}
        self.captured: list[Ahead] = []

    def of(self, batch: Batch) -> Ahead | None:
        """Return the step of a batch, or None if it is not made."""
        return self._aheads.get(id(batch))

    def have_all(self, batches: Sequence[Batch]) -> bool:
        """Whether no step of these batches needs the host."""
        return bool(batches) and all(id(batch) in self._aheads for batch in batches)

    def keep(self, batches: Sequence[Batch]) -> None:
        """Forget the steps of other batches."""
        held = {*map(id, batches)}
        self._aheads = {key: x for key, x in self._aheads.items() if key in held}

    def make(self, batches: Sequence[Batch]) -> None:
        """Make the steps of capturable batches on a device. On a CPU none is made.

        Raises:
            RuntimeError: if a capture could not hold a step.
        """
        for batch in batches:
            if batch.group.capturable and id(batch) not in self._aheads:
                if (made := _ahead_of(batch)) is not None:
                    self._aheads[id(batch)] = made

    def run(self, batches: Sequence[Batch]) -> None:
        """Step batches that have all steps, in a capture or outside."""
        capturing = is_capturing()
        for batch in batches:
            addresses = batch.gradient_addresses() if batch.grad_addresses is None else batch.grad_addresses
            ahead = self._aheads[id(batch)]
            if capturing:
                if ahead.reads(addresses):
                    say_once(f"{batch.group.caller}: {_SET_TO_NONE}")
                _say_frozen(batch)
                self.captured += [] if ahead in self.captured else [ahead]
            ahead.run(addresses, capturing=capturing)
            # Kernels write to memory by address, so autograd must be told that the weights changed.
            torch.autograd.graph.increment_version(batch.owners)

    def drop(self, caller: str, why: str) -> "list[Ahead]":
        """Make replays change nothing, and return the tables that graphs still read."""
        for ahead in self.captured:
            ahead.drop()
        say_once(
            f"{caller}: {why}, so replays of steps that were captured before change nothing any more. "
            "Make a step outside of a graph, and capture anew."
        )
        return self.captured

    def check_frozen(self, groups: Sequence[Group]) -> None:
        """Log numbers of groups that were written after a capture, which replays do not read."""
        for ahead in self.captured:
            if changed := ahead.changed(groups):
                key, before, now = changed
                say_once(
                    f"{ahead.caller}: {key} of a param group is {now!r} now, and replays of a captured step "
                    f"still read {before!r}. Capture anew, or pass {key} as a tensor on the device and write "
                    "into it."
                )


def check_capture(caller: str, batches: Sequence[Batch], unstepped: Sequence[str]) -> None:
    """Raise RuntimeError if a replay would differ from the recorded step.

    Args:
        caller: the name in messages.
        batches: the batches of the step.
        unstepped: the names of trained parameters without a gradient.
    """
    for batch in batches:
        group, index = batch.group.entries, batch.group.index
        if not batch.group.capturable:
            raise RuntimeError(
                f"{caller}: a CUDA graph records this step, and capturable of param group {index} is False. "
                "Build the optimizer with capturable=True."
            )
        for key, x in group.items():
            if isinstance(x, Tensor) and key not in tensors_of(group, batch.device):
                raise RuntimeError(
                    f"{caller}: {key} of param group {index} is a tensor on {x.device}: replays would keep "
                    f"the number that it has now. Write {key}.to({str(batch.device)!r}) into the group."
                )
    if unstepped:
        raise RuntimeError(
            f"{caller}: the weight {unstepped[0]!r} has no gradient in this capture, so no replay would step "
            "it. Freeze it by requires_grad_(False), or capture a step in which it has one."
        )


def _say_frozen(batch: Batch) -> None:
    lr = batch.group.entries.get("lr")
    if isinstance(lr, float):
        say_once(
            f"{batch.group.caller}: lr of param group {batch.group.index} is a float, so replays keep {lr}. "
            "For a scheduler, pass lr=torch.tensor(lr, device=...), into which it writes."
        )


def _ahead_of(batch: Batch) -> Ahead | None:
    if not may_capture(batch.device):
        return None
    kernel = batch.kernels[0] if batch.kernels else None
    for reason in _reasons(batch, kernel):
        raise RuntimeError(f"{batch.group.caller}: capturable=True, but {reason}.")
    assert kernel is not None
    assert kernel.on_device is not None
    batch.group = read_on_device(batch.group, batch.device)
    try:
        return Ahead(batch, kernel.on_device)
    except NoGeneratedForm as error:
        raise RuntimeError(
            f"{batch.group.caller}: capturable=True, but there is no device form of {error}. {_REMEDY}."
        ) from error


def _reasons(batch: Batch, kernel: Kernel | None) -> Iterator[str]:
    """Yield each reason why a step needs the host, with the remedy."""
    group, slot = batch.group, batch.slots[0]
    if group.scale is not None:
        yield f"a GradScaler gives the host the scale of gradients. {_REMEDY}, or bfloat16 without a scaler"
    if group.choices.schedule is not None:
        yield (
            f"lr of param group {group.index} is a Python function, which a graph cannot call. Pass lr as a "
            "tensor on the device, and a scheduler of torch, which writes into it"
        )
    if group.rates is not None and any(hasattr(link.rule, "peak_lr") for link in group.links):
        yield f"read_rates asks a scheduler on the host. {_REMEDY}, or leave read_rates out"
    for other in batch.slots:
        if type(other) is not Slot:
            yield f"the weight {other.name!r} is sharded, or its state is in host memory. {_REMEDY}"
    for link in (group.links[j] for j in batch.plan.rule_indices):
        if link.measures or link.needs_finite or link.rule.scope != "elementwise":
            yield f"{link.name} reads whole arrays, by launches that the host decides on. {_REMEDY}"
    for link, h in zip(group.links, group.values, strict=True):
        keys = {entry.key for entry in link.entry_fields} & tensors_of(group.entries, batch.device).keys()
        if keys and link.is_noop(h, group.info(slot.name, slot.owner)):
            yield (
                f"the number in {min(keys)} of param group {group.index}, a tensor, leaves {link.name} out "
                "of the step for ever. Write another number there before the first step, or a float"
            )
    if kernel is None or len(batch.plan.bounds) > 1:
        yield "there is no kernel of the whole step. Use compile=True, which says why, or capturable=False"
        return
    places = batch.all_places
    for place in batch.by_memory(0, places, batch.gradients(places))[1]:
        name = batch.slots[place].name
        yield f"the weight {name!r}, or its gradient, is not contiguous. Make it so, or use capturable=False"

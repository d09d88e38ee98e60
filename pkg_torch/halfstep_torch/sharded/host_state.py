"""State on the host, in pinned memory: kernels on a device read and write it over the bus.

A GPU has the addresses of pinned memory among its own, so tables of kernels hold them as they hold others.
Plain steps copy each piece of the state to the device and back. No device has run either yet.
"""

from collections.abc import Sequence

import torch
from torch import Tensor

from halfstep_torch.distributed.shards import check_sharding, is_sharded, window_of
from halfstep_torch.engine.batches import Batch
from halfstep_torch.engine.groups import ReadGroup
from halfstep_torch.engine.plan import Plan
from halfstep_torch.engine.slots import Slot
from halfstep_torch.say_once import say_once
from halfstep_torch.sharded.action import Action
from halfstep_torch.sharded.slots import PartSlot, exchanges, kept_at
from halfstep_torch.sharded.state_home import BesideWeights
from halfstep_torch.storage.stored_moment import State

_HOST = torch.device("cpu")


def state_home(caller: str, state_device: object) -> BesideWeights:
    """Return where an optimizer keeps its state; only the host may be asked for."""
    if state_device is not None and str(state_device) != "cpu":
        raise ValueError(
            f"{caller}: state_device={state_device!r} is no place for state. "
            'Use "cpu", or None for the device of each weight.'
        )
    return BesideWeights() if state_device is None else OnHost()


def is_away(device: torch.device) -> bool:
    """Whether weights on a device have their state on the host."""
    return device.type not in ("cpu", "meta")


def is_on_host(plan: Plan, param: Tensor) -> bool:
    """Whether the state of a parameter is kept on the host.

    It stays beside shards with an exchange in their steps, which gather it, or copy it between two exchanges.
    """
    return is_away(param.device) and not (is_sharded(param) and exchanges(plan, param))


class Fence(Action):
    """Makes the host wait for the kernels that write to its memory."""

    def __init__(self, batches: Sequence[Batch]) -> None:
        self.slots = [slot for batch in batches for slot in batch.slots if getattr(slot, "home", None)]

    def end(self) -> None:
        """Wait for the kernels of a step."""
        for device in {slot.param.device for slot in self.slots}:
            if device.type == "cuda":
                torch.cuda.current_stream(device).synchronize()


class OnHost(BesideWeights):
    """State on the host, except for shards with an exchange in their steps."""

    def slots_of(self, group: ReadGroup, name: str, param: Tensor) -> Sequence[Slot]:
        """Return the slots of a parameter of a group."""
        plan = group.plan(name, param)
        if is_sharded(param):
            check_sharding(group.caller, name, param)
        if is_on_host(plan, param):
            window = window_of(param)
            return [PartSlot(param, name, plan.within(window), window, whole_plan=plan, home=_HOST)]
        if is_away(param.device):
            say_once(
                f"{group.caller}: steps of some shards, such as {name!r}, exchange messages with other "
                "processes, so their state stays beside their weights. To have it on the host, shard "
                "first axes, take formats whose blocks no border cuts, or use CPUOffloadPolicy of "
                "fully_shard."
            )
        return super().slots_of(group, name, param)

    def arrange(self, batches: Sequence[Batch]) -> tuple[list[Batch], list[Action]]:
        """Return batches in the order of their steps, and the actions around them."""
        batches, actions = super().arrange(batches)
        return batches, [*actions, Fence(batches)]

    def placed(self, param: Tensor, plan: Plan, state: State) -> State:
        """Move a new state of a parameter to where state is kept, and return it."""
        if not is_on_host(plan, param):
            return state
        return {key: x if key == "step" else kept_at(x, _HOST, param.device) for key, x in state.items()}

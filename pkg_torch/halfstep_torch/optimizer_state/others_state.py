"""Foreign state in an optimizer: arrays of a wrapper (Lookahead) beside ours, or under its own key.

As in torch.optim it is kept, saved and restored, but never read.
"""

import copy

import torch
from torch import Tensor

from halfstep_torch.leaves.group_names import StateDict
from halfstep_torch.links.chain import Chain
from halfstep_torch.optimizer_state.form import SavedState
from halfstep_torch.storage.stored_moment import scale_key

_TRAINED = "trained"  # the weights kept by `AdamWScheduleFree.eval`


def own_keys(chain: Chain) -> set[str]:
    """Return the keys of a chain in a parameter's state, for all formats."""
    arrays = [key for link in chain.links for key in link.state_keys]
    return {"step", _TRAINED, *arrays, *map(scale_key, arrays)}


def others_of(entry: SavedState, chain: Chain) -> StateDict:
    """Return the foreign entries in the state of a parameter."""
    own = own_keys(chain)
    return {key: x for key, x in entry.items() if key not in own}


def without(entry: SavedState, others: SavedState) -> StateDict:
    """Return the state of a parameter without its foreign entries."""
    return {key: x for key, x in entry.items() if key not in others}


def may_be_parameter(key: object, ids: set[int | str]) -> bool:
    """Whether a key of a state dict can be a parameter's, given the ids in its groups."""
    return isinstance(key, int) or any(isinstance(other, str) for other in ids)


def check_keys(state: SavedState, ids: set[int | str]) -> None:
    """Raise ValueError for a key that a load would read as a parameter's."""
    for key in state:
        if key not in ids and may_be_parameter(key, ids):
            raise ValueError(
                f"state_dict: state[{key!r}] is of no parameter, and no load takes it: numbers stand for "
                'parameters there. Keep it under a name, such as state["lookahead"].'
            )


def check_others(caller: str, name: str, param: Tensor, others: SavedState, way_out: str) -> None:
    """Raise ValueError for a foreign array without memory."""
    for key, x in others.items():
        if isinstance(x, Tensor) and x.is_meta and not param.is_meta:
            way_out = way_out or "Pass dense arrays with numbers: load the file without map_location='meta'."
            raise ValueError(f"{caller}: {key} of {name!r} is on meta. {way_out}")


def copied(others: SavedState, device: torch.device) -> StateDict:
    """Return copies, with arrays in their own dtype on the parameter's device."""
    return {
        key: x.detach().to(device, copy=True) if isinstance(x, Tensor) else copy.deepcopy(x)
        for key, x in others.items()
    }

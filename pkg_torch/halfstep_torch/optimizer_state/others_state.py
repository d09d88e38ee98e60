"""State that others keep in an optimizer: arrays of a wrapper (Lookahead) beside ours, or under its own key.

As in torch.optim it stays, is saved, and is restored. Nothing here reads it.
"""

import copy

import torch
from torch import Tensor

from halfstep_torch.leaves.group_names import StateDict
from halfstep_torch.links.chain import Chain
from halfstep_torch.optimizer_state.form import SavedState
from halfstep_torch.storage.stored_moment import scale_key

_TRAINED = "trained"  # the weights that `AdamWScheduleFree.eval` sets aside


def own_keys(chain: Chain) -> set[str]:
    """Return the keys of a parameter's state that are a chain's, whatever its formats."""
    arrays = [key for link in chain.links for key in link.state_keys]
    return {"step", _TRAINED, *arrays, *map(scale_key, arrays)}


def others_of(entry: SavedState, chain: Chain) -> StateDict:
    """Return what others keep in the state of a parameter."""
    own = own_keys(chain)
    return {key: x for key, x in entry.items() if key not in own}


def without(entry: SavedState, others: SavedState) -> StateDict:
    """Return an entry without what others keep there."""
    return {key: x for key, x in entry.items() if key not in others}


def may_be_parameter(key: object, ids: set[int | str]) -> bool:
    """Whether a key of a state dict can be a parameter's, given the keys of the parameters of its groups."""
    return isinstance(key, int) or any(isinstance(other, str) for other in ids)


def check_keys(state: SavedState, ids: set[int | str]) -> None:
    """Raise ValueError for a key that a load would take for a parameter's."""
    for key in state:
        if key not in ids and may_be_parameter(key, ids):
            raise ValueError(
                f"state_dict: state[{key!r}] is of no parameter, and no load takes it: numbers stand for "
                'parameters there. Keep it under a name, such as state["lookahead"].'
            )


def check_others(caller: str, name: str, param: Tensor, others: SavedState, way_out: str) -> None:
    """Raise ValueError for an array of others without numbers."""
    for key, x in others.items():
        if isinstance(x, Tensor) and x.is_meta and not param.is_meta:
            way_out = way_out or "Pass dense arrays with numbers: load the file without map_location='meta'."
            raise ValueError(f"{caller}: {key} of {name!r} is on meta. {way_out}")


def copied(others: SavedState, device: torch.device) -> StateDict:
    """Return copies: arrays in their own dtype, on the device of their parameter."""
    return {
        key: x.detach().to(device, copy=True) if isinstance(x, Tensor) else copy.deepcopy(x)
        for key, x in others.items()
    }

"""A stage in plain torch, one parameter after another, in pieces of whole blocks."""

import math
from collections.abc import Callable, Mapping, Sequence

import torch
from torch import Tensor

from halfstep.hyperparameters import Values
from halfstep.random_words import GOLDEN_RATIO
from halfstep_torch.engine.stage import Stage
from halfstep_torch.numbers.exact import looking_at_numbers

# Elements of a piece. On a CPU the temporaries of a piece must fit a cache.
_PIECE, _PIECE_ELSEWHERE = 1 << 17, 1 << 24


def piece_length(device: torch.device) -> int:
    """Return the number of elements stepped at once on a device."""
    return _PIECE if device.type == "cpu" else _PIECE_ELSEWHERE


@looking_at_numbers()
def step_pieces(
    stage: Stage,
    p: Tensor,
    g: Tensor,
    u: Tensor | None,
    state: Mapping[str, Tensor],
    numbers: Values,
    keys: Sequence[int | Tensor],
    index: Callable[[int, int], Tensor],
) -> None:
    """Step a parameter in place.

    Args:
        stage: the stage of the parameter, with its blocks.
        p: the weights, row-major.
        g: their gradient, or the update of the stage before.
        u: the output for the stage's update, or None if it changes the weights.
        state: the state arrays, row-major.
        numbers: the numbers of each rule, by name.
        keys: k0 and k1 of each stream, int32, as numbers or with one for each element.
        index: a function from a range to the row-major indices of its elements, int64.
    """
    n, unit = p.numel(), math.lcm(*(blocks.unit for blocks in stage.blocks))
    piece = max(piece_length(p.device) // unit, 1) * unit
    p, g, out = p.view(-1), g.reshape(-1), None if u is None else u.view(-1)
    flat = {name: x.view(-1) for name, x in state.items()}
    for start in range(0, n, piece):
        stop = min(start + piece, n)
        kept, parts = {}, {}
        for name, spec in stage.arrays.items():
            first = spec.size(start)
            kept[name] = flat[name][first : first + spec.size(stop - start)]
            parts[name] = kept[name].to(p.device)
        at, here = index(start, stop), [key[start:stop] if isinstance(key, Tensor) else key for key in keys]
        columns = _columns(stage, here, at >> 32) if stage.sources else here
        at = at.to(p.device)
        words = stage.row_words(lambda at=at: at.to(torch.int32), columns)
        stepped, new = stage.run(p[start:stop], g[start:stop], parts, numbers, words)
        (p if out is None else out)[start:stop].copy_(stepped)
        for name, array in new.items():
            kept[name].copy_(array.view(-1))


def _columns(stage: Stage, keys: Sequence[int | Tensor], high: Tensor) -> Sequence[int | Tensor]:
    """Return the keys of a piece, with the high half of the index times the golden ratio added to k1 (W8)."""
    if not bool(high.any()):
        return keys
    device = next((key.device for key in keys if isinstance(key, Tensor)), high.device)
    high, columns, at = high.to(device, torch.int32) * (int(GOLDEN_RATIO) - (1 << 32)), [], 0
    for roles in stage.roles:
        columns += [keys[at], *(high + key for key in keys[at + 1 : at + 1 + len(roles)])]
        at += 1 + len(roles)
    return columns

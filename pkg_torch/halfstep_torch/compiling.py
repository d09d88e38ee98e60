"""Run a plan over the memory of one parameter: in cache-sized pieces, or as one compiled kernel."""

from collections.abc import Mapping, Sequence

import numpy as np
import torch
from torch import Tensor

from halfstep_torch.step import Plan, keys_from

_PIECE = 1 << 17


def run_leaf(
    plan: Plan, p: Tensor, g: Tensor, codes: Mapping[str, Tensor], numbers: Sequence, keys: np.ndarray
) -> None:
    """Step one parameter and its state in place."""
    rows = p.detach().contiguous()
    flat_p, flat_g = flat(rows), flat(g.detach().contiguous())
    flat_codes = {key: flat(c) for key, c in codes.items()}
    for start in range(0, p.numel(), _PIECE):
        piece = slice(start, start + _PIECE)
        part = {key: c[piece] for key, c in flat_codes.items()}
        new_p, new = plan.run(
            flat_p[piece], flat_g[piece], part, numbers, keys_from(plan, keys, start).tolist()
        )
        flat_p[piece].copy_(new_p)
        for key, c in part.items():
            c.copy_(new[key])
    if rows.data_ptr() != p.data_ptr():
        p.detach().copy_(rows)


def flat(x: Tensor) -> Tensor:
    """Return a 1-D alias of a row-major tensor."""
    alias = torch.empty(0, dtype=x.dtype, device=x.device)
    return alias.set_(x.untyped_storage(), x.storage_offset(), (x.numel(),), (1,))

"""The state of any transform, kept in a format: decode it, run the transform, encode it.

Contract: section S.
"""

import torch

from halfstep.rule import Rule
from halfstep.storage.moment_formats import Rounding, check_stored_state
from halfstep_torch.links.chain import Chain, chain
from halfstep_torch.links.stored_state import Select, StoreState
from halfstep_torch.numbers.seeds import Seed, as_seed
from halfstep_torch.storage.formats import Format
from halfstep_torch.storage.state_dtypes import as_format

_CALLER = "store_state"


def store_state(
    inner: Chain | Rule,
    format: str | torch.dtype | Format,
    *,
    rounding: Rounding = "stochastic",
    select: Select | None = None,
    seed: Seed = 0,
) -> Chain:
    """Store the state of a transform in few bits between steps.

        s = decode(stored);  u, s <- inner(g, s);  stored <- encode(s)

    Each array is rounded once per step, after `inner`, which gets arrays in its own dtypes. The update is
    computed from the array before rounding, so the bits differ from `mu_dtype` and `nu_dtype`. Integers, the
    state of scalar parameters, 8-bit floats, and arrays too small for the format's scales are stored
    unchanged. `select` excludes more:

        store_state(tx, "ufloat16_e7m9", select=lambda name, array: "nu" in name.split("/"))

    A format without a sign stores magnitudes, so select second moments for it. A format with scales, such as
    scaled("float8_e4m3fn"), keeps second moments above zero (contract S4). Freezing is not checked.

    Group entries are the same as for `inner`. The state has the keys of `inner` and, for `scaled` formats,
    keys such as `exp_avg_scale`.

    Args:
        inner: a transform, or a chain of them, without a last link that applies updates to the weights.
        format: a name such as "bfloat16", a torch dtype, or a result of `scaled` or `codebook`.
        rounding: "stochastic", or "nearest_unchecked", with which slow averages freeze.
        select: a function of a name, such as "mu/encoder/weight" (in a chain "0/mu/encoder/weight"), and a
            meta tensor of the array's shape and dtype. The names are as in the JAX package: `exp_avg` is
            "mu", `exp_avg_sq` "nu", `momentum_buffer` "trace".
        seed: seed of the random words, as in `round_stochastically`.

    Raises:
        TypeError: if an argument is of a wrong type.
        ValueError: if an argument is out of range, or `inner` applies updates to the weights. From
            `Optimizer`, if nothing is selected, or if an array would lose its sign.

    Example:
        >>> import torch, halfstep_torch as hs
        >>> tx = hs.chain(store_state(hs.scale_by_adam(), "bfloat16"), hs.scale_by_learning_rate(1e-3))
        >>> p = torch.nn.Parameter(torch.ones(3))
        >>> p.grad = torch.ones(3)
        >>> optimizer = hs.Optimizer([p], tx)
        >>> optimizer.step()
        >>> optimizer.state[p]["exp_avg"].dtype
        torch.bfloat16

    Source: ours (contract S).
    """
    fmt = as_format(_CALLER, "format", format)
    if fmt is None:
        raise TypeError(f'{_CALLER}: format=None is not a format. Use "bfloat16", or what scaled returns.')
    check_stored_state(_CALLER, fmt, rounding, select)
    array_seed, links = as_seed(_CALLER, seed), chain(inner).links
    for link in links:
        if link.last or isinstance(link, StoreState):
            raise ValueError(
                f"{_CALLER}: {link.name} is in the wrapped chain. "
                "Wrap the transforms before it, and put it after store_state(...)."
            )
    stored = []
    for i, link in enumerate(links):
        prefix = f"{i}/" if isinstance(inner, Chain) else ""
        stored.append(
            StoreState(link, fmt, rounding == "stochastic", select, prefix, (link.seed, array_seed))
        )
    return Chain(tuple(stored))

"""Reading and decoding 8-bit weights in the state of an optimizer.

Contract: P8.
"""

import dataclasses

import torch
from torch import Tensor

from halfstep.rules.adamw_in_codes import AdamWInCodes
from halfstep.storage.moment_formats import INT8
from halfstep_torch.distributed.collectives import gather_whole
from halfstep_torch.distributed.shards import is_sharded
from halfstep_torch.engine.plan import Plan
from halfstep_torch.engine.signals import between_steps
from halfstep_torch.leaves.group_names import given_names
from halfstep_torch.optimizer import Optimizer, check_optimizer
from halfstep_torch.sharded.slots import new_state
from halfstep_torch.storage.formats import Encoded, Format
from halfstep_torch.storage.stored_moment import Arrays, scale_key

_CODES, _SCALE = "param", scale_key("param")


@dataclasses.dataclass(frozen=True)
class StoredParam:
    """A stored weight, in int8 with a scale for each row, or in float32 if it is small.

    Attributes:
        codes: int8 or float32, in the shape of the weight.
        scale: uint8 scales of rows, or None for float32.
    """

    codes: Tensor
    scale: Tensor | None = None

    @torch.no_grad()
    def decode(self, dtype: torch.dtype = torch.float32) -> Tensor:
        """Return a copy of the weight in `dtype`, rounded to nearest."""
        if self.scale is None:
            return self.codes.to(dtype, copy=True)
        return _format(self.codes).decode(Encoded(self.codes, self.scale.reshape(-1))).to(dtype)


@between_steps
@torch.no_grad()
def stored_params(optimizer: Optimizer) -> dict[str, StoredParam]:
    """Return the stored weights of `AdamW(..., param_storage="int8")`, by parameter name.

    `stored_params(optimizer)[name].decode()` is the weight. Codes and scales share memory with the state. For
    a DTensor they are gathered, so all processes call this together. A parameter without a step has the codes
    for its first step. If a row was changed since the last step (pruned, averaged, loaded), its codes are a
    copy with the model's weights, rounded to nearest.

    Args:
        optimizer: an optimizer with `param_storage="int8"` in at least one param group.

    Returns:
        A dict by parameter name or, without names, by the parameter's index ("0", "1").

    Raises:
        TypeError: if it is not an `Optimizer`.
        ValueError: if it stores no weights in codes.
        RuntimeError: if the last load failed while it copied.

    Example:
        >>> import torch, halfstep_torch as hs
        >>> model = torch.nn.Linear(64, 64)
        >>> optimizer = hs.AdamW(model.named_parameters(), param_storage="int8")
        >>> stored = hs.stored_params(optimizer)
        >>> print(stored["weight"].codes.dtype, stored["bias"].codes.dtype)
        torch.int8 torch.float32
        >>> stored["weight"].decode(torch.bfloat16).shape
        torch.Size([64, 64])

    Source: ours (contract P8).
    """
    optimizer = check_optimizer("stored_params", optimizer)
    optimizer.check_loaded()
    given, stored = given_names(optimizer.param_groups), {}
    for name, (leaf, param, plan) in zip(given, optimizer.plans(), strict=True):
        state = optimizer.state.get(param, {})
        state = state if "step" in state else new_state(param, plan)
        if arrays := weights_of_the_model(param, plan, state):
            stored[name or leaf] = StoredParam(*arrays.values())
    if not stored:
        raise ValueError(
            'stored_params: the optimizer holds no weights in codes. Pass AdamW(..., param_storage="int8").'
        )
    return stored


def weights_of_the_model(param: Tensor, plan: Plan, state: Arrays) -> dict[str, Tensor]:
    """Return the codes and scales of the model's whole weight, or nothing if it has none."""
    if not any(rule.rule.name == AdamWInCodes.name for rule in plan.rules):
        return {}
    keys = [key for key in (_CODES, _SCALE) if key in state]
    arrays = [*(state[key] for key in keys), param]
    *arrays, w = gather_whole(arrays) if is_sharded(param) else arrays
    stored = _as_the_model_has_it(StoredParam(*arrays), w.detach())
    found = (x for x in (stored.codes, stored.scale) if x is not None)
    return dict(zip(keys, found, strict=True))


def _as_the_model_has_it(stored: StoredParam, w: Tensor) -> StoredParam:
    """Return the weight in codes, with new codes in rows changed since the last step."""
    w, kept = w.to(stored.codes.device).contiguous(), stored.decode()
    if stored.scale is None:
        return stored if torch.equal(w, kept) else StoredParam(w.clone())
    # After a step a weight may differ from its code by some units in the last place (contract P8).
    unit = torch.maximum(w.abs(), kept.abs()).amax(-1, keepdim=True) * 2.0**-20
    changed = ~((w - kept).abs() <= unit).all(-1)
    if not changed.any():
        return stored
    new = _format(w).encode(w, None)
    assert new.scale is not None
    scale = torch.where(changed.reshape(stored.scale.shape), new.scale.view(stored.scale.shape), stored.scale)
    return StoredParam(torch.where(changed[..., None], new.codes, stored.codes), scale)


def _format(codes: Tensor) -> Format:
    return Format.of(INT8).replace(min_size=0, min_ndim=0).for_shape(tuple(codes.shape))

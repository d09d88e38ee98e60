"""Optimizer state of other libraries in the form of torch.optim, decoded by their own functions."""

from collections.abc import Sequence

from torch import Tensor

from halfstep.arrays import Array
from halfstep_torch.optimizer_state.form import SavedState
from halfstep_torch.storage.stored_moment import State

# bitsandbytes puts arrays without the weight's shape into this nested dict.
_NESTED = "__bnb_optimizer_quant_state__"
_BLOCK = 256
# torchastic's names.
_RENAMED = {"ema": "exp_avg", "ema_squared": "exp_avg_sq"}
# State of adamw_bf16 that belongs to the weights (see `load_float32_state_dict`).
_OF_WEIGHTS = ("shift", "accumulated_decay")


def in_torch_form(saved: SavedState, keys: Sequence[str]) -> State:
    """Return the state of a parameter as torch.optim writes it.

    It decodes state of torchao's 8-bit, 4-bit and FP8 optimizers, bitsandbytes' 8-bit optimizers, adamw_bf16
    and torchastic. Other state is returned unchanged. `keys` are the keys of the optimizer's moments in
    order.
    """
    state = {key: x for key, x in saved.items() if key != _NESTED} | dict(saved.get(_NESTED, {}))
    if "state1" in state:
        moments = {key: _of_bitsandbytes(state, place) for place, key in enumerate(keys, 1)}
        return {"step": state["step"], **{key: x for key, x in moments.items() if x is not None}}
    if _OF_WEIGHTS[0] in state:
        state = {key: x for key, x in state.items() if key not in _OF_WEIGHTS}
    return {_RENAMED.get(key, key): _plain(x) for key, x in state.items()}


def _plain(x: Array) -> Array:
    """Return the values of a tensor, also of a subclass that wraps codes."""
    is_coded = isinstance(x, Tensor) and hasattr(x, "__tensor_flatten__") and hasattr(type(x), "dequantize")
    return x.dequantize() if is_coded and type(x).__module__.startswith("torchao.") else x


def _of_bitsandbytes(state: SavedState, place: int) -> Tensor | None:
    """Return the moment with this index in the state, or None."""
    codes = state.get(f"state{place}")
    if codes is None or codes.is_floating_point():
        return codes
    if missing := [key for key in (f"absmax{place}", f"qmap{place}") if key not in state]:
        raise ValueError(
            f"load_float32_state_dict: 8-bit state of bitsandbytes has no {missing[0]}, by which "
            "it is decoded. Pass the whole state dict, as bitsandbytes' optimizer wrote it."
        )
    try:
        from bitsandbytes.functional import dequantize_blockwise  # pyright: ignore[reportMissingImports]
    except ModuleNotFoundError:
        raise ModuleNotFoundError(
            "load_float32_state_dict: 8-bit state of bitsandbytes is decoded by bitsandbytes, which is not "
            "installed. Write: pip install bitsandbytes",
            name="bitsandbytes",
        ) from None
    return dequantize_blockwise(
        codes, absmax=state[f"absmax{place}"], code=state[f"qmap{place}"], blocksize=_BLOCK
    )

"""Dtypes of torch by name, and their names, as in ml_dtypes."""

import torch


def dtype_name(dtype: object) -> str:
    """Return the name of a dtype: "bfloat16" for torch.bfloat16 and for "bfloat16"."""
    return str(dtype).removeprefix("torch.")


def torch_dtype(name: str) -> torch.dtype:
    """Return the dtype for numbers of a format, or uint8 for their patterns if torch has no such dtype.

    Unsigned numbers of 16 bits are in int16, because torch supports few operations on uint16.
    """
    return torch.int16 if name == "uint16" else getattr(torch, name, torch.uint8)

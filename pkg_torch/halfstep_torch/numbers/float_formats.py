"""Dtypes of torch by name, and their names: those of ml_dtypes."""

import torch


def dtype_name(dtype: object) -> str:
    """Return the name of a dtype: "bfloat16" for torch.bfloat16 and for "bfloat16"."""
    return str(dtype).removeprefix("torch.")


def torch_dtype(name: str) -> torch.dtype:
    """Return the dtype that holds numbers of a format; uint8, for their patterns, where torch has none."""
    return getattr(torch, name, torch.uint8)

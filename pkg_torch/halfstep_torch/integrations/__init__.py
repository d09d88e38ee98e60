"""Adapters for trainers and other libraries. A trainer is imported only when its adapter is used.

`transformers` is for `Trainer(optimizer_cls_and_kwargs=...)`. The modules `torchtitan` and `lerobot` import
their libraries.
"""

from halfstep_torch.integrations.trainer import transformers

__all__ = ["transformers"]

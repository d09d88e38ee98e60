"""What trainers ask for in forms of their own. Nothing of a trainer is imported before it is used.

`transformers` is for `Trainer(optimizer_cls_and_kwargs=...)`; the modules `torchtitan` and `lerobot` import
the libraries that they are for.
"""

from halfstep_torch.integrations.trainer import transformers

__all__ = ["transformers"]

"""The factory that transformers' Trainer takes."""

import importlib

import torch

from halfstep_torch.integrations.config import from_config
from halfstep_torch.leaves.group_names import Group
from halfstep_torch.optimizer import Optimizer


class transformers:  # as the library, so that a line of a config tells what it is for
    """For `Trainer(optimizer_cls_and_kwargs=(hs.integrations.transformers, {"lr": 1e-3}))`.

    The Trainer calls what is no optimizer class as `F()(model, **kwargs)`, so names are those of the model,
    and Muon can tell its matrices. Biases and norms have no decay, by the Trainer's own rule.

    Example:
        >>> import torch, halfstep_torch as hs
        >>> factory, kwargs = hs.integrations.transformers, {"optimizer": "AdamW", "lr": 1e-3}

    Source: ours.
    """

    def __call__(self, model: torch.nn.Module, optimizer: str = "AdamW", **options: object) -> Optimizer:
        """Return the optimizer of a model's parameters.

        Args:
            model: that is trained.
            optimizer: the name of one, as in `from_config`.
            options: its arguments.

        Raises:
            ValueError: if it names no optimizer, or an argument that it lacks.
        """
        make = from_config({**options, "name": optimizer})
        trainer = importlib.import_module("transformers").Trainer
        decayed = set(trainer.get_decay_parameter_names(None, model))
        trained = [(name, param) for name, param in model.named_parameters() if param.requires_grad]
        groups: list[Group] = [
            {"params": [(name, param) for name, param in trained if name in decayed]},
            {
                "params": [(name, param) for name, param in trained if name not in decayed],
                "weight_decay": 0.0,
            },
        ]
        return make([group for group in groups if group["params"]])

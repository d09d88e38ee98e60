"""The optimizer factory for transformers' Trainer."""

import functools
import importlib
import inspect

import torch

from halfstep.hyperparameters import Arguments
from halfstep_torch.integrations.config import from_config
from halfstep_torch.leaves.group_names import Group
from halfstep_torch.optimizer import Optimizer
from halfstep_torch.say_once import say_once


class transformers:  # named as the library, so that a config line shows its purpose
    """A factory for `Trainer(optimizer_cls_and_kwargs=(hs.integrations.transformers, {"lr": 1e-3}))`.

    The Trainer calls a factory as `F()(model, **kwargs)`, so the optimizer gets the model's parameter names,
    from which Muon finds its matrices. Biases and norms have no decay, by the Trainer's own rule.

    Example:
        >>> import torch, halfstep_torch as hs
        >>> factory, kwargs = hs.integrations.transformers, {"optimizer": "AdamW", "lr": 1e-3}

    Source: ours.
    """

    def __call__(
        self, model: torch.nn.Module, args: object = None, optimizer: str = "AdamW", **options: object
    ) -> Optimizer:
        """Return the optimizer of a model's parameters.

        Args:
            model: the model to train.
            args: the TrainingArguments. The Trainer passes only the dict of options, so put them there:
                `{"args": arguments}`. `learning_rate`, `weight_decay` and, if the optimizer has two betas,
                `adam_beta1`, `adam_beta2` and `adam_epsilon` are read from them.
            optimizer: the name of an optimizer, as in `from_config`.
            options: its arguments, which override `args`.

        Raises:
            TypeError: if `args` has no learning rate.
            ValueError: if the optimizer or an argument is unknown.
        """
        kind = from_config({**options, "name": optimizer}).func
        make = from_config({**_read(args, kind), **options, "name": optimizer})
        if args is None and not {"lr", "weight_decay"} <= options.keys():
            _warn_of_defaults(kind, options)
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


def _read(args: object, kind: type[Optimizer]) -> Arguments:
    """Return an optimizer's arguments from TrainingArguments."""
    if args is None:
        return {}
    if not hasattr(args, "learning_rate"):
        raise TypeError(
            f"integrations.transformers: args={args!r} has no learning_rate. Pass the TrainingArguments, and "
            'an optimizer by name: {"args": arguments, "optimizer": "AdamW"}.'
        )
    takes, given = inspect.signature(kind).parameters, functools.partial(getattr, args)
    numbers = {"lr": given("learning_rate"), "weight_decay": given("weight_decay", None)}
    if "betas" in takes and len(takes["betas"].default) == 2:
        numbers["betas"] = tuple(given(key, None) for key in ("adam_beta1", "adam_beta2"))
        numbers["eps"] = given("adam_epsilon", None)
    return {key: x for key, x in numbers.items() if key in takes and x not in (None, (None, None))}


def _warn_of_defaults(kind: type[Optimizer], options: Arguments) -> None:
    takes = inspect.signature(kind).parameters
    left = [f"{key}={takes[key].default}" for key in ("lr", "weight_decay") if key not in options]
    say_once(
        f"integrations.transformers: {kind.__name__} has {' and '.join(left)}, its own default, whatever the "
        'TrainingArguments have, which the Trainer does not pass on. Add "args": arguments, or the values.'
    )

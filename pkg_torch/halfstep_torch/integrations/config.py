"""Optimizers by name, for the configs of trainers."""

import functools
import sys
from collections.abc import Callable

from halfstep.config import chosen, read_config
from halfstep.hyperparameters import Arguments
from halfstep_torch.optimizer import Optimizer
from halfstep_torch.rules.schedule_free import AdamWScheduleFree


def from_config(config: str | Arguments) -> Callable[..., Optimizer]:
    """Return a function from parameters to an optimizer, with the class and arguments from a config.

    Args:
        config: a text, such as `"adamw"` or `"AdamW(lr=1e-3, recipe='one_pass')"`, or a mapping with a name
            (see `halfstep.config`). A text is never run as code.

    Raises:
        TypeError: if it is neither a text nor a mapping.
        ValueError: if the name or an argument is unknown, or an argument is not a literal.

    Example:
        >>> import torch, halfstep_torch as hs
        >>> model = torch.nn.Linear(3, 1, dtype=torch.bfloat16)
        >>> make = hs.from_config("AdamW(lr=1e-3, recipe='one_pass')")
        >>> make(model.named_parameters()).param_groups[0]["nu_dtype"]
        'uroot4_e4m4'

    Source: ours.
    """
    name, arguments = read_config("from_config", config)
    package = vars(sys.modules["halfstep_torch"])
    public = {key: package[key] for key in package["__all__"]}
    optimizers = {
        key: kind
        for key, kind in public.items()
        if isinstance(kind, type) and issubclass(kind, Optimizer) and kind is not Optimizer
    }
    optimizers["schedule_free_adamw"] = AdamWScheduleFree  # its name in JAX
    return functools.partial(
        chosen("from_config", name, optimizers, arguments, "halfstep_torch"), **arguments
    )

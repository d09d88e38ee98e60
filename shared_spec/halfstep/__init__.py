"""The code that both packages share. Nothing here imports JAX or torch.

`halfstep_jax` and `halfstep_torch` re-export the names that their users need. The reference, `halfstep_spec`,
imports nothing from this package, because it also tests this code.
"""

from typing import NoReturn

from halfstep import recipes
from halfstep.public_names import name_by_package
from halfstep.rule import Rule, decay_rate, moment, number, option
from halfstep.storage.formats import Format
from halfstep.storage.relative import relative
from halfstep.storage.state_dtypes import codebook, scaled
from halfstep.version import __version__

__all__ = [
    "Format",
    "Rule",
    "__version__",
    "codebook",
    "decay_rate",
    "moment",
    "number",
    "option",
    "recipes",
    "relative",
    "scaled",
]
name_by_package(globals(), __all__)

_OPTIMIZERS = ("adam", "adamw", "lamb", "lamb16", "lion", "muon", "adafactor", "sgd", "ademamix", "adan")


def __getattr__(name: str) -> NoReturn:
    """Raise an error that names the package of each framework's optimizers."""
    if name.lower() in _OPTIMIZERS:
        package = "halfstep_torch" if name[0].isupper() else "halfstep_jax"
        raise ImportError(
            f"halfstep has no {name}: it is in the package of your framework. Write: "
            f"from {package} import {name}"
        )
    raise AttributeError(f"module 'halfstep' has no attribute {name!r}")

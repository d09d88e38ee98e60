"""What both packages share, written once: nothing here knows JAX or torch.

`halfstep_jax` and `halfstep_torch` re-export what their users need of it. The reference, `halfstep_spec`,
imports nothing of this package: it judges what stands here too.
"""

from halfstep import recipes
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

"""What both packages share, written once: nothing here knows JAX or torch.

`halfstep_jax` and `halfstep_torch` re-export what their users need of it. The reference, `halfstep_spec`,
imports nothing of this package: it judges what stands here too.
"""

from halfstep.rule import Rule, decay_rate, moment, number, option

__version__ = "0.1.0"

__all__ = ["Rule", "__version__", "decay_rate", "moment", "number", "option"]

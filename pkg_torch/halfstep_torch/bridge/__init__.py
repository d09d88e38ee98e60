"""PyTorch parameters and JAX: Optax transforms as torch optimizers, and models in the layout of JAX.

It needs both frameworks. `halfstep_torch` itself never imports JAX, so import this module separately.
"""

from halfstep_torch.bridge.name_map import NameMap, Place, name_map
from halfstep_torch.bridge.optax_optimizer import OptaxOptimizer
from halfstep_torch.bridge.source_view import SourceView

__all__ = ["NameMap", "OptaxOptimizer", "Place", "SourceView", "name_map"]

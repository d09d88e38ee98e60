"""PyTorch parameters and JAX: any Optax transform as a torch optimizer. Needs both frameworks.

`halfstep_torch` itself never imports JAX; import this on its own.
"""

from halfstep_torch.bridge.optax_optimizer import OptaxOptimizer

__all__ = ["OptaxOptimizer"]

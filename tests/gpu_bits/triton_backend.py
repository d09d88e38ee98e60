"""halfstep_torch as a backend whose compiled steps are Triton's for an H100, executed by the interpreter."""

from backends.on_torch import TorchBackend
from gpu_bits.triton_launches import TritonLaunches
from ptx.approximations import Approximations


class TritonBackend(TorchBackend):
    """torch on an H100 that is not there.

    Only steps are compiled, and so only their kernels are executed. What a step does eagerly, such as the
    norm of a whole parameter, torch itself does on the CPU: a GPU has kernels for it that no one can read.

    Attributes:
        kernels: that steps are made of, inside `kernels.as_on_gpu()`.
    """

    def __init__(self) -> None:
        super().__init__("compile")
        self.kernels = TritonLaunches()

    @property
    def approximations(self) -> Approximations:
        """What approximate operations give, in the next runs."""
        return self.kernels.approximations

    @approximations.setter
    def approximations(self, value: Approximations) -> None:
        self.kernels.approximations = value

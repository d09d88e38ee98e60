"""Programs of a GPU, executed without one: PTX as compilers write it, in NumPy.

`make gpu-bits` compiles steps of both packages for an H100 and runs them here, on arrays in this machine's
memory. What PTX defines is computed exactly. What it only bounds, roots and quotients, is moved by as much as
NVIDIA's documents allow. What is not known here, be it an instruction, a modifier or an address, raises.

Two things are taken on trust: that `ptxas` translates PTX into instructions that mean the same, and that
NVIDIA's documents are right. `make gpu` tests both, on hardware.
"""

from gpu_bits import conversions as conversions
from gpu_bits import floats as floats
from gpu_bits import integers as integers
from gpu_bits import moves as moves

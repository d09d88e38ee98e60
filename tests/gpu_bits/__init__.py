"""Programs of a GPU, executed without one: PTX as compilers write it, in NumPy.

`make gpu-bits` compiles steps of both packages for an H100 and runs them here, on arrays in this machine's
memory. What PTX defines is computed exactly. What it only bounds, roots and quotients, is moved by as much as
documents allow. What is not known here, be it an instruction, a modifier or an address, raises.

Read it in this order:

- `ptx` parses the text, `launch` runs a kernel: registers are arrays over all threads. `memory` is what they
  load and store. `operations` finds the function of an instruction; `moves`, `integers`, `floats` and
  `conversions` hold them; `approximations` has what a device may do. `cases` are golden cases for each.
- `hlo` and `xla` run a whole program of XLA's, `triton_launches` the kernels of torch.compile.
- `steps` says which steps are executed, of which formats (`moment_formats`) and numbers, and what is not;
  `xla_backend` and `triton_backend` take those steps; `comparison` holds them against the contract.
- `test_xla_controls` and `test_triton_controls` show what the comparison sees, and what it is blind to.

Two things are taken on trust: that `ptxas` translates PTX into instructions that mean the same, and that
documents are right about approximations. `make gpu` tests both, on hardware.
"""

from gpu_bits import conversions as conversions
from gpu_bits import floats as floats
from gpu_bits import integers as integers
from gpu_bits import moves as moves

"""Programs of a GPU, executed without one: PTX as compilers write it, in NumPy.

What PTX defines is computed exactly. What it only bounds, roots and quotients, is moved by as much as
documents allow. What is not known here, be it an instruction, a modifier or an address, raises. Nothing of
halfstep is imported: its tests (`tests/gpu_bits`) execute the steps of both packages with it.

Read it in this order:

- `kernel` parses the text, `launch` runs a kernel: registers are arrays over all threads. `memory` is what
  they load and store. `operations` finds the function of an instruction; `moves`, `integers`, `floats` and
  `conversions` hold them; `approximations` has what a device may do. Each has golden cases in `tests`.
- `hlo` and `xla` run a whole program of XLA's.

Two things are taken on trust: that `ptxas` translates PTX into instructions that mean the same, and that
documents are right about approximations. `make gpu` tests both, on hardware.
"""

from ptx import conversions as conversions
from ptx import floats as floats
from ptx import integers as integers
from ptx import moves as moves

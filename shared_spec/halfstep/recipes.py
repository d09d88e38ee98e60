"""Named settings of Adam, AdamW, LAMB and LAMB16: how many bytes to keep, in one word.

Each is a mapping of keyword arguments, for bfloat16 weights: `adamw(1e-3, **recipes.eight_bit)`.

>>> from halfstep import recipes
>>> recipes.eight_bit["nu_dtype"].text
'ufloat8_e5m3, blocks of 128'

`docs/recipes.md` has what each of them costs and how closely it follows float32.

Contract: F1, F5, F6, F12 to F18.
"""

import types

from halfstep.storage.relative import relative
from halfstep.storage.state_dtypes import scaled

full_precision = types.MappingProxyType(
    {"param_storage": "split16", "mu_dtype": "float32", "nu_dtype": "float32"}
)
"""12 bytes per parameter: float32 weights, of which the model sees the upper half, and float32 moments."""

near_float32 = types.MappingProxyType(
    {"param_storage": "split8", "mu_dtype": "bfloat16", "nu_dtype": "bfloat16"}
)
"""7 bytes: weights of 24 bits, moments of 16."""

sixteen_bit = types.MappingProxyType({"mu_dtype": "bfloat16", "nu_dtype": "bfloat16"})
"""6 bytes: what bfloat16 weights get by default."""

one_pass = types.MappingProxyType({"mu_dtype": relative("mulaw8"), "nu_dtype": "uroot4_e4m4"})
"""4.00 bytes: 8-bit moments without scales, roots and quotients, so that a step reads memory once."""

eight_bit = types.MappingProxyType(
    {"mu_dtype": relative("float8_e3m4"), "nu_dtype": scaled("ufloat8_e5m3", 128)}
)
"""4.01 bytes: the second moment with a scale per block of 128, and so nearer to float32, in a second pass."""

four_bit = types.MappingProxyType({"mu_dtype": relative("int4", 32), "nu_dtype": scaled("ufloat8_e5m3", 128)})
"""3.55 bytes: a first moment of 4 bits, a second one of 8."""

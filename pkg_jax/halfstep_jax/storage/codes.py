"""The codes of all state formats, on arrays of JAX."""

from halfstep.storage import codes, floats
from halfstep.storage.base_codes import Codes as SharedCodes
from halfstep_jax.storage.base_codes import Codes
from halfstep_jax.storage.float_codes import PlainCodes, SignedCodes

# Codes with arithmetic of JAX's own.
_OWN: dict[type[SharedCodes], type[Codes]] = {floats.PlainCodes: PlainCodes, floats.SignedCodes: SignedCodes}
CODES = {
    family: {name: _OWN.get(type(entry), Codes)(entry) for name, entry in entries.items()}
    for family, entries in codes.CODES.items()
}
"""By the family of the format, and by name."""

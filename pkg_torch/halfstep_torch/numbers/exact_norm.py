"""A norm over many arrays whose bits do not depend on the order of the sum, nor on its pieces.

Contract: C2. Magnitudes become integers of 24 bits, which are squared and added in int64 without a rounding.
"""

from collections.abc import Sequence

import torch
from torch import Tensor

from halfstep_torch.numbers.exact import sqrt

# Exponent fields for which 2^(150 - e) and 2^(e - 150) are normal numbers.
_LOWEST, _HIGHEST = 24, 254
# So many squares below 2^48 add up to less than 2^63; and so many elements are squared at a time.
_ROW, _PIECE = 2**14, 2**20
_DIGITS, _BITS = 6, 16


def exact_norm(arrays: Sequence[Tensor]) -> Tensor:
    """Return the Euclidean norm of all elements of `arrays`: 2^(e - 150) sqrt(sum(r^2)).

    e is the exponent field of max |x|, at least 24, and r = nearest(|x| 2^(150 - e)), an integer below 2^24.
    The sum is exact. It becomes float32 by its digits to the base 2^16, from the highest of six down:
    s = (65536 s) + digit. So any order, any pieces and any backend give the same bits. The error is under
    1e-7 of the norm; elements below 2^-25 of the largest count as zero. It costs two reads of the arrays in
    place of one, and the second is slower.

    Args:
        arrays: float32, bfloat16 or float16, of any shapes, on one device.

    Returns:
        A float32 0-d tensor: 0 if there is nothing but zeros, NaN if an element is NaN, else infinity if one
        is infinite.

    Example:
        >>> exact_norm([torch.tensor([3e-30]), torch.tensor([-4e-30])]).item()
        5.000000015855384e-30

    Source: ours (contract C2).
    """
    flat = [x.detach().reshape(-1) for x in arrays if x.numel()]
    if not flat:
        return torch.zeros([])
    largest = torch.stack([x.abs().amax().to(torch.float32) for x in flat]).amax()
    field = (largest.view(torch.int32) >> 23).clamp(_LOWEST, _HIGHEST)
    up = _power_of_two(277 - field)
    digits = sum(_digits_of_squares(piece.to(torch.float32) * up) for x in flat for piece in x.split(_PIECE))
    digits, s = _carried(digits), torch.zeros_like(largest)
    for i in reversed(range(_DIGITS)):
        s = 65536 * s + digits[i].to(torch.float32)
    return torch.where(largest < torch.inf, _power_of_two(field - 23) * sqrt(s), largest)


def _digits_of_squares(x: Tensor) -> Tensor:
    """Return sum(r^2), r = nearest(|x|), as sums of digits of 16 bits: int64[6].

    Args:
        x: float32, one axis, below 2^24 in magnitude after rounding; what is not finite gives some number.
    """
    r = x.abs().round().nan_to_num(0, 0, 0).to(torch.int64)
    padded = torch.nn.functional.pad(r * r, (0, -r.numel() % _ROW))
    sums = padded.view(-1, _ROW).sum(1)
    return torch.stack([(sums >> _BITS * i & 2**_BITS - 1).sum() for i in range(_DIGITS)])


def _carried(digits: Tensor) -> Tensor:
    """Return the same number with digits below 2^16, the highest one apart."""
    carried, carry = [], torch.zeros_like(digits[0])
    for i in range(_DIGITS - 1):
        whole = digits[i] + carry
        carried.append(whole & 2**_BITS - 1)
        carry = whole >> _BITS
    return torch.stack([*carried, digits[-1] + carry])


def _power_of_two(field: Tensor) -> Tensor:
    """Return the float32 number of an exponent field, with no mantissa."""
    return (field << 23).view(torch.float32)

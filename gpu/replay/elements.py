"""Storing float64 as a trainer's dtype: to the nearest, ties to even, by way of float32.

bfloat16 is seen as its bits in uint16, float16 as its bits in int16 (see gpu.logit_rows). Both compilers use the
conversions.
"""

import numpy as np
from numba import njit, types
from numba.extending import overload


def write(flat, index, value):
    """Store a float64 as element `index` of the flat array, whose type alone says how to encode it."""
    raise NotImplementedError("kernels only")


@overload(write)
def _write(flat, index, value):
    if isinstance(flat.dtype, types.Float):

        def write_float(flat, index, value):
            flat[index] = value

        return write_float
    encode = bfloat16_bits if flat.dtype == types.uint16 else half_bits

    def write_bits(flat, index, value):
        flat[index] = encode(np.float32(value))

    return write_bits


@njit(nogil=True)
def bfloat16_bits(x):
    """The bits of a float32, rounded to bfloat16."""
    bits = np.int64(np.float32(x).view(np.uint32))
    if (bits & 0x7FFFFFFF) > 0x7F800000:  # rounding could carry a NaN into infinity
        return np.uint16((bits >> 16) | 0x40)
    return np.uint16((bits + 0x7FFF + ((bits >> 16) & 1)) >> 16)


@njit(nogil=True)
def half_bits(x):
    """The bits of a float32, rounded to float16 (IEEE 754 binary16)."""
    bits = np.int64(np.float32(x).view(np.uint32))
    sign, magnitude = (bits >> 16) & 0x8000, bits & 0x7FFFFFFF
    if magnitude > 0x7F800000:
        half = np.int64(0x7E00)
    elif magnitude >= 0x477FF000:  # half way from the largest float16 to 2^16
        half = np.int64(0x7C00)
    elif magnitude < 0x38800000:  # below 2^-14, where float16 has steps of 2^-24, like float32 at 1/2
        shifted = np.float32(np.uint32(magnitude).view(np.float32) + np.float32(0.5))
        half = np.int64(shifted.view(np.uint32)) - 0x3F000000
    else:
        half = (magnitude - (112 << 23) + 0xFFF + ((magnitude >> 13) & 1)) >> 13
    half |= sign
    return np.int16(half - 0x10000 if half >= 0x8000 else half)

"""The bins in which a row's stored maxima are counted: BINS, in the order of the keys.

An octave from 2^-6 to 2^10, where logits lie, has 16 bins, any other is one. So the granules down to the bin of the
k-th largest are few more than k, without another look at the maxima. More bins an octave would list fewer yet, but
make every block of the scan add to more of them.

With t a magnitude's bits in the stored key, and c how far it is above 2^-6, at least 0 and at most 16 octaves, its bin
is (t - c) / octave + 16 * c / octave, counted from zero up or down.
"""

from functools import lru_cache
from typing import Any, NamedTuple

import numpy as np
from numba import cuda

BINS = 1024
_HALF, _FINE, _LEAST, _OCTAVES = BINS // 2, 4, -6, 16  # _FINE: log2 of an octave's bins
_EXPONENT_BITS = {"float32": 8, "bfloat16": 8, "float16": 5}


class Bins(NamedTuple):
    """For keys cut to 16 bits."""

    octave: int  # log2 of the stored keys in an octave, the most that are in a bin
    bin_of: Any  # stored key -> its bin
    least_of: Any  # bin, BINS beyond the last -> the least stored key in it, 0x10000 beyond all


@lru_cache
def bins_of(name: str) -> Bins:
    """The bins for logits of this dtype."""
    exponent_bits = _EXPONENT_BITS[name]
    octave = 15 - exponent_bits
    first_fine = (1 << (exponent_bits - 1)) - 1 + _LEAST
    begin, fine, room = first_fine << octave, octave - _FINE, _OCTAVES << octave
    assert (1 << exponent_bits) - _OCTAVES + (_OCTAVES << _FINE) <= _HALF

    @cuda.jit(device=True)
    def bin_of(stored):
        flip = np.int32(np.int32(stored >> np.uint32(15)) - 1)  # all bits of what is below 0, else none
        t = np.int32((np.int32(stored) ^ flip) & np.int32(0x7FFF))
        c = min(max(np.int32(t - begin), np.int32(0)), np.int32(room))
        return np.int32(_HALF + ((np.int32(np.int32(np.int32(t - c) >> octave) + np.int32(c >> fine))) ^ flip))

    @cuda.jit(device=True)
    def least_of(slot):
        away = np.int32(slot - _HALF)
        number = abs(away)
        t = np.int32(number << octave)
        if number > first_fine:
            t = np.int32(begin + (np.int32(number - first_fine) << fine))
        if number > first_fine + (_OCTAVES << _FINE):
            t = np.int32(np.int32(number - (_OCTAVES << _FINE) + _OCTAVES) << octave)
        t = min(t, np.int32(0x8000))
        return np.uint32(0x8000 + t) if away >= 0 else np.uint32(0x8000 - t)

    return Bins(octave, bin_of, least_of)

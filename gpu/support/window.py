"""From a tally of a row's logits by distance: the window of keys in which top-p should be crossed.

What lies below the crossing weighs (1 - top_p) * Z, and is light and many: so much is counted from the tally's far end.
"""

from functools import lru_cache
from typing import Any

import numpy as np
from numba import cuda, njit

from gpu.device.block import block_of
from gpu.device.vectors import format_of
from gpu.instructions import product
from gpu.support.cutoffs import mass_limit
from gpu.weights import weight

TALLIED = 2048  # bins of the weights
BINS_A_POWER = np.float32(TALLIED / 45.0)  # bins for a factor 2 of weight: beyond 2^-45 of the maximum nothing weighs
EVERY = 4  # of so many logits one is tallied
# On each side of the crossing. Less than half of what fits: both ends are ties as a rule, and belong to it whole (of
# 248,320 normal bfloat16 logits 400 at top_p .95).
_HALF = 1450 // EVERY
_FEW = 600 // EVERY  # a crossing so near is found sooner among the row's largest


@njit(nogil=True)
def _below(maximum, bins, unit):
    return np.float32(maximum) - product(np.float32(bins), np.float32(unit))


@lru_cache
def window_of(name: str, threads: int) -> Any:
    """A device function (tally, at, mass, top_p, top, scale, box, scratch32, scratch64) -> lowest and highest key.

    0 and 0 where a window doesn't pay. Every thread of the block takes part. mass: of the whole row. box: shared
    int32 [3]; the scratches are shared too, an element for each warp.
    """
    form, prefix_both = format_of(name), block_of(threads).prefix_both
    minus_inf, negative_zero, key_of_value = form.minus_inf, form.negative_zero, form.key_of_value
    per_thread = TALLIED // threads

    @cuda.jit(device=True)
    def mass_of(number, b, unit, scale):
        # Of a bin, its logits taken for its middle.
        x = np.float32(_below(scale.maximum, np.float32(np.float32(b) + np.float32(0.5)), unit))
        return np.int64(np.int64(number * EVERY) * np.int64(weight(x, scale.maximum, scale.c_hi, scale.c_lo)))

    @cuda.jit(device=True)
    def number_at(tally, at, b):
        return np.int32(tally[at + b]) if 0 <= b < TALLIED else np.int32(0)

    @cuda.jit(device=True)
    def find(rank, before, own, tally, at, box, to):
        # Whoever's bins hold this rank leaves its distance from the maximum, in 1/256 bins. One with far more than its
        # neighbours holds ties, anywhere in it: the window takes all of it.
        if before <= rank < before + own:
            b = np.int32(cuda.threadIdx.x * per_thread)
            number = np.int32(tally[at + b])
            while before + number <= rank:
                before = np.int32(before + number)
                b = np.int32(b + 1)
                number = np.int32(tally[at + b])
            part = np.float32(np.float32(rank - before) / np.float32(number))
            if number > 2 * (number_at(tally, at, b - 1) + number_at(tally, at, b + 1)):
                part = np.float32(to - 1)
            box[to] = np.int32(np.float32(np.float32(b) + part) * np.float32(256.0))

    @cuda.jit(device=True)
    def key_at(distance, unit, scale):
        x = np.float32(_below(scale.maximum, np.float32(np.float32(distance) * np.float32(1 / 256)), unit))
        return np.uint32(key_of_value(x))

    @cuda.jit(device=True)
    def window(tally, at, mass, top_p, top, scale, box, scratch32, scratch64):
        first = np.int32(cuda.threadIdx.x * per_thread)
        unit = np.float32(np.float32(1.0) / np.float32(scale.c_hi * BINS_A_POWER))
        own, own_mass = np.int32(0), np.int64(0)
        for i in range(per_thread):
            number = np.int32(tally[at + first + i])
            own = np.int32(own + number)
            own_mass = np.int64(own_mass + mass_of(number, np.int32(first + i), unit, scale))
        if cuda.threadIdx.x == 0:
            box[0], box[1], box[2] = -1, -1, -1
        before, _, mass_before, estimate = prefix_both(own, own_mass, scratch32, scratch64)
        limit = np.float64(estimate) - (np.float64(mass) - mass_limit(top_p, mass))
        if np.float64(mass_before) < limit <= np.float64(mass_before + own_mass):
            rank, through, b = before, mass_before, first
            number = np.int32(tally[at + b])
            own_mass = mass_of(number, b, unit, scale)
            while np.float64(through + own_mass) < limit:
                rank, through, b = np.int32(rank + number), np.int64(through + own_mass), np.int32(b + 1)
                number = np.int32(tally[at + b])
                own_mass = mass_of(number, b, unit, scale)
            part = (limit - np.float64(through)) / np.float64(own_mass)
            box[0] = np.int32(rank + np.int32(part * np.float64(number)))
        cuda.syncthreads()
        rank = np.int32(box[0])
        find(np.int32(rank - _HALF), before, own, tally, at, box, 1)
        find(np.int32(rank + _HALF), before, own, tally, at, box, 2)
        cuda.syncthreads()
        if rank < _FEW:
            return np.uint32(0), np.uint32(0)
        low, high = np.uint32(minus_inf + 1), top
        if box[1] >= 0:
            high = min(top, key_at(box[1], unit, scale))
        if box[2] >= 0:
            low = max(low, min(high, key_at(box[2], unit, scale)))
        if low == np.uint32(negative_zero + 1):  # the two zeros are one value
            low = np.uint32(negative_zero)
        if high == np.uint32(negative_zero):
            high = np.uint32(negative_zero + 1)
        return low, high

    return window

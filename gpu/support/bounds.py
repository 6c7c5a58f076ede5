"""The top-p cutoff of a row whose support is small, without weighing the whole row. Kernel helpers of the host.

Where top_p is crossed depends on the row's mass Z, but bounds of Z often tell. Blocks whose maximum lies within DEPTH
temperatures of the row's are weighed: that is `low`. What the others weigh is bounded by `rest`, cheaply: the exponent
and the fraction of t = (x - m) * log2(e)/T are put side by side into the bits of a float32, which reads as
(1 + f) * 2^n >= 2^(n + f), at most 6.2 % more (the piecewise linear exponential of Schraudolph 1999). The cutoff c for
Z = low is the cutoff for any Z in low .. low + rest if what is kept weighs at least top_p * (low + rest), because
mass(> c) < top_p * low <= top_p * Z <= mass(>= c). Otherwise nothing is certain, and the caller weighs the row.
"""

import numpy as np
from numba import njit

from gpu.logit_rows import load
from gpu.support.cutoffs import BLOCK, collect, kept_mass, mass_limit, top_p_cutoff
from gpu.weights import LOWEST, LOWEST_KEY, ONE, cutoff_key, value_of, weight

DEPTH = 10.0
_WORTH_IT = 4  # a row is left alone if more than one block in so many is near its maximum
_MARGIN = 1.01  # more than all rounding of the bound


@njit(nogil=True, fastmath={"reassoc", "contract"})
def _bound(values, maximum, scale):
    # At least the sum of exp((x - m) / T), but for rounding; its order is free, since no result depends on it.
    total = np.float32(0.0)
    for i in range(values.size):
        t = max((load(values, i) - maximum) * scale, np.float32(-100.0))
        total += np.int32((t + np.float32(127.0)) * np.float32(1 << 23)).view(np.float32)
    return total


@njit(nogil=True)
def certain_cutoff(
    flat, start, vocabulary, block_keys, maximum, temperature, c_hi, c_lo, top_p,
    candidates, bins, weight_chunk, bin_chunk,
):  # fmt: skip
    """(True, the top-p cutoff) of an unfiltered row, or (False, LOWEST). Overwrites candidates float32 [V + 1]."""
    least = max(LOWEST_KEY, cutoff_key(np.float32(maximum - np.float64(temperature) * DEPTH)))
    reached = np.int64(0)
    for block in range(block_keys.size):
        reached += block_keys[block] >= least
    if reached * _WORTH_IT > block_keys.size:
        return False, LOWEST
    low, rest = np.int64(0), np.float64(0.0)
    for block in range(block_keys.size):
        first = start + block * BLOCK
        values = flat[first : min(first + BLOCK, start + vocabulary)]
        if block_keys[block] >= least:
            for i in range(values.size):
                low += weight(load(values, i), maximum, c_hi, c_lo)
        else:
            rest += np.float64(_bound(values, maximum, c_hi))
    high = low + np.int64(rest * _MARGIN * ONE) + 1
    size = collect(flat, start, vocabulary, block_keys, least, candidates)
    cutoff = top_p_cutoff(
        candidates[:size], LOWEST, value_of(least), maximum, c_hi, c_lo, top_p, low, bins, weight_chunk, bin_chunk
    )
    if cutoff > LOWEST:
        _, kept, _ = kept_mass(flat, start, vocabulary, block_keys, cutoff_key(cutoff), maximum, c_hi, c_lo)
        if np.float64(kept) >= mass_limit(top_p, high):
            return True, cutoff
    return False, LOWEST

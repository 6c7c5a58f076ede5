"""What a row weighs, within MARGIN, from the one read of the logits: enough to know most crossings of top-p.

A warp of the scan has 128 vectors of logits x in its registers, and knows their largest, m. Of each it computes

    2^(x*c - M),   c = log2(e)/T by `div.approx`, M = m*c rounded to a float32

by a fused multiply-add and `ex2.approx`; the sum, times 2^(M - m*c), is the warp's mass in units of its largest. The
first warp adds up those of the chunk, in units of the chunk's largest; and who wants to know the row's mass adds up the
chunks', by the integer weights of their largest.

What rounding can do to a sum, relatively, with e = 2^-24 and t the exponents below the chunk's largest. An element's
factor is wrong by ln(2) * |t| * 7e: c by 5e, a difference or a fused sum by e, a product by e. By mass the mean of |t|
over n elements is at most S/(1 + S) * log2(n/S), S the mass besides the largest: below 10 for n = 16,384, which makes
2.9e-6. Three `ex2.approx`, 2^-22 each: 7.2e-7. Sums, 8 + 2 in a thread and 5 + 5 over lanes, and two products: 1.3e-6.
The integer weights, twice 1.5e-7 and 2^-26 for what they cut off: 3.2e-7. Together 5.3e-6; MARGIN is 7.6e-6.
"""

from functools import lru_cache
from typing import Any

import numpy as np
from numba import cuda, njit

from gpu.device.block import FULL, WARP, warp_sum64
from gpu.device.instructions import exp2_approximate, warp_min_u32
from gpu.device.vectors import cut_of, format_of
from gpu.instructions import fma, product
from gpu.weights import HOTTEST, weight

MARGIN = 2.0**-17
LOG2_E = np.float32(np.log2(np.e))
_LEAST = np.float32(0.5)  # a chunk weighs as much as its largest at least


@njit(nogil=True)
def _product(a, b):
    return product(a, b)


@njit(nogil=True)
def _fused(x, scale, shift):
    return fma(x, scale, -shift)


@cuda.jit(device=True)
def needs_mass(limits, joint):
    """Whether what a row keeps depends on the mass of all of it, which can be estimated."""
    filters = limits.top_p < np.float32(1.0) and (limits.k == 0 or joint != 0)
    return filters and limits.good and not limits.greedy and limits.temperature <= np.float32(HOTTEST)


@cuda.jit(device=True)
def _warp_sum(value):
    # Float32, the same in every lane.
    for i in range(5):
        value = np.float32(value + cuda.shfl_xor_sync(FULL, value, 1 << i))
    return value


@lru_cache
def warp_mass_of(name: str) -> Any:
    """A device function for logits of this dtype: (words, largest, scale, inside, first, stride, vocabulary).

    Returns the float32 mass of the warp's four vectors a lane, in units of the largest of them, whose key is given;
    0 where all are -inf, NaN where it can't be known. scale: c. inside: whether all belong to the row; else first, the
    token id of the lane's first element, and stride, how many further its next vector's is, tell which.
    """
    form = format_of(name)
    lanes, decode, value_of, minus_inf, cut = form.lanes, form.decode, form.value, form.minus_inf, cut_of(name)

    @cuda.jit(device=True)
    def vector_mass(w0, w1, w2, w3, scale, shift, inside, first, vocabulary):
        if not inside:
            w0, w1, w2, w3 = cut(w0, w1, w2, w3, first, vocabulary)
        mass = np.float32(0.0)
        for lane in range(lanes):
            x = decode(w0, w1, w2, w3, lane)
            mass = np.float32(mass + exp2_approximate(np.float32(_fused(x, scale, shift))))
        return mass

    @cuda.jit(device=True)
    def warp_mass(words, largest, scale, inside, first, stride, vocabulary):
        if largest <= minus_inf:
            return np.float32(0.0)
        a0, a1, a2, a3, b0, b1, b2, b3, c0, c1, c2, c3, d0, d1, d2, d3 = words
        maximum = value_of(largest)
        shift = np.float32(_product(maximum, scale))
        error = np.float32(_fused(maximum, scale, shift))
        if not np.float32(-1.0) <= error <= np.float32(1.0):  # shift isn't finite, or as large as its digits
            return np.float32(np.nan)
        a = vector_mass(a0, a1, a2, a3, scale, shift, inside, first, vocabulary)
        b = vector_mass(b0, b1, b2, b3, scale, shift, inside, np.int32(first + stride), vocabulary)
        c = vector_mass(c0, c1, c2, c3, scale, shift, inside, np.int32(first + 2 * stride), vocabulary)
        d = vector_mass(d0, d1, d2, d3, scale, shift, inside, np.int32(first + 3 * stride), vocabulary)
        mass = _warp_sum(np.float32(np.float32(a + b) + np.float32(c + d)))
        return np.float32(_product(mass, exp2_approximate(np.float32(-error))))

    return warp_mass


@lru_cache
def chunk_mass_of(name: str) -> Any:
    """A device function (mass, key, largest, scale): one warp adds up the masses of a chunk's warps, a lane each.

    Returns the float32 mass in units of the chunk's largest logit. mass and key: a warp's, its key 0 where the lane has
    none; largest: the chunk's key; scale: c.
    """
    form = format_of(name)
    value_of, minus_inf = form.value, form.minus_inf

    @cuda.jit(device=True)
    def chunk_mass(mass, key, largest, scale):
        own = np.float32(0.0)
        if key > minus_inf:
            difference = np.float32(value_of(key) - value_of(largest))
            own = np.float32(_product(mass, exp2_approximate(np.float32(_product(difference, scale)))))
        return _warp_sum(own)

    return chunk_mass


@lru_cache
def mass_between_of(name: str) -> Any:
    """A device function (marks, estimates, index, scale) -> two int64 between which the row's mass lies; 0, 0: unknown.

    Every lane of the warp takes part. scale: the row's Scale.
    """
    form = format_of(name)
    value_of, minus_inf, most = form.value, form.minus_inf, np.float32(1 << 18)

    @cuda.jit(device=True)
    def mass_between(marks, estimates, index, scale):
        total, known = np.int64(0), np.uint32(1)
        for i in range(cuda.laneid, marks.chunks, WARP):
            at = np.int64(np.int64(index) * marks.chunks + i)
            key = np.uint32(marks.chunk_largest[at])
            if key > minus_inf:
                share = np.float32(estimates[at])
                if _LEAST <= share <= most:
                    of_largest = np.int64(weight(value_of(key), scale.maximum, scale.c_hi, scale.c_lo))
                    total = np.int64(total + np.int64(np.float64(share) * np.float64(of_largest)))
                else:
                    known = np.uint32(0)
        total, known = np.float64(warp_sum64(total)), warp_min_u32(known)
        if known == 0:
            return np.int64(0), np.int64(0)
        return np.int64(total * (1.0 - MARGIN)), np.int64(total * (1.0 + MARGIN)) + np.int64(1)

    return mass_between

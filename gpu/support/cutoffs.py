"""Cutoffs on the logit value: the k-th largest of a row, and the top-p crossing. Kernel helpers.

Both avoid a sort of the row. The k-th largest maximum of small blocks is a lower bound of the k-th largest
value, so only blocks that reach it are read again. The top-p crossing is found in masses of monotone bins,
and only the crossing bin is sorted.
"""

import math

import numpy as np
from numba import njit

from gpu.instructions import product
from gpu.logit_rows import load
from gpu.weights import KEY_MINUS_INF, KEY_PLUS_INF, LOWEST_KEY, cutoff_key, key_of, log64, value_of, weight

BLOCK = 64  # elements under one stored maximum
BINS = 1024
CHUNK = 512  # elements weighed at once, before they are scattered into bins

_BINNED_LOG2 = 45.0  # weights vanish below 2^-44


@njit(nogil=True)
def _extremes(values, size):
    high, low = np.int32(-0x80000000), np.int32(0x7FFFFFFF)
    for i in range(size):
        key = key_of(load(values, i))
        high = key if key > high else high
        low = key if key < low else low
    return high, low


@njit(nogil=True)
def block_maxima(flat, start, vocabulary, block_keys):
    """Fill block_keys int32 [ceil(V / BLOCK)]; return the row's largest and smallest key."""
    largest, smallest = KEY_MINUS_INF, KEY_PLUS_INF
    full = vocabulary // BLOCK
    for block in range(full):
        first = start + block * BLOCK
        high, low = _extremes(flat[first : first + BLOCK], BLOCK)  # a constant size: vector code
        block_keys[block] = high
        largest = max(largest, high)
        smallest = min(smallest, low)
    if full < block_keys.size:
        first = start + full * BLOCK
        high, low = _extremes(flat[first : start + vocabulary], vocabulary - full * BLOCK)
        block_keys[full] = high
        largest = max(largest, high)
        smallest = min(smallest, low)
    return largest, smallest


@njit(nogil=True)
def first_index(flat, start, vocabulary, block_keys, value):
    """The lowest index whose logit equals `value`, the row's maximum."""
    least = cutoff_key(value)
    for block in range(block_keys.size):
        if block_keys[block] >= least:
            for index in range(block * BLOCK, min((block + 1) * BLOCK, vocabulary)):
                if load(flat, start + index) == value:
                    return index
    return -1


@njit(nogil=True)
def kth_largest(values, size, k):
    """The k-th largest (1-based) of values[:size], which it reorders. No NaN. Hoare's selection."""
    low, high, target = 0, size - 1, k - 1
    while low < high:
        pivot = values[(low + high) >> 1]
        i, j = low, high
        while i <= j:
            while values[i] > pivot:
                i += 1
            while values[j] < pivot:
                j -= 1
            if i <= j:
                values[i], values[j] = values[j], values[i]
                i += 1
                j -= 1
        if target <= j:
            high = j
        elif target >= i:
            low = i
        else:
            break
    return values[target]


@njit(nogil=True)
def collect(flat, start, vocabulary, block_keys, least, candidates):
    """Write every element whose key is at least `least` to candidates float32 [V + 1]; return how many."""
    size = 0
    for block in range(block_keys.size):
        if block_keys[block] >= least:
            first = start + block * BLOCK
            values = flat[first : min(first + BLOCK, start + vocabulary)]
            for i in range(values.size):
                x = load(values, i)
                candidates[size] = x  # kept only if counted
                size += key_of(x) >= least
    return size


@njit(nogil=True)
def kth_largest_bound(block_keys, k, key_scratch):
    """A key that at least k elements reach, and few more: the k-th largest block maximum."""
    if k > block_keys.size:
        return LOWEST_KEY
    for block in range(block_keys.size):
        key_scratch[block] = block_keys[block]
    return max(LOWEST_KEY, cutoff_key(value_of(kth_largest(key_scratch, key_scratch.size, k))))


@njit(nogil=True)
def tail_bound(vocabulary, maximum, temperature, top_p):
    """A key below which lies less than 1 - top_p of the mass, so that the top-p crossing lies above it.

    V tokens at or below m - T*ln(V / (1 - top_p)) weigh less than 1 - top_p of the maximum alone. A factor e
    more is far beyond rounding.
    """
    depth = math.log(vocabulary / (1.0 - np.float64(top_p))) + 1.0
    bound = np.float32(np.float64(maximum) - np.float64(temperature) * depth)
    return max(LOWEST_KEY, cutoff_key(bound))


@njit(nogil=True)
def mass_limit(top_p, mass):
    """top_p * Z in float64: a value is kept while the mass above it is smaller."""
    return product(np.float64(top_p), np.float64(mass))


@njit(nogil=True)
def _bin_of(x, maximum, scale):
    position = (maximum - x) * scale
    last = np.float32(BINS - 1)
    return np.int32(position if position < last else last)


@njit(nogil=True)
def _bin_masses(values, floor, maximum, c_hi, c_lo, scale, bins, weight_chunk, bin_chunk):
    for b in range(BINS):
        bins[b] = 0
    for first in range(0, values.size, CHUNK):
        part = values[first : min(first + CHUNK, values.size)]
        for i in range(part.size):
            mass = weight(part[i], maximum, c_hi, c_lo)
            weight_chunk[i] = mass if part[i] >= floor else np.int64(0)
            bin_chunk[i] = _bin_of(part[i], maximum, scale)
        for i in range(part.size):
            bins[bin_chunk[i]] += weight_chunk[i]


@njit(nogil=True, error_model="numpy")
def top_p_cutoff(values, floor, lowest, maximum, c_hi, c_lo, top_p, mass, bins, weight_chunk, bin_chunk):
    """The smallest x >= floor among values (float32, overwritten) with mass(> x) < top_p * Z.

    Z: `mass`, or where that is 0 the mass of the values >= floor. `lowest` bounds those values from below.
    """
    span = np.float64(maximum) - np.float64(lowest)
    span = min(span, _BINNED_LOG2 / np.float64(c_hi))
    scale = np.float32(1e30)
    if span > BINS * 1e-30:
        scale = np.float32(max(BINS / span, 1e-30))
    _bin_masses(values, floor, maximum, c_hi, c_lo, scale, bins, weight_chunk, bin_chunk)
    if mass == 0:
        for b in range(BINS):
            mass += bins[b]
    limit = mass_limit(top_p, mass)
    above = np.int64(0)
    crossing = 0
    while crossing < BINS and np.float64(above + bins[crossing]) < limit:
        above += bins[crossing]
        crossing += 1
    if crossing == BINS:
        return floor
    num = 0
    for i in range(values.size):
        x = values[i]
        values[num] = x  # kept only if counted
        num += x >= floor and _bin_of(x, maximum, scale) == crossing
    ordered = values[:num]
    ordered.sort()
    cutoff = floor
    while num > 0 and np.float64(above) < limit:
        cutoff = ordered[num - 1]
        mass_of_one = weight(cutoff, maximum, c_hi, c_lo)
        while num > 0 and ordered[num - 1] == cutoff:
            above += mass_of_one
            num -= 1
    return cutoff


@njit(nogil=True)
def min_p_cutoff(maximum, temperature, min_p):
    """The smallest float32 that isn't below m + T*log(min_p) in float64; -inf for min_p = 0."""
    if min_p <= 0:
        return np.float32(-np.inf)
    bound = np.float64(maximum) + product(np.float64(temperature), log64(np.float64(min_p)))
    value = np.float32(bound)
    if np.float64(value) < bound:
        value = value_of(np.int32(key_of(value) + np.int32(1)))
    return value


@njit(nogil=True)
def row_mass(flat, start, vocabulary, maximum, c_hi, c_lo):
    """Total weight of the row."""
    total = np.int64(0)
    for first in range(0, vocabulary, CHUNK):
        values = flat[start + first : start + min(first + CHUNK, vocabulary)]
        part = np.int64(0)
        for i in range(values.size):
            part += weight(load(values, i), maximum, c_hi, c_lo)
        total += part
    return total


@njit(nogil=True)
def kept_mass(flat, start, vocabulary, block_keys, least, maximum, c_hi, c_lo):
    """Count, total weight and smallest key of the elements whose key is at least `least`."""
    count, total, smallest = np.int64(0), np.int64(0), KEY_PLUS_INF
    for block in range(block_keys.size):
        if block_keys[block] >= least:
            first = start + block * BLOCK
            values = flat[first : min(first + BLOCK, start + vocabulary)]
            block_count, block_total, block_smallest = np.int32(0), np.int64(0), KEY_PLUS_INF
            for i in range(values.size):
                x = load(values, i)
                key = key_of(x)
                kept = key >= least
                mass = weight(x, maximum, c_hi, c_lo)
                block_total += mass if kept else np.int64(0)
                block_count += np.int32(1) if kept else np.int32(0)
                low = key if kept else KEY_PLUS_INF
                block_smallest = low if low < block_smallest else block_smallest
            count += block_count
            total += block_total
            smallest = min(smallest, block_smallest)
    return count, total, smallest

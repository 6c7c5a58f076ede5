"""The pick where rows may have been weighed whole: it uses what gpu/support/whole.py knows, and else picks as ever."""

from functools import lru_cache
from typing import Any

import numpy as np
from numba import cuda, int32, int64, void

from gpu import status
from gpu.device.block import WARP, block_of
from gpu.device.instructions import add_at
from gpu.device.launch import Kernel
from gpu.device.rows import LOGITS, open_row
from gpu.device.vectors import format_of
from gpu.support.bins import BINS
from gpu.support.finish import finish_of
from gpu.support.gather import KEYS, SCRATCHES, SHARED
from gpu.support.levels import Scale, levels_of
from gpu.support.limits import FILTER, limits_of
from gpu.support.marks import MARKS
from gpu.support.pick import MAX_REGISTERS, SCRATCH64, THREADS, pick_of
from gpu.support.policy import ROWS, open_policy
from gpu.support.whole import (
    ABOVE,
    COUNT,
    FIRST,
    HIGH,
    LEAST,
    LOW,
    NUM_ABOVE,
    NUM_INSIDE,
    SETTLED,
    SUMS,
    TOTAL,
    WHOLE,
    top_of,
)
from gpu.weights import split_scale, weight

_OK = np.uint8(status.OK)
_NONE = 0xFFFFFFFF


@lru_cache
def pick_whole_of(name: str, threads: int) -> Any:
    """A device function for logits of this dtype: (index, logits, marks, bounds, rows, whole, shared, scratch64).

    As that of `pick_of`; leaves the row's sums zero, and no row listed.
    """
    form, block = format_of(name), block_of(threads)
    granule, value_of, negative_zero = 2 * form.lanes, form.value, form.negative_zero
    prefix32 = block.prefix32
    pick, crossing = pick_of(name, threads), levels_of(name, threads).crossing
    reduced = finish_of(name, threads).reduced

    @cuda.jit(device=True)
    def base_of(key):
        # The two zeros are one value.
        return np.uint32(negative_zero) if key == negative_zero + 1 else key

    @cuda.jit(device=True)
    def load_keys(keys_at, size, whole, shared):
        # Of the elements in the window, to the room of keys and ids.
        for i in range(cuda.threadIdx.x, size, threads):
            shared[np.uint32(KEYS + i)] = np.int32(whole.inside[keys_at + i])
        cuda.syncthreads()

    @cuda.jit(device=True)
    def kept_inside(size, cutoff, scale, shared, scratch64):
        # Number, mass and least key of the gathered elements that reach the cutoff.
        number, mass, least = np.int32(0), np.int64(0), np.uint32(_NONE)
        for i in range(cuda.threadIdx.x, size, threads):
            key = np.uint32(shared[np.uint32(KEYS + i)])
            value = value_of(key)
            if value >= cutoff:
                number = np.int32(number + 1)
                mass = np.int64(mass + weight(value, scale.maximum, scale.c_hi, scale.c_lo))
                least = min(least, key)
        _, number = prefix32(number, shared[SCRATCHES:])
        mass, least, _ = reduced(mass, least, least, shared, scratch64)
        return number, mass, least

    @cuda.jit(device=True)
    def add_to_segments(size, cutoff, head, ids_at, segments_at, rows, whole, scale, shared):
        for i in range(cuda.threadIdx.x, size, threads):
            value = value_of(np.uint32(shared[np.uint32(KEYS + i)]))
            if value >= cutoff:
                segment = np.int32(np.int32(whole.inside[ids_at + i] + head) // (granule * WARP))
                mass = np.int64(weight(value, scale.maximum, scale.c_hi, scale.c_lo))
                add_at(rows.segments, np.int64(segments_at + segment), mass)

    @cuda.jit(device=True)
    def use(index, limits, logits, marks, rows, whole, shared, scratch64):
        # Base and cutoff for `pick`, if they are known; and whether the row is done: settled, or without entries.
        at = np.int64(np.int64(index) * SUMS)
        mass, low = np.int64(whole.sums[at + TOTAL]), np.uint32(whole.sums[at + LOW])
        if mass == SETTLED:
            return np.uint32(0), np.float32(0.0), True
        unfiltered = not limits.top_p < np.float32(1.0)
        if mass == 0 or limits.k != 0 or not (unfiltered or low != 0):
            return np.uint32(0), np.float32(0.0), False
        top = top_of(marks, index)
        maximum = np.float32(value_of(top) + np.float32(0.0))
        count, least = np.int32(whole.sums[at + COUNT]), np.uint32(whole.sums[at + LEAST])
        if not unfiltered:
            c_hi, c_lo = split_scale(limits.temperature)
            scale = Scale(maximum, np.float32(c_hi), np.float32(c_lo))
            size, high = np.int32(whole.sums[at + NUM_INSIDE]), np.uint32(whole.sums[at + HIGH])
            size = size if size <= whole.room else np.int32(-1)
            keys_at = np.int64(np.int64(index) * 2 * whole.room)
            load_keys(keys_at, size, whole, shared)
            row = open_row(logits, index, granule, marks.maxima, marks.stride)
            key, reached = crossing(
                row, size, low, high, np.int64(whole.sums[at + ABOVE]), limits.top_p, mass, scale, shared, scratch64
            )
            if not reached:
                return np.uint32(0), np.float32(0.0), False
            cutoff = value_of(key)
            if size < 0 or limits.min_p > np.float32(0.0):  # the window didn't fit, or is yet to be cut
                return base_of(key), cutoff, False
            number, mass, least = kept_inside(size, cutoff, scale, shared, scratch64)
            count, mass = np.int32(whole.sums[at + NUM_ABOVE] + number), np.int64(whole.sums[at + ABOVE] + mass)
            if count > rows.capacity:
                segments_at = np.int64(np.int64(index) * rows.num_segments)
                ids_at = np.int64(keys_at + whole.room)
                add_to_segments(size, cutoff, row.head, ids_at, segments_at, rows, whole, scale, shared)
        cutoff = np.float32(value_of(least) + np.float32(0.0))  # a kept -0.0 and a kept +0.0 are one value
        if count > rows.capacity:
            for i in range(cuda.threadIdx.x, BINS, threads):
                marks.counts[np.int64(index) * BINS + i] = 0
            if cuda.threadIdx.x == 0:
                rows.status[index], rows.greedy[index] = _OK, np.uint8(0)
                rows.maximum[index], rows.cutoff[index] = maximum, cutoff
                rows.count[index], rows.total[index] = count, mass
                rows.argmax[index] = np.int32(whole.sums[at + FIRST])
            return np.uint32(0), cutoff, True
        return base_of(least), cutoff, False

    @cuda.jit(device=True)
    def pick_whole(index, logits, marks, bounds, rows, whole, shared, scratch64):
        limits = limits_of(bounds, rows, index, logits.vocabulary)
        at = np.int64(np.int64(index) * SUMS)
        base, cutoff, done = use(index, limits, logits, marks, rows, whole, shared, scratch64)
        mass = np.int64(whole.sums[at + TOTAL])
        cuda.syncthreads()
        if cuda.threadIdx.x < SUMS:
            whole.sums[at + cuda.threadIdx.x] = 0
        if index == 0 and cuda.threadIdx.x == 0:
            whole.listed[0] = 0
        if done:
            return open_policy(rows, index)
        return pick(index, mass, base, cutoff, logits, marks, bounds, rows, shared, scratch64)

    return pick_whole


@lru_cache
def pick_whole_kernel(name: str, threads: int = THREADS) -> Kernel:
    """The kernel for logits of this dtype; its grid is (rows,)."""
    pick = pick_whole_of(name, threads)

    def pick_rows(logits, marks, bounds, rows, whole):
        shared = cuda.shared.array(SHARED, int32)
        scratch64 = cuda.shared.array(SCRATCH64, int64)
        pick(np.int32(cuda.blockIdx.x), logits, marks, bounds, rows, whole, shared, scratch64)

    return Kernel(pick_rows, void(LOGITS, MARKS, FILTER, ROWS, WHOLE), threads, MAX_REGISTERS)

"""The one read of the logits, the first step of the filter.

A block takes a chunk of a row, LOADS * THREADS vectors. It stores the key of each granule's largest element, cut to
16 bits, and counts those in bins (gpu/support/bins.py); the k-th largest of them bounds the k-th largest logit from
below, so that only granules that reach it are read again. NaN and +inf surface as the row's largest key. A variant of
it estimates the masses of rows without a top_k on the way (gpu/support/estimate.py).

It is a kernel of its own, whose blocks need few registers, so that many loads are under way. Where all blocks run at
once anyhow, the kernel behind it scans too, and the last block of a row goes on with it: 4 us less for a few rows; for
256, whose last blocks would take the others' places, 16 us more.
"""

from functools import lru_cache
from typing import Any

import numpy as np
from numba import cuda, float32, int32, void

from gpu.device.block import FULL, WARP, last_to_come
from gpu.device.instructions import add_at, divide_approximately, load_four, warp_max_u32
from gpu.device.launch import Kernel
from gpu.device.rows import LOGITS, row_start
from gpu.device.vectors import format_of, in_row
from gpu.support.bins import BINS, bins_of
from gpu.support.estimate import LOG2_E, chunk_mass_of, needs_mass, warp_mass_of
from gpu.support.gather import BOX
from gpu.support.limits import FILTER, limits_of
from gpu.support.marks import MARKS
from gpu.support.policy import ROWS
from gpu.support.whole import WHOLE

THREADS = 512
LOADS = 4
MAX_REGISTERS = 32  # four blocks a multiprocessor
_LARGEST, _SHARED = BINS, BINS + WARP  # where the warps' largest keys lie in shared memory, behind the bins; its size


@lru_cache
def scan_of(name: str, estimates: bool, threads: int) -> Any:
    """A device function for logits of this dtype, in a grid of (chunks * rows,): y ends at 65,535.

    (logits, marks, bounds, rows, whole, shared) -> the row whose chunk this block has scanned. estimates: it estimates
    as well what the chunks weigh of rows that need their mass, else the three between may be None. shared: int32
    [_SHARED].
    """
    form = format_of(name)
    lanes, key_of, minus_inf = form.lanes, form.key, form.minus_inf
    larger, key_of_word, load = form.larger, form.key_of_word, load_four(threads)
    warp_mass, chunk_mass = warp_mass_of(name), chunk_mass_of(name)
    to_stored, bin_of = np.uint32(form.bits - 16), bins_of(name).bin_of
    warps, per_thread, chunk_vectors = threads // WARP, BINS // threads, LOADS * threads
    chunk_size, granule, highest = chunk_vectors * lanes, 2 * lanes, np.uint32((1 << form.bits) - 1)

    @cuda.jit(device=True)
    def word_of(w0, w1, w2, w3):
        return larger(larger(w0, w1), larger(w2, w3))

    @cuda.jit(device=True)
    def of_pair(even, first, second):
        # A granule is a vector of an even lane and its neighbour's: the even lane gets that of `first`.
        other = np.uint32(cuda.shfl_xor_sync(FULL, np.int32(second if even else first), 1))
        return larger(first if even else second, other)

    @cuda.jit(device=True)
    def inner_keys(words, even):
        # The largest keys of this lane's two granules.
        a0, a1, a2, a3, b0, b1, b2, b3, c0, c1, c2, c3, d0, d1, d2, d3 = words
        first = of_pair(even, word_of(a0, a1, a2, a3), word_of(b0, b1, b2, b3))
        second = of_pair(even, word_of(c0, c1, c2, c3), word_of(d0, d1, d2, d3))
        return key_of_word(first), key_of_word(second)

    @cuda.jit(device=True)
    def edge_key(w0, w1, w2, w3, vector, head, vocabulary):
        # Of a vector of which some elements may belong to the neighbours; 0 beyond the row.
        largest, first = np.uint32(0), np.int32(vector * lanes - head)
        for lane in range(lanes):
            if in_row(first, lane, vocabulary):
                key = key_of(w0, w1, w2, w3, lane)
                if key < minus_inf:  # a negative NaN
                    key = highest
                largest = max(largest, key)
        return largest

    @cuda.jit(device=True)
    def edge_pair(even, first, second):
        other = np.uint32(cuda.shfl_xor_sync(FULL, np.int32(second if even else first), 1))
        return max(first if even else second, other)

    @cuda.jit(device=True)
    def edge_keys(words, even, vector, head, vocabulary):
        a0, a1, a2, a3, b0, b1, b2, b3, c0, c1, c2, c3, d0, d1, d2, d3 = words
        first = edge_pair(
            even,
            edge_key(a0, a1, a2, a3, vector, head, vocabulary),
            edge_key(b0, b1, b2, b3, np.int32(vector + threads), head, vocabulary),
        )
        second = edge_pair(
            even,
            edge_key(c0, c1, c2, c3, np.int32(vector + 2 * threads), head, vocabulary),
            edge_key(d0, d1, d2, d3, np.int32(vector + 3 * threads), head, vocabulary),
        )
        return first, second

    @cuda.jit(device=True)
    def count(key, bins):
        cuda.atomic.add(bins, np.uint32(bin_of(np.uint32(key >> to_stored))), np.int32(1))

    @cuda.jit(device=True)
    def scan(logits, marks, bounds, rows, whole, shared):
        thread, vocabulary = np.int32(cuda.threadIdx.x), logits.vocabulary
        row = np.int32(np.uint32(cuda.blockIdx.x) // np.uint32(marks.chunks))
        chunk = np.int32(cuda.blockIdx.x - row * marks.chunks)
        start = row_start(logits, row)
        head = np.int32(start & np.int64(granule - 1))
        num_granules = np.int32(np.int32(head + vocabulary + granule - 1) // granule)
        vector = np.int32(chunk * chunk_vectors + thread)
        index = np.int64(np.int64(start - head) // np.int64(lanes) + vector)
        words = load(logits.words, index, np.int32(2 * num_granules - 1 - vector))
        scale = np.float32(0.0)
        if whole is not None:  # while those are under way
            limits = limits_of(bounds, rows, row, vocabulary)
            if needs_mass(limits, bounds.joint):
                scale = np.float32(divide_approximately(LOG2_E, limits.temperature))
        for i in range(per_thread):
            shared[np.uint32(i * threads + thread)] = 0
        even = (thread & 1) == 0
        granule0 = np.int32(np.int32(vector if even else np.int32(vector + threads)) >> 1)
        cuda.syncthreads()
        begin = np.int32(chunk * chunk_size - head)
        if begin >= 0 and np.int32(begin + chunk_size) <= vocabulary:
            first, second = inner_keys(words, even)
            count(first, shared)
            count(second, shared)
        else:
            first, second = edge_keys(words, even, vector, head, vocabulary)
            if granule0 < num_granules:
                count(first, shared)
            if np.int32(granule0 + threads) < num_granules:
                count(second, shared)
        at = np.int64(np.int64(row) * marks.stride + granule0)
        marks.halves[at] = np.uint16(first >> to_stored)
        marks.halves[at + threads] = np.uint16(second >> to_stored)
        largest = warp_max_u32(max(first, second))
        if whole is not None:
            warp_masses = cuda.shared.array(WARP, float32)
            if scale > np.float32(0.0):
                interior = begin >= 0 and np.int32(begin + chunk_size) <= vocabulary
                of_thread = np.int32(vector * lanes - head)
                mass = warp_mass(words, largest, scale, interior, of_thread, np.int32(threads * lanes), vocabulary)
                if cuda.laneid == 0:
                    warp_masses[np.uint32(thread // WARP)] = mass
        if cuda.laneid == 0:
            shared[np.uint32(_LARGEST + thread // WARP)] = np.int32(largest)
        cuda.syncthreads()
        for i in range(per_thread):
            number = shared[np.uint32(i * threads + thread)]
            if number > 0:
                add_at(marks.counts, np.int64(np.int64(row) * BINS + i * threads + thread), number)
        if thread < WARP:
            own = np.uint32(0)
            if thread < warps:
                own = np.uint32(shared[np.uint32(_LARGEST + thread)])
            largest = warp_max_u32(own)
            if thread == 0:
                marks.chunk_largest[np.int64(row) * marks.chunks + chunk] = largest
            if whole is not None:
                mass = np.float32(0.0)
                if scale > np.float32(0.0) and thread < warps:
                    mass = warp_masses[np.uint32(thread)]
                mass = chunk_mass(mass, own, largest, scale)
                if scale > np.float32(0.0) and thread == 0:
                    whole.estimates[np.int64(row) * marks.chunks + chunk] = mass
        return row

    return scan


@lru_cache
def row_of(name: str, scans: bool, estimates: bool, threads: int) -> Any:
    """A device function (logits, marks, bounds, rows, whole, shared) -> the row that this block goes on with, or -1.

    scans: the grid is the scan's, and the last block of a row goes on with it; else it is (rows,), behind the scan.
    estimates: as of `scan_of`. shared: int32 [gather.SHARED].
    """
    scan = scan_of(name, estimates, threads)

    @cuda.jit(device=True)
    def last_of_row(logits, marks, bounds, rows, whole, shared):
        row = scan(logits, marks, bounds, rows, whole, shared)
        return row if last_to_come(marks.chunks, marks.scanned, np.int64(row), shared, BOX) else np.int32(-1)

    @cuda.jit(device=True)
    def own_row(logits, marks, bounds, rows, whole, shared):
        return np.int32(cuda.blockIdx.x)

    return last_of_row if scans else own_row


@lru_cache
def scan_kernel(name: str, estimates: bool = False, threads: int = THREADS) -> Kernel:
    """The kernel for logits of this dtype; its grid is (chunks * rows,). estimates: as of `scan_of`."""
    scan = scan_of(name, estimates, threads)

    def scan_rows(logits, marks):
        scan(logits, marks, None, None, None, cuda.shared.array(_SHARED, int32))

    def scan_and_estimate(logits, marks, bounds, rows, whole):
        scan(logits, marks, bounds, rows, whole, cuda.shared.array(_SHARED, int32))

    if estimates:
        return Kernel(scan_and_estimate, void(LOGITS, MARKS, FILTER, ROWS, WHOLE), threads, MAX_REGISTERS)
    return Kernel(scan_rows, void(LOGITS, MARKS), threads, MAX_REGISTERS)

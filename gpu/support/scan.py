"""The first kernel of the filter: the one read of the logits.

A block takes a chunk of a row, LOADS * THREADS vectors. It stores the key of each granule's largest element, cut to
16 bits, and counts those in BINS bins a row; the k-th largest of them bounds the k-th largest logit from below, so the
pick reads again only granules that reach it. NaN and +inf surface as the row's largest key.

gpu/support/reading.py takes the same steps, over several chunks before it adds their counts to the row's.
"""

from functools import lru_cache
from typing import Any, NamedTuple

import numpy as np
from numba import cuda, int32, void

from gpu.device.block import FULL, WARP
from gpu.device.instructions import add_at, load_four, warp_max_u32
from gpu.device.launch import Kernel
from gpu.device.rows import LOGITS, row_start
from gpu.device.vectors import BINS, format_of, in_row
from gpu.support.marks import MARKS

THREADS = 512
LOADS = 4
MAX_REGISTERS = 32  # four blocks a multiprocessor
_SHARED = BINS + WARP


class Reading(NamedTuple):
    """A row as a block reads it."""

    row: Any  # int32
    first_vector: Any  # int64: of the row, from the words
    head: Any  # int32: elements of the neighbour in front, in the first granule
    num_granules: Any  # int32


class Scan(NamedTuple):
    """The steps, for one dtype and block size. `shared`: int32, with the counts and a word a warp in it."""

    clear: Any  # (shared): no count yet
    open: Any  # (logits, row) -> its Reading
    fetch: Any  # (logits, reading, chunk) -> this thread's sixteen words of a chunk; none behind the row
    keys_of: Any  # (words, vocabulary, reading, chunk) -> the largest keys of this thread's two granules
    record: Any  # (keys, reading, chunk, marks, shared): store and count -> the larger one
    leave: Any  # (largest, shared), and a barrier behind it, before add_up
    add_up: Any  # (row, first, end, marks, shared): at most WARP chunks' counts, then zero, and largest key


@lru_cache
def scan_of(name: str, threads: int, bins_at: int, scratch_at: int) -> Scan:
    """The steps for logits of this dtype; bins_at, scratch_at: of the counts and the warps' words."""
    form = format_of(name)
    lanes, key_of, minus_inf = form.lanes, form.key, form.minus_inf
    larger, key_of_word, load = form.larger, form.key_of_word, load_four(threads)
    to_stored, to_bin = np.uint32(form.bits - 16), np.uint32(form.bits - 11)
    warps, per_thread, chunk_vectors = threads // WARP, BINS // threads, LOADS * threads
    chunk_size, granule, highest = chunk_vectors * lanes, 2 * lanes, np.uint32((1 << form.bits) - 1)
    lanes_log2, granule_log2 = np.int64(lanes.bit_length() - 1), np.int32(granule.bit_length() - 1)

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
    def bin_of(i):
        # In `shared`, the i-th that this thread looks after.
        return np.uint32(np.uint32(bins_at + i * threads) + np.uint32(cuda.threadIdx.x))

    @cuda.jit(device=True)
    def clear(shared):
        for i in range(per_thread):
            shared[bin_of(i)] = 0

    @cuda.jit(device=True)
    def count(key, shared):
        cuda.atomic.add(shared, np.uint32(np.uint32(bins_at) + np.uint32(key >> to_bin)), np.int32(1))

    @cuda.jit(device=True)
    def open_reading(logits, row):
        start = row_start(logits, row)
        head = np.int32(start & np.int64(granule - 1))
        num_granules = np.int32(np.int32(head + logits.vocabulary + np.int32(granule - 1)) >> granule_log2)
        return Reading(row, np.int64((start - head) >> lanes_log2), head, num_granules)

    @cuda.jit(device=True)
    def fetch(logits, reading, chunk):
        vector = np.int32(chunk * chunk_vectors + cuda.threadIdx.x)
        index = np.int64(reading.first_vector + vector)
        return load(logits.words, index, np.int32(2 * reading.num_granules - 1 - vector))

    @cuda.jit(device=True)
    def keys_of(words, vocabulary, reading, chunk):
        vector, even = np.int32(chunk * chunk_vectors + cuda.threadIdx.x), (cuda.threadIdx.x & 1) == 0
        begin = np.int32(chunk * chunk_size - reading.head)
        if begin >= 0 and np.int32(begin + chunk_size) <= vocabulary:
            return inner_keys(words, even)
        return edge_keys(words, even, vector, reading.head, vocabulary)

    @cuda.jit(device=True)
    def record(keys, reading, chunk, marks, shared):
        first, second = keys
        vector = np.int32(chunk * chunk_vectors + cuda.threadIdx.x)
        granule0 = np.int32(np.int32(vector if (vector & 1) == 0 else np.int32(vector + threads)) >> 1)
        if granule0 < reading.num_granules:
            count(first, shared)
        if np.int32(granule0 + threads) < reading.num_granules:
            count(second, shared)
        at = np.int64(np.int64(reading.row) * marks.stride + granule0)
        marks.halves[at] = np.uint16(first >> to_stored)
        marks.halves[at + threads] = np.uint16(second >> to_stored)
        return max(first, second)

    @cuda.jit(device=True)
    def leave(largest, shared):
        largest = warp_max_u32(largest)
        if cuda.laneid == 0:
            warp = np.uint32(np.uint32(cuda.threadIdx.x) // np.uint32(WARP))
            shared[np.uint32(np.uint32(scratch_at) + warp)] = np.int32(largest)

    @cuda.jit(device=True)
    def add_up(row, first, end, marks, shared):
        thread = np.int32(cuda.threadIdx.x)
        for i in range(per_thread):
            number = np.int32(shared[bin_of(i)])
            if number > 0:
                shared[bin_of(i)] = 0
                add_at(marks.counts, np.int64(np.int64(row) * BINS + i * threads + thread), number)
        if thread < WARP:
            own = np.uint32(0)
            if thread < warps:
                own = np.uint32(shared[np.uint32(np.uint32(scratch_at) + np.uint32(thread))])
            own = warp_max_u32(own)
            chunk = np.int32(first + thread)
            if chunk < end:
                marks.chunk_largest[np.int64(row) * marks.chunks + chunk] = own

    return Scan(clear, open_reading, fetch, keys_of, record, leave, add_up)


@lru_cache
def scan_kernel(name: str, threads: int = THREADS) -> Kernel:
    """The kernel for logits of this dtype; its grid is (chunks * rows,): y ends at 65,535."""
    clear, open_reading, fetch, keys_of, record, leave, add_up = scan_of(name, threads, 0, BINS)

    def scan(logits, marks):
        shared = cuda.shared.array(_SHARED, int32)
        row = np.int32(np.uint32(cuda.blockIdx.x) // np.uint32(marks.chunks))
        chunk = np.int32(cuda.blockIdx.x - row * marks.chunks)
        reading = open_reading(logits, row)
        words = fetch(logits, reading, chunk)
        clear(shared)
        cuda.syncthreads()
        keys = keys_of(words, logits.vocabulary, reading, chunk)
        leave(record(keys, reading, chunk, marks, shared), shared)
        cuda.syncthreads()
        add_up(row, chunk, np.int32(chunk + 1), marks, shared)

    return Kernel(scan, void(LOGITS, MARKS), threads, MAX_REGISTERS)

"""The one read of the logits: a block reads a run of chunks of a row.

A chunk is LOADS * THREADS vectors. The block stores the key of each granule's largest element, cut to 16 bits, and
counts those in BINS bins a row; the k-th largest of them bounds the k-th largest logit from below, so only granules
that reach it are read again. NaN and +inf surface as the row's largest key.
"""

from functools import lru_cache
from typing import Any

import numpy as np
from numba import cuda

from gpu.device.block import FULL, WARP
from gpu.device.instructions import add_at, load_streamed, take_ticket, warp_max_u32
from gpu.device.rows import row_start
from gpu.device.vectors import BINS, format_of, in_row
from gpu.support.gather import BOX, SCRATCHES, WORK

LOADS = 4


@lru_cache
def scan_of(name: str, threads: int) -> Any:
    """A device function for logits of this dtype: (logits, marks, row, part, parts, shared) -> bool.

    Reads part `part` of the row, of `parts`. True in the block that finished the row: it may look at all of it.
    """
    form = format_of(name)
    lanes, key_of, largest_of, minus_inf = form.lanes, form.key, form.largest, form.minus_inf
    to_stored, to_bin = np.uint32(form.bits - 16), np.uint32(form.bits - 11)
    warps, per_thread, chunk_vectors = threads // WARP, BINS // threads, LOADS * threads
    granule, highest = 2 * lanes, np.uint32((1 << form.bits) - 1)

    @cuda.jit(device=True)
    def edge_largest(w0, w1, w2, w3, first, vocabulary):
        # Of a vector whose other elements belong to the neighbours.
        largest = np.uint32(0)
        for lane in range(lanes):
            if in_row(first, lane, vocabulary):
                key = key_of(w0, w1, w2, w3, lane)
                if key < minus_inf:  # a negative NaN
                    key = highest
                largest = max(largest, key)
        return largest

    @cuda.jit(device=True)
    def largest_in(words, vector, head, vocabulary):
        # The vector's largest key, 0 beyond the row.
        w0, w1, w2, w3 = words
        first = np.int32(vector * lanes - head)
        if first >= 0 and first + lanes <= vocabulary:
            return largest_of(w0, w1, w2, w3)
        return edge_largest(w0, w1, w2, w3, first, vocabulary)

    @cuda.jit(device=True)
    def of_pair(even, first, second):
        # A granule is a vector of an even lane and its neighbour's: the even lane gets that of `first`.
        other = np.uint32(cuda.shfl_xor_sync(FULL, np.int32(second if even else first), 1))
        return max(first if even else second, other)

    @cuda.jit(device=True)
    def load(words, first_vector, vector, last):
        return (
            load_streamed(words, np.int64(first_vector + min(vector, last))),
            load_streamed(words, np.int64(first_vector + min(np.int32(vector + threads), last))),
            load_streamed(words, np.int64(first_vector + min(np.int32(vector + 2 * threads), last))),
            load_streamed(words, np.int64(first_vector + min(np.int32(vector + 3 * threads), last))),
        )

    @cuda.jit(device=True)
    def scan(logits, marks, row, part, parts, shared):
        thread = cuda.threadIdx.x
        for i in range(per_thread):
            shared[np.uint32(WORK + i * threads + thread)] = 0
        start = row_start(logits, row)
        head = np.int32(start % granule)
        first_vector = np.int64(start // granule) * 2
        num_granules = np.int32((head + logits.vocabulary + granule - 1) // granule)
        last = np.int32(2 * num_granules - 1)
        chunk = np.int32(part * marks.run)
        end = min(np.int32(chunk + marks.run), marks.chunks)
        vector = np.int32(chunk * chunk_vectors + thread)
        out = np.int64(row) * marks.stride
        even = (thread & 1) == 0
        largest = np.uint32(0)
        ahead = load(logits.words, first_vector, vector, last)
        cuda.syncthreads()
        for _ in range(chunk, end):
            a, b, c, d = ahead
            following = np.int32(vector + chunk_vectors)
            if following < end * chunk_vectors:  # in flight while this chunk is looked at
                ahead = load(logits.words, first_vector, following, last)
            v1, v2, v3 = np.int32(vector + threads), np.int32(vector + 2 * threads), np.int32(vector + 3 * threads)
            largest0 = of_pair(
                even,
                largest_in(a, vector, head, logits.vocabulary),
                largest_in(b, v1, head, logits.vocabulary),
            )
            largest1 = of_pair(
                even, largest_in(c, v2, head, logits.vocabulary), largest_in(d, v3, head, logits.vocabulary)
            )
            granule0 = np.int32((vector if even else v1) >> 1)
            granule1 = np.int32((v2 if even else v3) >> 1)
            if granule0 < num_granules:
                cuda.atomic.add(shared, np.uint32(WORK + np.uint32(largest0 >> to_bin)), np.int32(1))
            if granule1 < num_granules:
                cuda.atomic.add(shared, np.uint32(WORK + np.uint32(largest1 >> to_bin)), np.int32(1))
            marks.halves[out + granule0] = np.uint16(largest0 >> to_stored)
            marks.halves[out + granule1] = np.uint16(largest1 >> to_stored)
            largest = max(largest, max(largest0, largest1))
            vector = following
        largest = warp_max_u32(largest)
        if cuda.laneid == 0:
            shared[np.uint32(SCRATCHES + thread // WARP)] = np.int32(largest)
        cuda.syncthreads()
        for i in range(per_thread):
            count = shared[np.uint32(WORK + i * threads + thread)]
            if count > 0:
                add_at(marks.counts, np.int64(row) * BINS + i * threads + thread, count)
        if thread < WARP:
            own = np.uint32(0)
            if thread < warps:
                own = np.uint32(shared[np.uint32(SCRATCHES + thread)])
            largest = warp_max_u32(own)
            for i in range(chunk + thread, end, WARP):
                marks.chunk_largest[np.int64(row) * marks.chunks + i] = largest if i == chunk else np.uint32(0)
        cuda.syncthreads()
        if parts == 1:
            return True
        if thread == 0:
            shared[BOX] = take_ticket(marks.tickets, np.int64(row))
        cuda.syncthreads()
        if shared[BOX] != parts - 1:
            return False
        if thread == 0:
            marks.tickets[row] = 0
        return True

    return scan

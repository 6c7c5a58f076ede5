"""The first kernel of the filter: the one read of the logits.

A block takes LOADS * THREADS vectors of one row. It stores the key of each granule's largest element, cut to 16
bits, and counts those in BINS bins a row; the k-th largest of them bounds the k-th largest logit from below, so the
second kernel reads again only granules that reach it. NaN and +inf surface as the row's largest key.
"""

from functools import lru_cache

import numpy as np
from numba import cuda, int32, types, void

from gpu.device.block import FULL, WARP
from gpu.device.instructions import add_at, load_streamed, warp_max_u32
from gpu.device.launch import LOGIT_TYPES, Kernel, pointer_to
from gpu.device.vectors import BINS, format_of, in_row, row_start

THREADS = 512
LOADS = 4


@lru_cache
def scan_kernel(name: str, threads: int = THREADS) -> Kernel:
    """The kernel for logits of this dtype; its grid is (chunks * rows,): y ends at 65,535."""
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
    def largest_in(w0, w1, w2, w3, vector, head, vocabulary):
        # The vector's largest key, 0 beyond the row.
        first = np.int32(vector * lanes - head)
        if first >= 0 and first + lanes <= vocabulary:
            return largest_of(w0, w1, w2, w3)
        return edge_largest(w0, w1, w2, w3, first, vocabulary)

    @cuda.jit(device=True)
    def of_pair(even, first, second):
        # A granule is a vector of an even lane and its neighbour's: the even lane gets that of `first`.
        other = np.uint32(cuda.shfl_xor_sync(FULL, np.int32(second if even else first), 1))
        return max(first if even else second, other)

    def scan(words, skew, width, request_step, row_step, vocabulary, chunks, maxima, chunk_largest, counts):
        bins = cuda.shared.array(BINS, int32)
        warp_largest = cuda.shared.array(WARP, types.uint32)
        thread = cuda.threadIdx.x
        row = np.int32(np.uint32(cuda.blockIdx.x) // np.uint32(chunks))
        chunk = np.int32(cuda.blockIdx.x - row * chunks)
        for i in range(per_thread):
            bins[np.uint32(i * threads + thread)] = 0
        start = row_start(row, width, request_step, row_step, skew)
        head = np.int32(start % granule)
        first_vector = np.int64(start // granule) * 2
        num_granules = np.int32((head + vocabulary + granule - 1) // granule)
        last = np.int32(2 * num_granules - 1)
        v0 = np.int32(chunk * chunk_vectors + thread)
        v1, v2, v3 = np.int32(v0 + threads), np.int32(v0 + 2 * threads), np.int32(v0 + 3 * threads)
        a0, a1, a2, a3 = load_streamed(words, np.int64(first_vector + min(v0, last)))
        b0, b1, b2, b3 = load_streamed(words, np.int64(first_vector + min(v1, last)))
        c0, c1, c2, c3 = load_streamed(words, np.int64(first_vector + min(v2, last)))
        d0, d1, d2, d3 = load_streamed(words, np.int64(first_vector + min(v3, last)))
        cuda.syncthreads()
        even = (thread & 1) == 0
        largest0 = of_pair(
            even, largest_in(a0, a1, a2, a3, v0, head, vocabulary), largest_in(b0, b1, b2, b3, v1, head, vocabulary)
        )
        largest1 = of_pair(
            even, largest_in(c0, c1, c2, c3, v2, head, vocabulary), largest_in(d0, d1, d2, d3, v3, head, vocabulary)
        )
        granule0 = np.int32((v0 if even else v1) >> 1)
        granule1 = np.int32((v2 if even else v3) >> 1)
        if granule0 < num_granules:
            cuda.atomic.add(bins, np.uint32(largest0 >> to_bin), np.int32(1))
        if granule1 < num_granules:
            cuda.atomic.add(bins, np.uint32(largest1 >> to_bin), np.int32(1))
        out = np.int64(row) * np.int64(chunks * (chunk_vectors // 2))
        maxima[out + granule0] = np.uint16(largest0 >> to_stored)
        maxima[out + granule1] = np.uint16(largest1 >> to_stored)
        largest = warp_max_u32(max(largest0, largest1))
        if cuda.laneid == 0:
            warp_largest[thread // WARP] = largest
        cuda.syncthreads()
        for i in range(per_thread):
            count = bins[np.uint32(i * threads + thread)]
            if count > 0:
                add_at(counts, np.int64(row) * BINS + i * threads + thread, count)
        if thread < WARP:
            part = np.uint32(0)
            if thread < warps:
                part = np.uint32(warp_largest[thread])
            largest = warp_max_u32(part)
            if thread == 0:
                chunk_largest[np.int64(row) * chunks + chunk] = largest

    signature = void(
        *LOGIT_TYPES, int32,
        pointer_to(types.uint16), pointer_to(types.uint32), pointer_to(int32),
    )  # fmt: skip
    return Kernel(scan, signature, threads)

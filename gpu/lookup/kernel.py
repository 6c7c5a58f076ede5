"""The kernel of prompt lookup: a block a request.

A match is one number, its length above its place, so that the largest is the longest, and the latest of several.
"""

from functools import lru_cache

import numpy as np
from numba import cuda, int32, int64, void

from gpu.device.launch import Kernel, pointer_to

THREADS = 256


@lru_cache
def lookup_kernel(threads: int = THREADS) -> Kernel:
    """The kernel; its grid is (requests,)."""

    @cuda.jit(device=True)
    def match_at(tokens, row, last, j, max_ngram):
        size = np.int32(0)
        while size < max_ngram and size <= j and tokens[row + j - size] == tokens[row + last - size]:
            size = np.int32(size + 1)
        return size

    def lookup(tokens, longest, lengths, num_drafts, max_ngram, min_ngram, drafts, counts):
        best = cuda.shared.array(1, int64)
        request = np.int32(cuda.blockIdx.x)
        row = np.int64(np.int64(request) * longest)
        last = np.int32(min(max(lengths[request], np.int32(0)), longest) - 1)
        if cuda.threadIdx.x == 0:
            best[0] = 0
        cuda.syncthreads()
        own = np.int64(0)
        for j in range(cuda.threadIdx.x, last, threads):
            size = match_at(tokens, row, last, np.int32(j), max_ngram)
            own = max(own, np.int64((np.int64(size) << np.int64(32)) | np.int64(j)))
        if own > 0:
            cuda.atomic.max(best, 0, own)
        cuda.syncthreads()
        found = np.int64(best[0])
        size, where = np.int32(found >> np.int64(32)), np.int32(found & np.int64(0x7FFFFFFF))
        matched = size >= min_ngram
        if cuda.threadIdx.x == 0:
            counts[request] = num_drafts if matched else np.int32(0)
        for k in range(cuda.threadIdx.x, num_drafts, threads):
            draft = np.int32(0)
            if matched:
                draft = np.int32(tokens[row + where + 1 + k % np.int32(last - where)])
            drafts[np.int64(request) * num_drafts + k] = draft

    signature = void(
        pointer_to(int32), int32, pointer_to(int32), int32, int32, int32, pointer_to(int32), pointer_to(int32)
    )
    return Kernel(lookup, signature, threads)

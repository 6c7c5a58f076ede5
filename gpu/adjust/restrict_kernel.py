"""The kernel of the restriction to allowed tokens: a warp reads one word of the mask and writes its 32 logits."""

from functools import lru_cache

import numpy as np
from numba import cuda, int32, int64, uint16, uint32, void

from gpu.adjust.bits import BITS
from gpu.device.block import WARP
from gpu.device.launch import Kernel, pointer_to

THREADS = 256
WORDS = 256  # of a mask a block


@lru_cache
def restrict_kernel(name: str, threads: int = THREADS) -> Kernel:
    """The kernel for logits of this format; its grid is (rows, ceil(words / WORDS))."""
    form = BITS[name]
    magnitude, infinity = np.uint32(form.magnitude), np.uint32(form.infinity)
    minus_infinity = form.kind(form.minus_infinity)
    warps = threads // WARP

    def restrict(logits, request_step, row_step, width, vocabulary, allowed, num_words, num_masks, rows):
        row = np.int32(cuda.blockIdx.x)
        mask = np.int32(rows[row])
        if mask < 0 or mask >= num_masks:
            return
        start = np.int64(np.int64(row // width) * request_step + np.int64(row % width) * row_step)
        lane, warp = cuda.threadIdx.x % WARP, cuda.threadIdx.x // WARP
        first = np.int32(cuda.blockIdx.y * WORDS)
        for word in range(first + warp, min(np.int32(first + WORDS), num_words), warps):
            held = np.int32(allowed[np.int64(mask) * num_words + word])
            token = np.int32(word * WARP + lane)
            forbidden = token < vocabulary and (held >> np.int32(lane)) & 1 == 0
            if forbidden and np.uint32(logits[start + token]) & magnitude < infinity:
                logits[start + token] = minus_infinity

    signature = void(
        pointer_to(uint32 if form.kind is np.uint32 else uint16), int64, int64, int32, int32,
        pointer_to(int32), int32, int32, pointer_to(int32),
    )  # fmt: skip
    return Kernel(restrict, signature, threads)

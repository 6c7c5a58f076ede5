"""advance on a device: one launch, a thread a slot, no synchronisation."""

from functools import lru_cache
from typing import Any

import numpy as np
from numba import cuda, int32, int64, types, void

from gpu.device.launch import Kernel, pointer, pointer_to
from gpu.progress.step import step

THREADS = 64


@lru_cache
def advance_kernel(threads: int = THREADS) -> Kernel:
    """The kernel; its grid is (ceil(slots / threads),)."""

    def advance(
        phase_of, anchor, start, generated, remaining, num_drafts, num_committed, status, tokens, num_slots, width,
        phase, max_drafts,
    ):  # fmt: skip
        b = np.int64(np.int64(cuda.blockIdx.x) * threads + cuda.threadIdx.x)
        if b < num_slots and phase_of[b] == phase:
            committed, left, next_phase, drafts = step(num_committed[b], width, status[b], remaining[b], max_drafts)
            if committed > 0:
                anchor[b] = np.int64(tokens[np.int64(b * width + committed - 1)])
            start[b] = np.int64(start[b] + committed)
            generated[b] = np.int64(generated[b] + committed)
            remaining[b], phase_of[b], num_drafts[b] = left, next_phase, drafts

    longs = pointer_to(int64)
    signature = void(
        pointer_to(int32), longs, longs, longs, longs, pointer_to(int32), pointer_to(int32), pointer_to(types.uint8),
        pointer_to(int32), int32, int32, int32, int32,
    )  # fmt: skip
    return Kernel(advance, signature, threads)


def advance(arguments: tuple[Any, ...], batch: int, width: int, phase: int, max_drafts: int) -> None:
    """advance of CuPy arrays, in the kernel's order."""
    kernel = advance_kernel()
    kernel.launch((-(-batch // kernel.threads),), *map(pointer, arguments), batch, width, phase, max_drafts)

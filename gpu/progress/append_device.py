"""append_tokens on a device: one launch, a thread a token, no synchronisation."""

from functools import lru_cache
from typing import Any

import numpy as np
from numba import cuda, int32, int64, void

from gpu.device.launch import Kernel, pointer, pointer_to

THREADS = 128


@lru_cache
def append_kernel(threads: int = THREADS) -> Kernel:
    """The kernel; its grid is (ceil(slots * width / threads),)."""

    def append(token_ids, phase_of, start, num_committed, tokens, num_slots, width, longest, phase):
        index = np.int64(np.int64(cuda.blockIdx.x) * threads + cuda.threadIdx.x)
        if index < np.int64(num_slots) * width:
            b, i = np.int64(index // width), np.int64(index % width)
            at = np.int64(start[b] + 1 + i)
            if phase_of[b] == phase and i < num_committed[b] and 0 <= at < longest:
                token_ids[np.int64(b * longest + at)] = tokens[index]

    ints = pointer_to(int32)
    return Kernel(append, void(ints, ints, pointer_to(int64), ints, ints, int32, int32, int32, int32), threads)


def append(arguments: tuple[Any, ...], batch: int, width: int, longest: int, phase: int) -> None:
    """append_tokens of CuPy arrays, in the kernel's order."""
    kernel = append_kernel()
    grid = (-(-batch * width // kernel.threads),)
    kernel.launch(grid, *map(pointer, arguments), batch, width, longest, phase)

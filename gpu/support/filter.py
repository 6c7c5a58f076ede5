"""The filter kernel: blocks read parts of rows; whichever finishes a row picks its kept set, while others still read."""

from functools import lru_cache
from typing import Any

import numpy as np
from numba import cuda, int32, int64, void

from gpu.device.launch import Kernel
from gpu.device.rows import LOGITS
from gpu.support.gather import SHARED
from gpu.support.marks import MARKS
from gpu.support.pick import FILTER, SCRATCH64, pick_of
from gpu.support.policy import ROWS
from gpu.support.scan import scan_of

THREADS = 512
MAX_REGISTERS = 64  # two blocks a multiprocessor
BLOCKS = 1024  # enough to keep a large device busy: beyond them a block reads more


@lru_cache
def filter_of(name: str, threads: int) -> Any:
    """A device function for logits of this dtype: (logits, marks, bounds, rows, shared, scratch64) -> row.

    The block's part of a row is read; in the block that finished one, its kept set is known then; elsewhere -1.
    """
    scan, pick = scan_of(name, threads), pick_of(name, threads)

    @cuda.jit(device=True)
    def filter_rows(logits, marks, bounds, rows, shared, scratch64):
        parts = np.int32((marks.chunks + marks.run - 1) // marks.run)
        row = np.int32(np.uint32(cuda.blockIdx.x) // np.uint32(parts))
        part = np.int32(cuda.blockIdx.x - row * parts)
        if not scan(logits, marks, row, part, parts, shared):
            return np.int32(-1)
        pick(row, logits, marks, bounds, rows, shared, scratch64)
        return row

    return filter_rows


@lru_cache
def filter_kernel(name: str, threads: int = THREADS) -> Kernel:
    """The kernel for logits of this dtype; its grid is (parts * rows,): y ends at 65,535."""
    filter_rows = filter_of(name, threads)

    def select(logits, marks, bounds, rows):
        shared = cuda.shared.array(SHARED, int32)
        scratch64 = cuda.shared.array(SCRATCH64, int64)
        filter_rows(logits, marks, bounds, rows, shared, scratch64)

    return Kernel(select, void(LOGITS, MARKS, FILTER, ROWS), threads, MAX_REGISTERS)

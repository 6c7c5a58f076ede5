"""A round in one kernel: reading, filter, verification and capture, see gpu/support/reading.py."""

from functools import lru_cache

import numpy as np
from numba import cuda, int32, int64, void

from gpu.capture.pack import CAPTURES
from gpu.device.launch import Kernel
from gpu.device.rows import LOGITS
from gpu.rounds.kernel import steps_of
from gpu.support.gather import SHARED
from gpu.support.limits import FILTER
from gpu.support.marks import MARKS
from gpu.support.pick import SCRATCH64, pick_of
from gpu.support.policy import ROWS
from gpu.support.reading import BLOCKS, BOX, SPANS, THREADS, read_of, registers_for
from gpu.verification.chain import REQUESTS, VERDICTS


@lru_cache
def fused_kernel(name: str, proposal_name: str | None, threads: int = THREADS, blocks: int = BLOCKS) -> Kernel:
    """The kernel for logits and draft probabilities of these dtypes; its grid is that of `spans_of`."""
    read, pick = read_of(name, threads), pick_of(name, threads)
    prepare, settle = steps_of(name, proposal_name, threads, True)

    def fused(logits, marks, bounds, rows, spans, num_requests, requests, verdicts, captures):
        shared = cuda.shared.array(SHARED, int32)
        scratch64 = cuda.shared.array(SCRATCH64, int64)
        box = cuda.shared.array(BOX, int32)
        row = read(logits, marks, spans, np.int32(num_requests * logits.width), shared, box)
        if row >= 0:
            prepare(row, logits, requests, captures)
            base, cutoff = np.uint32(0), np.float32(0.0)
            policy = pick(row, np.int64(0), base, cutoff, logits, marks, bounds, rows, shared, scratch64)
            settle(row, policy, num_requests, logits, rows, requests, verdicts, captures, shared, scratch64)

    signature = void(LOGITS, MARKS, FILTER, ROWS, SPANS, int32, REQUESTS, VERDICTS, CAPTURES)
    return Kernel(fused, signature, threads, registers_for(threads, blocks))

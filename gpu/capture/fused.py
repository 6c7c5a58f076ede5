"""Verification and capture in one launch: a block a request."""

from functools import lru_cache

import numpy as np
from numba import cuda, int32, int64, void

from gpu.capture.pack import CAPTURES
from gpu.capture.request import request_of
from gpu.device.instructions import add_at
from gpu.device.launch import Kernel
from gpu.device.rows import LOGITS
from gpu.support.policy import ROWS
from gpu.verification.chain import MAX_REGISTERS, REQUESTS, SCRATCH64, THREADS, VERDICTS


@lru_cache
def fused_kernel(name: str, proposal_name: str | None, threads: int = THREADS) -> Kernel:
    """The kernel for logits and draft probabilities of these dtypes; its grid is (requests,)."""
    decide = request_of(name, proposal_name, threads)

    def verify_and_capture(logits, rows, num_requests, requests, verdicts, captures):
        shared = cuda.shared.array(8, int32)
        scratch64 = cuda.shared.array(SCRATCH64, int64)
        if cuda.threadIdx.x == 0:  # requests in the order in which blocks start
            shared[7] = np.int32(add_at(captures.progress, np.int64(num_requests), np.int64(1)))
        cuda.syncthreads()
        decide(shared[7], num_requests, logits, rows, requests, verdicts, captures, shared, scratch64)

    signature = void(LOGITS, ROWS, int32, REQUESTS, VERDICTS, CAPTURES)
    return Kernel(verify_and_capture, signature, threads, MAX_REGISTERS)

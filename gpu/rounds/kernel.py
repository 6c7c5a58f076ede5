"""The kernel of a round, behind the scan: filter, verification and capture.

A block filters a row, tests its draft and draws what may take its place; whichever is the last of a request settles
and captures it, while others still filter.

A block waits for what earlier requests pack, and where drafts are verified as a block for earlier rows of its own.
Their blocks have lower numbers, so they run or have run: devices start blocks in the order of their numbers, on which
the scans of CUB rely as well.
"""

from functools import lru_cache

import numpy as np
from numba import cuda, int32, int64, void

from gpu.capture.pack import CAPTURES
from gpu.capture.request import request_of
from gpu.device.block import last_to_come
from gpu.device.instructions import fetch_early
from gpu.device.launch import Kernel
from gpu.device.rows import LOGITS
from gpu.support.gather import BOX, SHARED
from gpu.support.limits import FILTER
from gpu.support.marks import MARKS
from gpu.support.pick import MAX_REGISTERS, SCRATCH64, THREADS, pick_of
from gpu.support.pick_whole import pick_whole_of
from gpu.support.policy import ROWS
from gpu.support.scan import row_of
from gpu.support.whole import WHOLE
from gpu.verification.chain import REQUESTS, VERDICTS, rule_of
from gpu.verification.row import fetch_request


@lru_cache
def round_kernel(
    name: str,
    proposal_name: str | None,
    as_block: bool,
    whole_rows: bool = False,
    scans: bool = False,
    threads: int = THREADS,
) -> Kernel:
    """The kernel for logits and draft probabilities of these dtypes and this rule; scans, and its grid: as of `row_of`.

    whole_rows: behind the kernels of gpu/support/whole.py, whose argument it takes too; its grid is (rows,).
    """
    row_of_block = row_of(name, scans, False, threads)
    pick, pick_whole = pick_of(name, threads), pick_whole_of(name, threads)
    answer = rule_of(name, proposal_name, as_block, threads).answer
    decide = request_of(name, proposal_name, as_block, threads, not whole_rows)

    @cuda.jit(device=True)
    def fetch_inputs(row, logits, requests, captures):
        if cuda.threadIdx.x == 0:
            fetch_request(row, logits.width, requests)
            fetch_early(captures.wanted, np.int64(np.uint32(row) // np.uint32(logits.width)))

    @cuda.jit(device=True)
    def decide_if_last(row, num_requests, logits, rows, requests, verdicts, captures, shared, scratch64):
        request = np.int32(np.uint32(row) // np.uint32(logits.width))
        if last_to_come(logits.width, captures.progress, np.int64(num_requests + 1 + request), shared, BOX):
            decide(request, num_requests, logits, rows, requests, verdicts, captures, shared, scratch64)

    def finish(logits, marks, bounds, rows, num_requests, requests, verdicts, captures):
        shared = cuda.shared.array(SHARED, int32)
        scratch64 = cuda.shared.array(SCRATCH64, int64)
        row = row_of_block(logits, marks, None, None, None, shared)
        if row < 0:
            return
        fetch_inputs(row, logits, requests, captures)
        policy = pick(row, np.int64(0), np.uint32(0), np.float32(0.0), logits, marks, bounds, rows, shared, scratch64)
        answer(row, policy, logits, rows, requests, verdicts, shared, scratch64)
        decide_if_last(row, num_requests, logits, rows, requests, verdicts, captures, shared, scratch64)

    def finish_whole(logits, marks, bounds, rows, whole, num_requests, requests, verdicts, captures):
        shared = cuda.shared.array(SHARED, int32)
        scratch64 = cuda.shared.array(SCRATCH64, int64)
        row = np.int32(cuda.blockIdx.x)
        fetch_inputs(row, logits, requests, captures)
        policy = pick_whole(row, logits, marks, bounds, rows, whole, shared, scratch64)
        answer(row, policy, logits, rows, requests, verdicts, shared, scratch64)
        decide_if_last(row, num_requests, logits, rows, requests, verdicts, captures, shared, scratch64)

    behind = int32, REQUESTS, VERDICTS, CAPTURES
    if whole_rows:
        return Kernel(finish_whole, void(LOGITS, MARKS, FILTER, ROWS, WHOLE, *behind), threads, MAX_REGISTERS)
    return Kernel(finish, void(LOGITS, MARKS, FILTER, ROWS, *behind), threads, MAX_REGISTERS)

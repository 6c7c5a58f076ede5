"""The capture kernel: a block a row, which first adds up what the rows before it pack."""

from functools import lru_cache

import numpy as np
from numba import cuda, int32, int64, void

from gpu import status as statuses
from gpu.capture.pack import CAPTURES, pack_of
from gpu.device.block import WARP, block_of
from gpu.device.launch import Kernel
from gpu.device.rows import LOGITS
from gpu.support.policy import ROWS, log_scale, open_policy
from gpu.verification.chain import VERDICTS

THREADS = 512
_ROW = 1 << 40  # one row, in a sum of rows and entries
_OK, _OVERFLOW, _INVALID = np.uint8(statuses.OK), np.uint8(statuses.OVERFLOW), np.uint8(statuses.INVALID)


@cuda.jit(device=True)
def _packed(row, width, wanted, num_committed, count, max_support):
    # Whether a row has a mask: committed, wanted, and neither it nor one before it in the request too large.
    request = row // width
    first, i = np.int64(request) * width, np.int32(row % width)
    packed = wanted[request] != 0 and i < num_committed[request]
    if packed:
        for j in range(i + 1):
            if count[first + j] > max_support:
                packed = False
    return packed


@lru_cache
def capture_kernel(name: str, threads: int = THREADS) -> Kernel:
    """The kernel for logits of this dtype; its grid is (rows,)."""
    first_entry, pack_row = pack_of(name, threads)
    sum64 = block_of(threads).sum64

    @cuda.jit(device=True)
    def close_request(request, width, num_packed, count, verdicts, captures):
        # By one thread, in the block of the request's first row.
        failed, status = np.int32(-1), _OK
        if captures.wanted[request] != 0:
            if verdicts.status[request] != _OK:
                failed, status = np.int32(verdicts.error_row[request]), _INVALID
            for j in range(verdicts.num_committed[request]):
                if count[np.int64(request) * width + j] > captures.max_support and status != _OVERFLOW:
                    failed, status = np.int32(j), _OVERFLOW
        captures.status[request], captures.failed_row[request] = status, failed
        captures.row_start[request] = num_packed

    def capture(logits, rows, num_requests, verdicts, captures):
        shared = cuda.shared.array(WARP, int32)
        scratch64 = cuda.shared.array(WARP, int64)
        index, thread, width = cuda.blockIdx.x, cuda.threadIdx.x, logits.width
        wanted, num_committed, count = captures.wanted, verdicts.num_committed, rows.count
        max_support = captures.max_support
        sums, too_large = np.int64(0), np.int32(0)
        for other in range(thread, index + 1, threads):
            if wanted[other // width] != 0 and other % width < num_committed[other // width]:
                size = np.int32(count[other])
                if size > max_support:
                    too_large = np.int32(1)
                if other < index:
                    sums = np.int64(sums + _ROW + size)
        policy = open_policy(rows, index)
        packed = wanted[index // width] != 0 and index % width < num_committed[index // width]
        scale = log_scale(policy)
        first = first_entry(policy, scale, index, rows, packed)
        if cuda.syncthreads_or(too_large) != 0:  # rare: look at what lies before each row in its request
            sums = np.int64(0)
            for other in range(thread, index, threads):
                if _packed(other, width, wanted, num_committed, count, max_support):
                    sums = np.int64(sums + _ROW + count[other])
            packed = _packed(index, width, wanted, num_committed, count, max_support)
        sums = sum64(sums, scratch64)
        num_packed, entries = np.int64(sums // _ROW), np.int64(sums % _ROW)
        request = np.int32(index // width)
        if thread == 0:
            reached = wanted[request] != 0 and index % width < num_committed[request]
            captures.counts[index] = policy.count if reached else 0
            if index % width == 0:
                close_request(request, width, num_packed, count, verdicts, captures)
            if packed:
                captures.offsets[num_packed] = entries
        if index == num_requests * width - 1:
            through = np.int64(entries + (policy.count if packed else 0))
            in_all = np.int64(num_packed + (1 if packed else 0))
            for i in range(in_all + thread, num_requests * width + 1, threads):
                captures.offsets[i] = through
            if thread == 0:
                captures.row_start[num_requests] = in_all
        if packed and entries + policy.count <= captures.room:
            pack_row(first, policy, scale, index, logits, rows, captures, entries, shared)

    return Kernel(capture, void(LOGITS, ROWS, int32, VERDICTS, CAPTURES), threads)

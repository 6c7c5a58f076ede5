"""The capture kernel: a block a row, which first adds up what the rows before it pack."""

from functools import lru_cache

import numpy as np
from numba import cuda, float32, int32, int64, types, void

from gpu import status as statuses
from gpu.capture.pack import pack_of
from gpu.device.block import WARP, block_of
from gpu.device.launch import LOGIT_TYPES, Kernel, pointer_to
from gpu.support.policy import SUPPORT_TYPES, log_scale, open_policy

THREADS = 512
_ROW = 1 << 40  # one row, in a sum of rows and entries
_OK, _OVERFLOW, _INVALID = np.uint8(statuses.OK), np.uint8(statuses.OVERFLOW), np.uint8(statuses.INVALID)

CAPTURE_TYPES = (
    pointer_to(types.uint8), int32, int64, pointer_to(types.uint8), pointer_to(int32), pointer_to(int32),
    pointer_to(int64), pointer_to(int64), pointer_to(int32), pointer_to(float32),
)  # fmt: skip


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
    def close_request(
        request, width, rows, wanted, num_committed, verdict_status, error_row, count, max_support, capture_status,
        failed_row, row_start_of,
    ):  # fmt: skip
        # By one thread, in the block of the request's first row.
        failed, status = np.int32(-1), _OK
        if wanted[request] != 0:
            if verdict_status[request] != _OK:
                failed, status = np.int32(error_row[request]), _INVALID
            for j in range(num_committed[request]):
                if count[np.int64(request) * width + j] > max_support and status != _OVERFLOW:
                    failed, status = np.int32(j), _OVERFLOW
        capture_status[request], failed_row[request] = status, failed
        row_start_of[request] = rows

    def capture(
        words, skew, width, request_step, row_step, vocabulary,
        status, maximum, cutoff, total, count, argmax, greedy, temperature, token_ids, weights, segments, capacity,
        num_segments,
        num_requests, num_committed, verdict_status, error_row,
        wanted, max_support, room, capture_status, failed_row, counts, row_start_of, offsets, out_ids, out_logprobs,
    ):  # fmt: skip
        shared = cuda.shared.array(WARP, int32)
        scratch64 = cuda.shared.array(WARP, int64)
        index, thread = cuda.blockIdx.x, cuda.threadIdx.x
        sums, too_large = np.int64(0), np.int32(0)
        for other in range(thread, index + 1, threads):
            if wanted[other // width] != 0 and other % width < num_committed[other // width]:
                size = np.int32(count[other])
                if size > max_support:
                    too_large = np.int32(1)
                if other < index:
                    sums = np.int64(sums + _ROW + size)
        policy = open_policy(index, status, maximum, cutoff, total, count, argmax, greedy, temperature)
        packed = wanted[index // width] != 0 and index % width < num_committed[index // width]
        scale = log_scale(policy)
        first = first_entry(
            policy, scale, index, words, skew, width, request_step, row_step, token_ids, capacity, packed
        )
        if cuda.syncthreads_or(too_large) != 0:  # rare: look at what lies before each row in its request
            sums = np.int64(0)
            for other in range(thread, index, threads):
                if _packed(other, width, wanted, num_committed, count, max_support):
                    sums = np.int64(sums + _ROW + count[other])
            packed = _packed(index, width, wanted, num_committed, count, max_support)
        sums = sum64(sums, scratch64)
        rows, entries = np.int64(sums // _ROW), np.int64(sums % _ROW)
        request = np.int32(index // width)
        if thread == 0:
            reached = wanted[request] != 0 and index % width < num_committed[request]
            counts[index] = policy.count if reached else 0
            if index % width == 0:
                close_request(
                    request, width, rows, wanted, num_committed, verdict_status, error_row, count, max_support,
                    capture_status, failed_row, row_start_of,
                )  # fmt: skip
            if packed:
                offsets[rows] = entries
        if index == num_requests * width - 1:
            through = np.int64(entries + (policy.count if packed else 0))
            num_packed = np.int64(rows + (1 if packed else 0))
            for i in range(num_packed + thread, num_requests * width + 1, threads):
                offsets[i] = through
            if thread == 0:
                row_start_of[num_requests] = num_packed
        if packed and entries + policy.count <= room:
            pack_row(
                first, policy, scale, index, words, skew, width, request_step, row_step, vocabulary, token_ids,
                capacity, out_ids, out_logprobs, entries, shared,
            )  # fmt: skip

    signature = void(
        *LOGIT_TYPES, *SUPPORT_TYPES, int32, pointer_to(int32), pointer_to(types.uint8), pointer_to(int32),
        *CAPTURE_TYPES,
    )  # fmt: skip
    return Kernel(capture, signature, threads)

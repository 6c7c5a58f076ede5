"""Verification and capture in one launch: a block a request.

A block verifies its request, makes known how many rows and entries that packs, adds up those of the requests before it
and writes its masks behind them. Blocks take requests in the order in which they start, and make theirs known without
waiting for anybody, so that whoever waits, waits for a running block.
"""

from functools import lru_cache

import numpy as np
from numba import cuda, float32, float64, int32, int64, void

from gpu import status as statuses
from gpu.capture.kernel import CAPTURE_TYPES
from gpu.capture.pack import walk_of
from gpu.device.block import WARP, block_of
from gpu.device.instructions import add_at
from gpu.device.launch import LOGIT_TYPES, Kernel, pointer_to
from gpu.device.rows import open_row
from gpu.device.vectors import element_of, format_of, row_start
from gpu.support.policy import SUPPORT_TYPES, LogScale, Policy, log_probability_under, open_policy
from gpu.verification.chain import (
    MAX_REGISTERS,
    REQUEST_TYPES,
    SCRATCH64,
    THREADS,
    VERDICT_TYPES,
    settle_of,
)

MAX_WIDTH = 64  # rows a request that the kernel holds in shared memory
_KNOWN, _ROW = 1 << 60, 1 << 40  # in what a request makes known: that it did; one row
_OK, _OVERFLOW, _INVALID = np.uint8(statuses.OK), np.uint8(statuses.OVERFLOW), np.uint8(statuses.INVALID)


@lru_cache
def fused_kernel(name: str, proposal_name: str | None, threads: int = THREADS) -> Kernel:
    """The kernel for logits and draft probabilities of these dtypes; its grid is (requests,)."""
    granule, element = 2 * format_of(name).lanes, element_of(name)
    settle, pack_walked = settle_of(name, proposal_name, threads), walk_of(name, threads)
    block = block_of(threads)
    prefix64, sum64 = block.prefix64, block.sum64

    @cuda.jit(device=True)
    def before_this(request, progress, scratch64):
        # What the requests before this one pack: rows * _ROW + entries.
        sums = np.int64(0)
        for other in range(cuda.threadIdx.x, request, threads):
            known = np.int64(0)
            while known == 0:
                known = np.int64(add_at(progress, np.int64(other), np.int64(0)))
            sums = np.int64(sums + known - _KNOWN)
        return sum64(sums, scratch64)

    def verify_and_capture(
        words, skew, width, request_step, row_step, vocabulary,
        status, maximum, cutoff, total, count, argmax, greedy, temperature, token_ids, weights, segments, capacity,
        num_segments,
        draft_tokens, num_drafts, accept_uniforms, draw_uniforms, proposal, proposal_skew, proposal_step,
        proposal_row_step, threshold_single, threshold_acc,
        num_accepted, num_committed, tokens, logprobs, verdict_status, error_row,
        num_requests, progress,
        wanted, max_support, room, capture_status, failed_row, counts, row_start_of, offsets, out_ids, out_logprobs,
    ):  # fmt: skip
        shared = cuda.shared.array(8, int32)
        scratch64 = cuda.shared.array(SCRATCH64, int64)
        row_at = cuda.shared.array(MAX_WIDTH, int32)
        row_count = cuda.shared.array(MAX_WIDTH, int32)
        row_greedy = cuda.shared.array(MAX_WIDTH, int32)
        row_maximum = cuda.shared.array(MAX_WIDTH, float32)
        row_inverse = cuda.shared.array(MAX_WIDTH, float64)
        row_log = cuda.shared.array(MAX_WIDTH, float64)
        walk_scratch = cuda.shared.array(WARP, int32)
        i = cuda.threadIdx.x
        if i == 0:
            shared[7] = np.int32(add_at(progress, np.int64(num_requests), np.int64(1)))
        cuda.syncthreads()
        request = np.int32(shared[7])
        first = np.int64(request) * width
        committed, good, policy, scale = settle(
            request, shared, scratch64,
            words, skew, width, request_step, row_step, vocabulary,
            status, maximum, cutoff, total, count, argmax, greedy, temperature, token_ids, weights, segments, capacity,
            num_segments,
            draft_tokens, num_drafts, accept_uniforms, draw_uniforms, proposal, proposal_skew, proposal_step,
            proposal_row_step, threshold_single, threshold_acc,
            num_accepted, num_committed, tokens, logprobs, verdict_status, error_row,
        )  # fmt: skip
        packs = wanted[request] != 0
        reached = packs and i < committed
        cuda.syncthreads()
        if i == 0:
            shared[1] = committed
        cuda.syncthreads()
        if reached and policy.count > max_support:
            cuda.atomic.min(shared, 1, i)
        cuda.syncthreads()
        rows = np.int32(shared[1]) if packs else np.int32(0)
        own = np.int64(policy.count) if i < rows else np.int64(0)
        at, entries = prefix64(own, scratch64)
        if i == 0:
            add_at(progress, np.int64(request), np.int64(_KNOWN + np.int64(rows) * _ROW + entries))
        if i < width:
            row_at[i], row_count[i] = np.int32(at), np.int32(own)
            row_greedy[i], row_maximum[i] = np.int32(1 if policy.greedy else 0), policy.maximum
            row_inverse[i], row_log[i] = scale.inverse_temperature, scale.log_of_total
            counts[first + i] = policy.count if reached else 0
        cuda.syncthreads()
        sums = before_this(request, progress, scratch64)
        row_base, base = np.int64(sums // _ROW), np.int64(sums % _ROW)
        if i < rows:
            offsets[row_base + i] = np.int64(base + at)
        if i == 0:
            row_start_of[request] = row_base
            failed, outcome = np.int32(-1), _OK
            if packs and rows < committed:
                failed, outcome = rows, _OVERFLOW
            elif packs and not good:
                failed, outcome = committed, _INVALID
            capture_status[request], failed_row[request] = outcome, failed
        if request == num_requests - 1:
            for j in range(row_base + rows + i, np.int64(num_requests) * width + 1, threads):
                offsets[j] = np.int64(base + entries)
            if i == 0:
                row_start_of[num_requests] = np.int64(row_base + rows)
        row = np.int32(0)
        for e in range(i, entries, threads):
            while row + 1 < rows and row_at[row + 1] <= e:
                row = np.int32(row + 1)
            size = np.int32(row_count[row])
            if size <= capacity and base + row_at[row] + size <= room:
                token = np.int32(token_ids[(first + row) * capacity + e - row_at[row]])
                x = element(words, np.int64(row_start(first + row, width, request_step, row_step, skew) + token))
                of_row = Policy(
                    True, row_greedy[row] != 0, size, 0, np.int64(0), np.float32(0.0), row_maximum[row],
                    np.float32(0.0), np.float32(0.0), np.float32(0.0),
                )  # fmt: skip
                out_ids[base + e] = token
                out_logprobs[base + e] = log_probability_under(of_row, x, LogScale(row_inverse[row], row_log[row]))
        for j in range(rows):
            if row_count[j] > capacity and base + row_at[j] + row_count[j] <= room:
                walked = open_policy(first + j, status, maximum, cutoff, total, count, argmax, greedy, temperature)
                view = open_row(first + j, words, skew, width, request_step, row_step, vocabulary, words, 0, granule)
                pack_walked(
                    view, walked, LogScale(row_inverse[j], row_log[j]), out_ids, out_logprobs,
                    np.int64(base + row_at[j]), walk_scratch,
                )  # fmt: skip
        if i == 0:
            shared[0] = np.int32(add_at(progress, np.int64(num_requests + 1), np.int64(1)))
        cuda.syncthreads()
        if shared[0] == num_requests - 1:  # the last one: nobody looks any more
            for j in range(i, num_requests + 2, threads):
                progress[j] = np.int64(0)

    signature = void(
        *LOGIT_TYPES, *SUPPORT_TYPES, *REQUEST_TYPES, *VERDICT_TYPES, int32, pointer_to(int64), *CAPTURE_TYPES,
    )  # fmt: skip
    return Kernel(verify_and_capture, signature, threads, MAX_REGISTERS)

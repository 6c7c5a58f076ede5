"""Verification and capture of one request by one block.

The block verifies its request, makes known how many rows and entries that packs, adds up those of the requests before
it and writes its masks behind them. It makes its own known before it waits for others: whoever waits, waits for
requests whose blocks run already.

`Captures.progress`, int64 [2B + 1]: what request b packs, once known; requests done; how many rows of request b are
filtered.
"""

from functools import lru_cache
from typing import Any

import numpy as np
from numba import cuda, float32, float64, int32

from gpu import status as statuses
from gpu.capture.pack import walk_of
from gpu.device.block import WARP, block_of
from gpu.device.instructions import add_at
from gpu.device.rows import row_start, row_without_maxima
from gpu.device.vectors import element_of, format_of
from gpu.support.policy import LogScale, open_policy
from gpu.verification.chain import settle_of
from gpu.weights import log_share

MAX_WIDTH = 64  # rows a request that are held in shared memory
_KNOWN, _ROW = 1 << 60, 1 << 40  # in what a request makes known: that it did; one row
_OK, _OVERFLOW, _INVALID = np.uint8(statuses.OK), np.uint8(statuses.OVERFLOW), np.uint8(statuses.INVALID)


@lru_cache
def request_of(name: str, proposal_name: str | None, threads: int) -> Any:
    """A device function for logits and draft probabilities of these dtypes.

    (request, num_requests, logits, rows, requests, verdicts, captures, shared, scratch64). shared: int32 [8],
    scratch64: int64 [SCRATCH64].
    """
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

    @cuda.jit(device=True)
    def find(e, row, entries, row_at, row_count, num_packed, first, rows):
        # From `row` on, the row in the request and the token id of its packed entry e; -1 if it carries none.
        while row + 1 < num_packed and row_at[row + 1] <= e:
            row = np.int32(row + 1)
        token, size = np.int32(-1), np.int32(row_count[row])
        if e < entries and size <= rows.capacity:
            token = np.int32(rows.token_ids[(first + row) * rows.capacity + e - row_at[row]])
        return row, token

    @cuda.jit(device=True)
    def find_four(e, row, entries, row_at, row_count, num_packed, first, rows):
        # Rows and tokens of entries e, e + threads, ...
        row0, token0 = find(e, row, entries, row_at, row_count, num_packed, first, rows)
        e = np.int32(e + threads)
        row1, token1 = find(e, row0, entries, row_at, row_count, num_packed, first, rows)
        e = np.int32(e + threads)
        row2, token2 = find(e, row1, entries, row_at, row_count, num_packed, first, rows)
        e = np.int32(e + threads)
        row3, token3 = find(e, row2, entries, row_at, row_count, num_packed, first, rows)
        return row0, row1, row2, row3, token0, token1, token2, token3

    @cuda.jit(device=True)
    def logit(logits, index, token):
        if token < 0:
            return np.float32(0.0)
        return element(logits.words, np.int64(row_start(logits, index) + token))

    @cuda.jit(device=True)
    def put(base, e, row, token, x, row_at, row_count, row_greedy, row_maximum, row_inverse, row_log, captures):
        if token >= 0 and base + row_at[row] + row_count[row] <= captures.room:
            logprob = np.float32(0.0)
            if row_greedy[row] == 0:
                logprob = np.float32(log_share(x, row_maximum[row], row_inverse[row], row_log[row]))
            captures.token_ids[base + e], captures.logprobs[base + e] = token, logprob

    @cuda.jit(device=True)
    def decide(request, num_requests, logits, rows, requests, verdicts, captures, shared, scratch64):
        row_at = cuda.shared.array(MAX_WIDTH, int32)
        row_count = cuda.shared.array(MAX_WIDTH, int32)
        row_greedy = cuda.shared.array(MAX_WIDTH, int32)
        row_maximum = cuda.shared.array(MAX_WIDTH, float32)
        row_inverse = cuda.shared.array(MAX_WIDTH, float64)
        row_log = cuda.shared.array(MAX_WIDTH, float64)
        walk_scratch = cuda.shared.array(WARP, int32)
        i, width, progress = cuda.threadIdx.x, logits.width, captures.progress
        first = np.int64(request) * width
        committed, good, policy, scale = settle(request, logits, rows, requests, verdicts, shared, scratch64)
        packs = captures.wanted[request] != 0
        reached = packs and i < committed
        cuda.syncthreads()
        if i == 0:
            shared[1] = committed
        cuda.syncthreads()
        if reached and policy.count > captures.max_support:
            cuda.atomic.min(shared, 1, i)
        cuda.syncthreads()
        num_packed = np.int32(shared[1]) if packs else np.int32(0)
        own = np.int64(policy.count) if i < num_packed else np.int64(0)
        at, entries = prefix64(own, scratch64)
        if i == 0:
            add_at(progress, np.int64(request), np.int64(_KNOWN + np.int64(num_packed) * _ROW + entries))
        if i < width:
            row_at[i], row_count[i] = np.int32(at), np.int32(own)
            row_greedy[i], row_maximum[i] = np.int32(1 if policy.greedy else 0), policy.maximum
            row_inverse[i], row_log[i] = scale.inverse_temperature, scale.log_of_total
            captures.counts[first + i] = policy.count if reached else 0
        cuda.syncthreads()
        # Four at a time, and the tokens of the next four before these are written, so that as many loads as can be are
        # under way together: each entry is a chain of two. The first four need no place yet.
        four = find_four(np.int32(i), np.int32(0), entries, row_at, row_count, num_packed, first, rows)
        sums = before_this(request, progress, scratch64)
        row_base, base = np.int64(sums // _ROW), np.int64(sums % _ROW)
        if i < num_packed:
            captures.offsets[row_base + i] = np.int64(base + at)
        if i == 0:
            captures.row_start[request] = row_base
            failed, outcome = np.int32(-1), _OK
            if packs and num_packed < committed:
                failed, outcome = num_packed, _OVERFLOW
            elif packs and not good:
                failed, outcome = committed, _INVALID
            captures.status[request], captures.failed_row[request] = outcome, failed
        if request == num_requests - 1:
            for j in range(row_base + num_packed + i, np.int64(num_requests) * width + 1, threads):
                captures.offsets[j] = np.int64(base + entries)
            if i == 0:
                captures.row_start[num_requests] = np.int64(row_base + num_packed)
        for e in range(i, entries, 4 * threads):
            row0, row1, row2, row3, token0, token1, token2, token3 = four
            four = find_four(np.int32(e + 4 * threads), row3, entries, row_at, row_count, num_packed, first, rows)
            x0, x1 = logit(logits, np.int64(first + row0), token0), logit(logits, np.int64(first + row1), token1)
            x2, x3 = logit(logits, np.int64(first + row2), token2), logit(logits, np.int64(first + row3), token3)
            e0, e1 = np.int64(e), np.int64(e + threads)
            e2, e3 = np.int64(e + 2 * threads), np.int64(e + 3 * threads)
            put(base, e0, row0, token0, x0, row_at, row_count, row_greedy, row_maximum, row_inverse, row_log, captures)
            put(base, e1, row1, token1, x1, row_at, row_count, row_greedy, row_maximum, row_inverse, row_log, captures)
            put(base, e2, row2, token2, x2, row_at, row_count, row_greedy, row_maximum, row_inverse, row_log, captures)
            put(base, e3, row3, token3, x3, row_at, row_count, row_greedy, row_maximum, row_inverse, row_log, captures)
        for j in range(num_packed):
            if row_count[j] > rows.capacity and base + row_at[j] + row_count[j] <= captures.room:
                pack_walked(
                    row_without_maxima(logits, first + j, granule), open_policy(rows, first + j),
                    LogScale(row_inverse[j], row_log[j]), captures.token_ids, captures.logprobs,
                    np.int64(base + row_at[j]), walk_scratch,
                )  # fmt: skip
        if i == 0:
            shared[0] = np.int32(add_at(progress, np.int64(num_requests), np.int64(1)))
        cuda.syncthreads()
        if shared[0] == num_requests - 1:  # the last one: nobody looks any more
            for j in range(i, num_requests + 1, threads):
                progress[j] = np.int64(0)

    return decide

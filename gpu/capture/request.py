"""Verification and capture of one request by one block.

The block verifies its request, makes known how many rows and entries that packs, adds up those of the requests before
it and writes its masks behind them. It makes its own known before it waits for others: whoever waits, waits for
requests whose blocks run already. The filter has left its logit beside each entry, so that none is looked up here: the
6,900 entries of 8 rows at top_k 1024 are four times 8 loads a thread, one latency each (before, a chain of two).

`Captures.progress`, int64 [2B + 1]: what request b packs, once known; requests done; how many rows of request b are
filtered.
"""

from functools import lru_cache
from typing import Any, NamedTuple

import numpy as np
from numba import cuda, float32, float64, int32

from gpu import status as statuses
from gpu.capture.pack import walk_of
from gpu.device.block import WARP, block_of
from gpu.device.instructions import add_at
from gpu.device.rows import row_without_maxima
from gpu.device.vectors import format_of
from gpu.support.policy import LogScale, kept_log_scale, open_policy
from gpu.verification.chain import settle_of
from gpu.weights import log_share

MAX_WIDTH = 64  # rows a request that are held in shared memory
_KNOWN, _ROW = 1 << 60, 1 << 40  # in what a request makes known: that it did; one row
_CARRIED = 1 << 32  # in a sum of entries: one that its row carries
_OK, _OVERFLOW, _INVALID = np.uint8(statuses.OK), np.uint8(statuses.OVERFLOW), np.uint8(statuses.INVALID)


class Held(NamedTuple):
    """What a block keeps of its request's rows in shared memory, MAX_WIDTH elements each."""

    at: Any  # int32: entries of the request before the row
    after: Any  # int32: how many of those are carried by their rows
    count: Any  # int32: entries of a row that is packed
    greedy: Any
    maximum: Any  # float32
    inverse: Any  # float64, of LogScale, like the next
    log: Any


@lru_cache
def request_of(name: str, proposal_name: str | None, threads: int, walks: bool) -> Any:
    """A device function for logits and draft probabilities of these dtypes.

    (request, num_requests, logits, rows, requests, verdicts, captures, shared, scratch64). shared: int32 [8],
    scratch64: int64 [SCRATCH64]. walks: it also writes the masks of rows that carry no entries, by walking them; else
    gpu/capture/spread.py does.
    """
    granule = 2 * format_of(name).lanes
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
    def find(e, row, carried, num_packed, first, rows, held):
        # Of entry e of those that the request's rows carry: the row, from `row` on, the token id, -1 beyond the last,
        # and the logit.
        while row + 1 < num_packed and held.after[row + 1] <= e:
            row = np.int32(row + 1)
        token, x = np.int32(-1), np.float32(0.0)
        if e < carried:
            i = np.int64((first + row) * rows.capacity + e - held.after[row])
            token, x = np.int32(rows.token_ids[i]), np.float32(rows.entry_logits[i])
        return row, token, x

    @cuda.jit(device=True)
    def find_four(e, row, carried, num_packed, first, rows, held):
        # Of entries e, e + threads, ...
        row0, token0, x0 = find(e, row, carried, num_packed, first, rows, held)
        e = np.int32(e + threads)
        row1, token1, x1 = find(e, row0, carried, num_packed, first, rows, held)
        e = np.int32(e + threads)
        row2, token2, x2 = find(e, row1, carried, num_packed, first, rows, held)
        e = np.int32(e + threads)
        row3, token3, x3 = find(e, row2, carried, num_packed, first, rows, held)
        return row0, row1, row2, row3, token0, token1, token2, token3, x0, x1, x2, x3

    @cuda.jit(device=True)
    def put(base, e, row, token, x, held, captures):
        if token >= 0 and base + held.at[row] + held.count[row] <= captures.room:
            logprob = np.float32(0.0)
            if held.greedy[row] == 0:
                logprob = np.float32(log_share(x, held.maximum[row], held.inverse[row], held.log[row]))
            to = np.int64(base + held.at[row] + e - held.after[row])
            captures.token_ids[to], captures.logprobs[to] = token, logprob

    @cuda.jit(device=True)
    def decide(request, num_requests, logits, rows, requests, verdicts, captures, shared, scratch64):
        held_at = cuda.shared.array(MAX_WIDTH, int32)
        held_after = cuda.shared.array(MAX_WIDTH, int32)
        held_count = cuda.shared.array(MAX_WIDTH, int32)
        held_greedy = cuda.shared.array(MAX_WIDTH, int32)
        held_maximum = cuda.shared.array(MAX_WIDTH, float32)
        held_inverse = cuda.shared.array(MAX_WIDTH, float64)
        held_log = cuda.shared.array(MAX_WIDTH, float64)
        held = Held(held_at, held_after, held_count, held_greedy, held_maximum, held_inverse, held_log)
        walk_scratch = cuda.shared.array(WARP, int32)
        i, width, progress = cuda.threadIdx.x, logits.width, captures.progress
        first = np.int64(request) * width
        policy = open_policy(rows, first + min(i, width - 1))
        scale = kept_log_scale(rows, first + min(i, width - 1))
        committed, good = settle(request, logits, rows, requests, verdicts, shared, scratch64)
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
        own = np.int32(policy.count) if i < num_packed else np.int32(0)
        of_carried = own if own <= rows.capacity else np.int32(0)
        both, in_all = prefix64(np.int64(np.int64(of_carried) * _CARRIED + own), scratch64)
        at, entries = np.int32(both % _CARRIED), np.int64(in_all % _CARRIED)
        carried = np.int32(in_all // _CARRIED)
        if i == 0:
            add_at(progress, np.int64(request), np.int64(_KNOWN + np.int64(num_packed) * _ROW + entries))
        if i < width:
            held.at[i], held.after[i], held.count[i] = at, np.int32(both // _CARRIED), own
            held.greedy[i], held.maximum[i] = np.int32(1 if policy.greedy else 0), policy.maximum
            held.inverse[i], held.log[i] = scale.inverse_temperature, scale.log_of_total
            captures.counts[first + i] = policy.count if reached else 0
        cuda.syncthreads()
        # Four at a time, and the next four before these are written, so that as many loads as can be are under way
        # together. The first four need no place yet.
        four = find_four(np.int32(i), np.int32(0), carried, num_packed, first, rows, held)
        sums = before_this(request, progress, scratch64)
        row_base, base = np.int64(sums // _ROW), np.int64(sums % _ROW)
        done = np.int64(0)
        if i == 0:  # this request looks at no other any more; how many don't is asked for last
            done = add_at(progress, np.int64(num_requests), np.int64(1))
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
        for e in range(i, carried, 4 * threads):
            row0, row1, row2, row3, token0, token1, token2, token3, x0, x1, x2, x3 = four
            e0, e1 = np.int32(e), np.int32(e + threads)
            e2, e3 = np.int32(e + 2 * threads), np.int32(e + 3 * threads)
            four = find_four(np.int32(e3 + threads), row3, carried, num_packed, first, rows, held)
            put(base, e0, row0, token0, x0, held, captures)
            put(base, e1, row1, token1, x1, held, captures)
            put(base, e2, row2, token2, x2, held, captures)
            put(base, e3, row3, token3, x3, held, captures)
        if walks:
            for j in range(num_packed):
                if held.count[j] > rows.capacity and base + held.at[j] + held.count[j] <= captures.room:
                    pack_walked(
                        row_without_maxima(logits, first + j, granule), open_policy(rows, first + j),
                        LogScale(held.inverse[j], held.log[j]), captures.token_ids, captures.logprobs,
                        np.int64(base + held.at[j]), walk_scratch,
                    )  # fmt: skip
        if i == 0:
            shared[0] = np.int32(done)
        cuda.syncthreads()
        if shared[0] == num_requests - 1:  # the last one: nobody looks any more
            for j in range(i, num_requests + 1, threads):
                progress[j] = np.int64(0)

    return decide

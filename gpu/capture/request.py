"""Capture of one request by one block, behind the verdict that it makes of its rows' answers.

The block makes known how many rows and entries its request packs, adds up those of the requests before it and writes
its masks behind them. It makes its own known before it waits for others: whoever waits, waits for requests whose blocks
run already. As a rule all are known before it asks, so it asks at first.

The filter has left its logit beside each entry, so that none is looked up here. Each warp copies as many entries as the
others, a row's numbers in registers: the 6,900 entries of 8 rows at top_k 1024 are 4 times 4 loads of each kind a
thread, 16 KB under way together, about what a multiprocessor gets from the L2 cache in the time of one access.

`Captures.progress`, int64 [2B + 1]: what request b packs, once known; requests done; how many rows of request b are
filtered.
"""

from functools import lru_cache
from typing import Any, NamedTuple

import numpy as np
from numba import cuda, float32, float64, int32

from gpu import status as statuses
from gpu.capture.pack import walk_of
from gpu.device.block import FULL, WARP, block_of
from gpu.device.instructions import add_at
from gpu.device.rows import row_without_maxima
from gpu.device.vectors import format_of
from gpu.support.policy import LogScale, kept_log_scale, open_policy
from gpu.verification.chain import settle_of
from gpu.weights import log_share

MAX_WIDTH = 64  # rows a request that are held in shared memory
_KNOWN, _ROW = 1 << 60, 1 << 40  # in what a request makes known: that it did; one row
_OK, _OVERFLOW, _INVALID = np.uint8(statuses.OK), np.uint8(statuses.OVERFLOW), np.uint8(statuses.INVALID)


class Held(NamedTuple):
    """What a block keeps of its request's rows in shared memory, MAX_WIDTH elements each."""

    at: Any  # int32: entries of the request before the row
    after: Any  # int32: how many of those are carried by their rows
    count: Any  # int32: entries
    greedy: Any
    maximum: Any  # float32
    inverse: Any  # float64, of LogScale, like the next
    log: Any


class Run(NamedTuple):
    """Entries of one row that a warp copies."""

    source: Any  # int64: where the first one lies
    to: Any  # int64: where it goes, behind the entries of the requests before
    number: Any  # int32
    greedy: Any  # bool
    maximum: Any  # float32
    scale: Any  # LogScale


@lru_cache
def request_of(name: str, proposal_name: str | None, as_block: bool, threads: int, walks: bool) -> Any:
    """A device function for logits and draft probabilities of these dtypes, drafts verified by this rule.

    (request, num_requests, logits, rows, requests, verdicts, captures, shared, scratch64). shared: int32 [8],
    scratch64: int64 [SCRATCH64]. walks: it also writes the masks of rows that carry no entries, by walking them; else
    gpu/capture/spread.py does.
    """
    granule = 2 * format_of(name).lanes
    settle, pack_walked = settle_of(name, proposal_name, as_block, threads), walk_of(name, threads)
    sum64, warps = block_of(threads).sum64, threads // WARP

    @cuda.jit(device=True)
    def entry(run, i, rows):
        # Token id and logit of the run's i-th entry; -1 beyond the last.
        if i < run.number:
            return np.int32(rows.token_ids[run.source + i]), np.float32(rows.entry_logits[run.source + i])
        return np.int32(-1), np.float32(0.0)

    @cuda.jit(device=True)
    def four(run, i, rows):
        token0, x0 = entry(run, i, rows)
        token1, x1 = entry(run, np.int32(i + WARP), rows)
        token2, x2 = entry(run, np.int32(i + 2 * WARP), rows)
        token3, x3 = entry(run, np.int32(i + 3 * WARP), rows)
        return token0, token1, token2, token3, x0, x1, x2, x3

    @cuda.jit(device=True)
    def put(run, to, token, x, captures):
        if token >= 0:
            logprob = np.float32(0.0)
            if not run.greedy:
                scale = run.scale
                logprob = np.float32(log_share(x, run.maximum, scale.inverse_temperature, scale.log_of_total))
            captures.token_ids[to], captures.logprobs[to] = token, logprob

    @cuda.jit(device=True)
    def copy(run, following, base, rows, captures):
        # `following`: its first four. The next four come before these are written: more loads are under way together.
        to = np.int64(base + run.to)
        for i in range(cuda.laneid, run.number, 4 * WARP):
            token0, token1, token2, token3, x0, x1, x2, x3 = following
            i = np.int32(i)
            following = four(run, np.int32(i + 4 * WARP), rows)
            put(run, np.int64(to + i), token0, x0, captures)
            put(run, np.int64(to + i + WARP), token1, x1, captures)
            put(run, np.int64(to + i + 2 * WARP), token2, x2, captures)
            put(run, np.int64(to + i + 3 * WARP), token3, x3, captures)

    @cuda.jit(device=True)
    def row_of(e, num_packed, held):
        # The row that carries entry e of those that the request's rows carry; 0 if none carries any.
        found = np.int32(0)
        for begin in range(0, num_packed, WARP):
            j = np.int32(begin + cuda.laneid)
            votes = cuda.ballot_sync(FULL, j < num_packed and held.after[min(j, np.int32(MAX_WIDTH - 1))] <= e)
            found = np.int32(found + cuda.popc(np.int32(votes)))
        return np.int32(found - 1) if found > 0 else np.int32(0)

    @cuda.jit(device=True)
    def run_from(e, end, row, num_packed, first, rows, held):
        # Those of the entries from e to end that the row carries.
        stop, after, at = end, np.int32(held.after[row]), np.int32(held.at[row])
        if row + 1 < num_packed:
            stop = min(end, np.int32(held.after[row + 1]))
        source = np.int64((first + row) * rows.capacity + e - after)
        scale = LogScale(held.inverse[row], held.log[row])
        number = max(np.int32(stop - e), np.int32(0))
        return Run(source, np.int64(at + e - after), number, held.greedy[row] != 0, held.maximum[row], scale)

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
        # The last warps ask, while the first ones are at the rows.
        other, known = np.int32(threads - 1 - i), np.int64(0)
        if other < request:
            known = np.int64(add_at(progress, np.int64(other), np.int64(0)))
        packs, count = captures.wanted[request] != 0, np.int32(0)
        if i < width:
            row, count = np.int64(first + i), np.int32(rows.count[first + i])
            scale = kept_log_scale(rows, row)
            held.count[i], held.greedy[i], held.maximum[i] = count, np.int32(rows.greedy[row]), rows.maximum[row]
            held.inverse[i], held.log[i] = scale.inverse_temperature, scale.log_of_total
        if i == 0:
            shared[6] = width
        committed, good = settle(request, logits, rows, requests, verdicts, shared, scratch64)
        reached = packs and i < committed
        if reached and count > captures.max_support:
            cuda.atomic.min(shared, 6, i)
        cuda.syncthreads()
        num_packed = min(committed, np.int32(shared[6])) if packs else np.int32(0)
        at, entries = np.int32(0), np.int32(0)
        if i < width:
            after, carried = np.int32(0), np.int32(0)
            for j in range(num_packed):
                own = np.int32(held.count[j])
                of_carried = own if own <= rows.capacity else np.int32(0)
                if j < i:
                    at, after = np.int32(at + own), np.int32(after + of_carried)
                entries, carried = np.int32(entries + own), np.int32(carried + of_carried)
            if i == 0:
                add_at(progress, np.int64(request), np.int64(_KNOWN + np.int64(num_packed) * _ROW + entries))
                shared[1], shared[7] = entries, carried
            held.at[i], held.after[i] = at, after
            captures.counts[first + i] = count if reached else np.int32(0)
        cuda.syncthreads()
        # A warp's first entries are under way while it waits for what earlier requests pack.
        warp, carried = np.int32(cuda.threadIdx.x // WARP), np.int32(shared[7])
        e, end = np.int32(carried * warp // warps), np.int32(carried * (warp + 1) // warps)
        row = row_of(e, num_packed, held)
        following = four(run_from(e, end, row, num_packed, first, rows, held), cuda.laneid, rows)
        sums = np.int64(0)
        while other < request:
            while known == 0:
                known = np.int64(add_at(progress, np.int64(other), np.int64(0)))
            sums = np.int64(sums + known - _KNOWN)
            other, known = np.int32(other + threads), np.int64(0)
        sums = sum64(sums, scratch64)
        row_base, base = np.int64(sums // _ROW), np.int64(sums % _ROW)
        done = np.int32(0)
        if i == 0:  # this request looks at no other any more; how many don't is asked for last
            done = np.int32(add_at(progress, np.int64(num_requests), np.int64(1)))
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
                captures.row_start[num_requests] = np.int64(row_base + num_packed)
        if request == num_requests - 1:
            for j in range(row_base + num_packed + i, np.int64(num_requests) * width + 1, threads):
                captures.offsets[j] = np.int64(base + shared[1])
        while e < end:
            run = run_from(e, end, row, num_packed, first, rows, held)
            if base + held.at[row] + held.count[row] <= captures.room:
                copy(run, following, base, rows, captures)
            e, row = np.int32(e + run.number), np.int32(row + 1)
            if e < end:
                following = four(run_from(e, end, row, num_packed, first, rows, held), cuda.laneid, rows)
        if walks:
            for j in range(num_packed):
                if held.count[j] > rows.capacity and base + held.at[j] + held.count[j] <= captures.room:
                    pack_walked(
                        row_without_maxima(logits, first + j, granule), open_policy(rows, first + j),
                        LogScale(held.inverse[j], held.log[j]), captures.token_ids, captures.logprobs,
                        np.int64(base + held.at[j]), walk_scratch,
                    )  # fmt: skip
        if i < WARP:
            done = cuda.shfl_sync(FULL, done, 0)
            if done == num_requests - 1:  # the last one: nobody looks any more
                for j in range(i, num_requests + 1, WARP):
                    progress[j] = np.int64(0)

    return decide

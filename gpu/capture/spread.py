"""The masks of rows that carry no entries, a block a chunk of a row, behind a round that says where they go.

A block counts what its chunk keeps, makes that known, adds up the chunks before it, whose blocks have lower numbers
(see gpu/rounds/kernel.py), and writes its entries behind them. A warp gathers its entries in shared memory first, so
that their log-probabilities are shared evenly and written side by side. 115 rows with 25,000 entries each are 57 MB to
read and 23 MB to write: 25 us at an H200's memory speed. Whoever decided a request wrote them alone before, in 750 us.
"""

from functools import lru_cache
from typing import Any, NamedTuple

import numpy as np
from numba import cuda, float32, int32, void

from gpu.capture.pack import CAPTURES
from gpu.device.block import FULL, WARP, block_of, warp_prefix32
from gpu.device.instructions import add_at, load_four, warp_sum_s32
from gpu.device.launch import Kernel, pointer_to
from gpu.device.rows import LOGITS, row_start
from gpu.device.vectors import format_of, in_row
from gpu.support.policy import ROWS, log_probability_under, log_scale, open_policy
from gpu.support.scan import LOADS, THREADS
from gpu.support.whole import place_of, vector_of

MAX_REGISTERS = 64  # two blocks a multiprocessor


class Sweep(NamedTuple):
    """Where a warp gathers the entries of a vector a lane: its part of two shared arrays."""

    ids: Any  # int32
    logits: Any  # float32
    at: Any  # int32: its first element


@lru_cache
def spread_kernel(name: str, threads: int = THREADS) -> Kernel:
    """The kernel for logits of this dtype, over no more blocks than run at once.

    Its argument `known`, int32 [R, chunks + 1], zero between launches: one more than what each chunk keeps, once known;
    how many chunks look at no other any more.
    """
    form, load, block = format_of(name), load_four(WARP), block_of(threads)
    lanes, decode, prefix32 = form.lanes, form.decode, block.prefix32
    granule, of_sweep, gathered, all_lanes = 2 * lanes, WARP * lanes, threads * lanes, (1 << lanes) - 1

    @cuda.jit(device=True)
    def kept(words, place, policy, vocabulary):
        # Which elements of this thread's vectors are kept: of the i-th from bit i * lanes on.
        mask = np.int32(0)
        for i in range(LOADS):
            w0, w1, w2, w3 = vector_of(words, i)
            first = np.int32(place.first + i * WARP * lanes)
            for lane in range(lanes):
                if decode(w0, w1, w2, w3, lane) >= policy.cutoff and in_row(first, lane, vocabulary):
                    mask = np.int32(mask | np.int32(np.int32(1) << np.int32(i * lanes + lane)))
        return mask

    @cuda.jit(device=True)
    def number_in(mask, i):
        return np.int32(cuda.popc(np.int32((mask >> np.int32(i * lanes)) & all_lanes)))

    @cuda.jit(device=True)
    def before_chunk(known, at, chunk):
        # What the chunks before this one keep; by a warp.
        number = np.int32(0)
        for other in range(cuda.laneid, chunk, WARP):
            found = np.int32(0)
            while found == 0:
                found = np.int32(add_at(known, np.int64(at + other), np.int32(0)))
            number = np.int32(number + found - 1)
        return warp_sum_s32(number)

    @cuda.jit(device=True)
    def write_sweep(words, mask, place, i, before, number, to, sweep, policy, scale, captures):
        # The warp's entries of the i-th vectors: `before` of them lie in lower lanes.
        w0, w1, w2, w3 = vector_of(words, i)
        first, at = np.int32(place.first + i * WARP * lanes), np.int32(sweep.at + before)
        while mask != 0:
            lane = np.int32(cuda.ffs(mask) - 1)
            mask = np.int32(mask & np.int32(mask - 1))
            sweep.ids[np.uint32(at)] = np.int32(first + lane)
            sweep.logits[np.uint32(at)] = decode(w0, w1, w2, w3, lane)
            at = np.int32(at + 1)
        cuda.syncwarp()
        for e in range(cuda.laneid, number, WARP):
            captures.token_ids[to + e] = sweep.ids[np.uint32(sweep.at + e)]
            x = sweep.logits[np.uint32(sweep.at + e)]
            captures.logprobs[to + e] = log_probability_under(policy, x, scale)
        cuda.syncwarp()

    @cuda.jit(device=True)
    def place_of_mask(row, logits, rows, captures):
        # Where the row's mask begins; -1 if it isn't written here.
        count = np.int32(rows.count[row])
        if count <= rows.capacity:
            return np.int64(-1)
        request = np.int32(np.uint32(row) // np.uint32(logits.width))
        packed = np.int64(captures.row_start[request] + row - request * logits.width)
        if packed >= captures.row_start[request + 1]:
            return np.int64(-1)
        to = np.int64(captures.offsets[packed])
        return to if to + count <= captures.room else np.int64(-1)

    @cuda.jit(device=True)
    def spread_chunk(row, chunk, logits, rows, chunks, captures, known, ids, values, scratch, box):
        thread, vocabulary = np.int32(cuda.threadIdx.x), logits.vocabulary
        to = place_of_mask(row, logits, rows, captures)
        start = row_start(logits, row)
        head = np.int32(start & np.int64(granule - 1))
        place = place_of(start, head, chunk, LOADS, lanes, vocabulary)
        words = load(logits.words, place.vector, place.left)
        policy = open_policy(rows, row)
        mask = kept(words, place, policy, vocabulary)
        # Two counts a word: a warp's sweep has at most 256.
        own01 = np.int32(number_in(mask, 0) | (number_in(mask, 1) << 16))
        own23 = np.int32(number_in(mask, 2) | (number_in(mask, 3) << 16))
        through01, through23 = warp_prefix32(own01), warp_prefix32(own23)
        all01 = np.int32(cuda.shfl_sync(FULL, through01, WARP - 1))
        all23 = np.int32(cuda.shfl_sync(FULL, through23, WARP - 1))
        n0, n1, n2, n3 = all01 & 0xFFFF, all01 >> 16, all23 & 0xFFFF, all23 >> 16
        before_warp, number = block.offset32(np.int32(n0 + n1 + n2 + n3), scratch)
        at = np.int64(np.int64(row) * (chunks + 1))
        if thread == 0:
            add_at(known, np.int64(at + chunk), np.int32(number + 1))
        if thread < WARP:
            before = before_chunk(known, at, chunk)
            if thread == 0:
                box[0] = before
        scale = log_scale(policy)
        cuda.syncthreads()
        if thread == 0:  # asked for last
            box[1] = np.int32(add_at(known, np.int64(at + chunks), np.int32(1)))
        to = np.int64(to + box[0] + before_warp)
        sweep = Sweep(ids, values, np.int32((thread // WARP) * of_sweep))
        before01, before23 = np.int32(through01 - own01), np.int32(through23 - own23)
        for i in range(LOADS):
            before, number = (before23, all23) if i & 2 else (before01, all01)
            shift = np.int32((i & 1) * 16)
            before, number = np.int32((before >> shift) & 0xFFFF), np.int32((number >> shift) & 0xFFFF)
            of_vector = np.int32((mask >> np.int32(i * lanes)) & all_lanes)
            write_sweep(words, of_vector, place, i, before, number, to, sweep, policy, scale, captures)
            to = np.int64(to + number)
        cuda.syncthreads()
        if box[1] == chunks - 1:  # the row's last one
            for i in range(thread, chunks + 1, threads):
                known[at + i] = 0

    def spread(logits, rows, chunks, captures, known, num_rows):
        ids = cuda.shared.array(gathered, int32)
        values = cuda.shared.array(gathered, float32)
        scratch = cuda.shared.array(WARP, int32)
        box = cuda.shared.array(2, int32)
        numbers = cuda.shared.array(threads, int32)
        for first in range(0, num_rows, threads):
            row = np.int32(first + cuda.threadIdx.x)
            wanted = row < num_rows and place_of_mask(row, logits, rows, captures) >= 0
            cuda.syncthreads()  # behind what is done
            at, total = prefix32(np.int32(1 if wanted else 0), scratch)
            if wanted:
                numbers[np.uint32(at)] = row
            tasks = np.int32(total * chunks)
            for task in range(cuda.blockIdx.x, tasks, cuda.gridDim.x):
                cuda.syncthreads()  # behind `numbers`, and behind what the one before had in shared memory
                i = np.int32(np.uint32(task) // np.uint32(chunks))
                row, chunk = np.int32(numbers[np.uint32(i)]), np.int32(task - i * chunks)
                spread_chunk(row, chunk, logits, rows, chunks, captures, known, ids, values, scratch, box)

    return Kernel(spread, void(LOGITS, ROWS, int32, CAPTURES, pointer_to(int32), int32), threads, MAX_REGISTERS)

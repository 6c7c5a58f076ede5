"""What is kept, given the cutoff: count, mass, least key, the lowest id of the maximum, and the entries in order."""

from functools import lru_cache
from typing import Any, NamedTuple

import numpy as np
from numba import cuda

from gpu.device.block import FULL, WARP, block_of, warp_sum64
from gpu.device.instructions import load_kept, warp_min_u32, warp_sum_s32
from gpu.device.rows import stored_maximum
from gpu.device.vectors import format_of, in_row
from gpu.support.gather import IDS, KEYS, SCRATCHES, WORK
from gpu.weights import weight


class Finish(NamedTuple):
    """The ways to finish, for one dtype and block size."""

    candidates: Any  # (size, cutoff, scale, shared, scratch64, rows, out)
    whole_row: Any  # (row, cutoff, scale, shared, scratch64, segments, segments_at): both -> count, total, least, id
    write_row: Any  # (row, least, cutoff, scale, shared, rows, out)
    row_mass: Any  # (row, scale, scratch64) -> the mass of all
    reduced: Any  # (mass, key, id, shared, scratch64), a thread's -> the block's sum, and the smallest of the others


@lru_cache
def finish_of(name: str, threads: int) -> Finish:
    """The ways for logits of this dtype."""
    form, block = format_of(name), block_of(threads)
    lanes, key_of, value_of = form.lanes, form.key, form.value
    offset32, prefix32, sum64 = block.offset32, block.prefix32, block.sum64
    to_stored = np.uint32(form.bits - 16)
    warps = threads // WARP
    highest = np.uint32(0xFFFFFFFF)

    @cuda.jit(device=True)
    def reduced(total, least, arg, shared, scratch64):
        # Of the block: the sum, and the smallest of each of the others, behind one barrier.
        total, least, arg = warp_sum64(total), warp_min_u32(least), warp_min_u32(arg)
        warp = cuda.threadIdx.x // WARP
        if cuda.laneid == 0:
            scratch64[warp] = total
            shared[np.uint32(WORK + warp)], shared[np.uint32(WORK + WARP + warp)] = np.int32(least), np.int32(arg)
        cuda.syncthreads()
        total, least, arg = np.int64(0), highest, highest
        if cuda.laneid < warps:
            total, least = np.int64(scratch64[cuda.laneid]), np.uint32(shared[np.uint32(WORK + cuda.laneid)])
            arg = np.uint32(shared[np.uint32(WORK + WARP + cuda.laneid)])
        return warp_sum64(total), warp_min_u32(least), warp_min_u32(arg)

    @cuda.jit(device=True)
    def write(rows, to, token, mass, value):
        rows.token_ids[to], rows.weights[to], rows.entry_logits[to] = token, mass, value

    @cuda.jit(device=True)
    def candidates(size, cutoff, scale, shared, scratch64, rows, out):
        lane, warp = cuda.laneid, cuda.threadIdx.x // WARP
        run = np.int32(((size + threads - 1) // threads) * WARP)
        start = np.int32(warp * run)
        end = min(np.int32(start + run), size)
        kept, arg = np.int32(0), highest
        for i in range(start + lane, end, WARP):
            value = value_of(np.uint32(shared[np.uint32(KEYS + i)]))
            if value >= cutoff:
                kept = np.int32(kept + 1)
            if value == scale.maximum:
                arg = min(arg, np.uint32(shared[np.uint32(IDS + i)]))
        at, count = offset32(warp_sum_s32(kept), shared[SCRATCHES + 2 * WARP :])
        total, least = np.int64(0), highest
        for begin in range(start, end, WARP):
            i = np.int32(begin + lane)
            taken, key, value = False, np.uint32(0), np.float32(0.0)
            if i < end:
                key = np.uint32(shared[np.uint32(KEYS + i)])
                value = value_of(key)
                taken = value >= cutoff
            votes = np.uint32(cuda.ballot_sync(FULL, taken))
            if taken:
                mass = np.int64(weight(value, scale.maximum, scale.c_hi, scale.c_lo))
                total = np.int64(total + mass)
                least = min(least, key)
                below = np.uint32(votes & np.uint32((np.uint32(1) << np.uint32(lane)) - np.uint32(1)))
                to = np.int32(at + cuda.popc(np.int32(below)))
                if to < rows.capacity:
                    write(rows, np.int64(out + to), np.int32(shared[np.uint32(IDS + i)]), mass, value)
            at = np.int32(at + cuda.popc(np.int32(votes)))
        total, least, arg = reduced(total, least, arg, shared, scratch64)
        return count, total, least, arg

    @cuda.jit(device=True)
    def whole_row(row, cutoff, scale, shared, scratch64, segments, segments_at):
        lane, warp = cuda.laneid, cuda.threadIdx.x // WARP
        count, total, least, arg = np.int32(0), np.int64(0), highest, highest
        for begin in range(0, row.num_granules, threads):
            granule = np.int32(begin + cuda.threadIdx.x)
            own = np.int64(0)
            if granule < row.num_granules:
                for half in range(2):
                    w0, w1, w2, w3 = load_kept(row.words, np.int64(row.first_vector + 2 * granule + half))
                    first = np.int32((2 * granule + half) * lanes - row.head)
                    for i in range(lanes):
                        key = key_of(w0, w1, w2, w3, i)
                        value = value_of(key)
                        if value >= cutoff and in_row(first, i, row.vocabulary):
                            own = np.int64(own + weight(value, scale.maximum, scale.c_hi, scale.c_lo))
                            count = np.int32(count + 1)
                            least = min(least, key)
                            if value == scale.maximum:
                                arg = min(arg, np.uint32(first + i))
            total = np.int64(total + own)
            own = warp_sum64(own)
            if lane == 0 and begin + warp * WARP < row.num_granules:
                segments[segments_at + begin // WARP + warp] = own
        _, count = prefix32(count, shared[SCRATCHES + 2 * WARP :])
        total, least, arg = reduced(total, least, arg, shared, scratch64)
        return count, total, least, arg

    @cuda.jit(device=True)
    def write_row(row, least, cutoff, scale, shared, rows, out):
        size = np.int32(0)
        least_stored = np.uint32(least >> to_stored)
        for begin in range(0, 2 * row.num_granules, threads):
            vector = np.int32(begin + cuda.threadIdx.x)
            reaches = np.int32(0)
            if vector < 2 * row.num_granules and stored_maximum(row, vector >> 1) >= least_stored:
                reaches = np.int32(1)
            if cuda.syncthreads_or(reaches):
                mask, first = np.int32(0), np.int32(vector * lanes - row.head)
                w0, w1, w2, w3 = np.uint32(0), np.uint32(0), np.uint32(0), np.uint32(0)
                if reaches != 0:
                    w0, w1, w2, w3 = load_kept(row.words, np.int64(row.first_vector + vector))
                    for lane in range(lanes):
                        value = value_of(key_of(w0, w1, w2, w3, lane))
                        if value >= cutoff and in_row(first, lane, row.vocabulary):
                            mask |= np.int32(1 << lane)
                before, total = prefix32(np.int32(cuda.popc(mask)), shared[SCRATCHES:])
                at = np.int64(out + size + before)
                while mask != 0:
                    lane = np.int32(cuda.ffs(mask) - 1)
                    mask = np.int32(mask & np.int32(mask - 1))
                    value = value_of(key_of(w0, w1, w2, w3, lane))
                    mass = np.int64(weight(value, scale.maximum, scale.c_hi, scale.c_lo))
                    write(rows, at, np.int32(first + lane), mass, value)
                    at = np.int64(at + 1)
                size = np.int32(size + total)

    @cuda.jit(device=True)
    def row_mass(row, scale, scratch64):
        total = np.int64(0)
        for vector in range(cuda.threadIdx.x, 2 * row.num_granules, threads):
            w0, w1, w2, w3 = load_kept(row.words, np.int64(row.first_vector + vector))
            first = np.int32(vector * lanes - row.head)
            for lane in range(lanes):
                if in_row(first, lane, row.vocabulary):
                    value = value_of(key_of(w0, w1, w2, w3, lane))
                    total = np.int64(total + weight(value, scale.maximum, scale.c_hi, scale.c_lo))
        return sum64(total, scratch64)

    return Finish(candidates, whole_row, write_row, row_mass, reduced)

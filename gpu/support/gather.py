"""From stored maxima to candidates in shared memory: every element whose key reaches a bound, in ascending id.

The bound is the key of the need-th largest granule maximum, cut: at least `need` elements reach it, rarely many more.
"""

from functools import lru_cache
from typing import Any, NamedTuple

import numpy as np
from numba import cuda

from gpu.device.block import FULL, WARP, block_of, warp_prefix32
from gpu.device.instructions import load_kept
from gpu.device.rows import stored_maximum
from gpu.device.vectors import BINS, format_of, halves_equal, halves_reaching, interleave

CANDIDATES = 3456  # that fit in shared memory
LISTED = 4096  # granules that can be read again for them
KEYS, IDS, WORK = 0, CANDIDATES, 2 * CANDIDATES  # where they lie in the shared int32 array; a window's keys in both
BOX = WORK + LISTED  # a few words that one thread leaves for all
SCRATCHES = BOX + 8  # of the block-wide operations, a word for each of 32 warps
SHARED = SCRATCHES + 4 * WARP


class Gather(NamedTuple):
    """The steps, for one dtype and block size."""

    maxima: Any  # (row, begin) -> this thread's stored maxima, from granule `begin` on
    bound: Any  # (counts, at, need, shared): box = bin, granules that reach it, granules above it
    clear: Any  # (counts, at): zero again
    refine: Any  # (row, maxima, need, shared): from the box, the bound's 16 bits; box 1: granules that reach it
    list_granules: Any  # (row, maxima, bound, shared) -> how many; ascending, to the work area
    take: Any  # (row, num_listed, base, shared) -> how many elements have key >= base; the first CANDIDATES stored


@lru_cache
def gather_of(name: str, threads: int) -> Gather:
    """The steps for logits of this dtype."""
    form, block = format_of(name), block_of(threads)
    lanes, rank_of, reaching_of = form.lanes, form.rank, form.reaching
    prefix32, offset32 = block.prefix32, block.offset32
    per_thread = BINS // threads
    sweep = 8 * WARP  # granules of a warp at a time: four times over, then the next warp's
    batch = 4 * 8 * threads

    @cuda.jit(device=True)
    def first_granule(begin):
        return np.int32(begin + (cuda.threadIdx.x // WARP) * (4 * sweep) + 8 * cuda.laneid)

    @cuda.jit(device=True)
    def eight(row, granule):
        # Stored maxima; 0, which nothing stores, beyond the row.
        if granule < row.num_granules:
            return load_kept(row.maxima, np.int64((row.maxima_at + granule) >> 3))
        return np.uint32(0), np.uint32(0), np.uint32(0), np.uint32(0)

    @cuda.jit(device=True)
    def maxima(row, begin):
        first = first_granule(begin)
        return (
            eight(row, first),
            eight(row, np.int32(first + sweep)),
            eight(row, np.int32(first + 2 * sweep)),
            eight(row, np.int32(first + 3 * sweep)),
        )

    @cuda.jit(device=True)
    def bound(counts, at, need, shared):
        top = np.int32(BINS - 1 - per_thread * cuda.threadIdx.x)
        own = np.int32(0)
        for i in range(per_thread):
            count = np.int32(counts[at + top - i])
            shared[np.uint32(WORK + top - i)] = count  # nearer, for the search below
            own = np.int32(own + count)
        before, total = prefix32(own, shared[SCRATCHES:])
        if before < need <= before + own:
            slot = top
            count = np.int32(shared[np.uint32(WORK + slot)])
            through = np.int32(before + count)
            while through < need:
                slot = np.int32(slot - 1)
                count = np.int32(shared[np.uint32(WORK + slot)])
                through = np.int32(through + count)
            shared[BOX], shared[BOX + 1], shared[BOX + 2] = slot, through, np.int32(through - count)
        if cuda.threadIdx.x == 0 and total < need:
            shared[BOX], shared[BOX + 1], shared[BOX + 2] = 0, total, total
        cuda.syncthreads()

    @cuda.jit(device=True)
    def clear(counts, at):
        top = np.int32(BINS - 1 - per_thread * cuda.threadIdx.x)
        for i in range(per_thread):
            counts[at + top - i] = 0

    # A thread's 32 stored maxima as bits: word j of sweep i, half h, at 16*h + 4*i + j.

    @cuda.jit(device=True)
    def reaching(words, least):
        mask = np.uint32(0)
        for four in words:
            for word in four:
                mask = np.uint32((mask >> np.uint32(1)) | halves_reaching(word, least))
        return mask

    @cuda.jit(device=True)
    def in_bin(words, slot):
        mask = np.uint32(0)
        for four in words:
            for word in four:
                mask = np.uint32((mask >> np.uint32(1)) | halves_equal(word & np.uint32(0xFFE0FFE0), slot))
        return mask

    @cuda.jit(device=True)
    def refine(row, prefetched, need, shared):
        slot, above = np.uint32(shared[BOX] << 5), np.int32(shared[BOX + 2])
        if cuda.threadIdx.x < WARP:
            shared[np.uint32(WORK + cuda.threadIdx.x)] = 0
        cuda.syncthreads()
        for begin in range(0, row.num_granules, batch):
            words = prefetched if begin == 0 else maxima(row, begin)
            first = first_granule(begin)
            mask = in_bin(words, np.uint32(slot | (slot << np.uint32(16))))
            while mask != 0:
                bit = np.int32(cuda.ffs(np.int32(mask)) - 1)
                mask = np.uint32(mask & np.uint32(mask - np.uint32(1)))
                granule = np.int32(first + ((bit >> 2) & 3) * sweep + ((bit & 3) << 1) + (bit >> 4))
                if granule < row.num_granules:
                    cuda.atomic.add(shared, np.uint32(WORK + (stored_maximum(row, granule) & np.uint32(31))), 1)
        cuda.syncthreads()
        if cuda.threadIdx.x < WARP:
            fine = np.int32(31 - cuda.threadIdx.x)
            own = np.int32(shared[np.uint32(WORK + fine)])
            through = np.int32(warp_prefix32(own) + above)
            if through - own < need <= through:
                shared[BOX], shared[BOX + 1] = np.int32(np.int32(slot) + fine), through
        cuda.syncthreads()

    @cuda.jit(device=True)
    def write_list(mask, granule, to, shared):
        while mask != 0 and to < LISTED:
            shared[np.uint32(WORK + to)] = np.int32(granule + cuda.ffs(mask) - 1)
            mask = np.int32(mask & np.int32(mask - 1))
            to = np.int32(to + 1)

    @cuda.jit(device=True)
    def list_granules(row, prefetched, least, shared):
        listed = np.int32(0)
        for begin in range(0, row.num_granules, batch):
            words = prefetched if begin == 0 else maxima(row, begin)
            first = first_granule(begin)
            mask = reaching(words, np.uint32(least | (least << np.uint32(16))))
            m0 = interleave(mask & np.uint32(15), (mask >> np.uint32(16)) & np.uint32(15))
            m1 = interleave((mask >> np.uint32(4)) & np.uint32(15), (mask >> np.uint32(20)) & np.uint32(15))
            m2 = interleave((mask >> np.uint32(8)) & np.uint32(15), (mask >> np.uint32(24)) & np.uint32(15))
            m3 = interleave((mask >> np.uint32(12)) & np.uint32(15), mask >> np.uint32(28))
            # Two counts a word: a warp's sweep has at most 256.
            own01 = np.int32(cuda.popc(m0) | (cuda.popc(m1) << 16))
            own23 = np.int32(cuda.popc(m2) | (cuda.popc(m3) << 16))
            through01, through23 = warp_prefix32(own01), warp_prefix32(own23)
            all01 = cuda.shfl_sync(FULL, through01, WARP - 1)
            all23 = cuda.shfl_sync(FULL, through23, WARP - 1)
            n0, n1, n2 = np.int32(all01 & 0xFFFF), np.int32(all01 >> 16), np.int32(all23 & 0xFFFF)
            at, total = offset32(np.int32(n0 + n1 + n2 + (all23 >> 16)), shared[SCRATCHES:])
            at = np.int32(at + listed)
            before01, before23 = np.int32(through01 - own01), np.int32(through23 - own23)
            write_list(m0, first, np.int32(at + (before01 & 0xFFFF)), shared)
            write_list(m1, np.int32(first + sweep), np.int32(at + n0 + (before01 >> 16)), shared)
            at = np.int32(at + n0 + n1)
            write_list(m2, np.int32(first + 2 * sweep), np.int32(at + (before23 & 0xFFFF)), shared)
            write_list(m3, np.int32(first + 3 * sweep), np.int32(at + n2 + (before23 >> 16)), shared)
            listed = np.int32(listed + total)
            cuda.syncthreads()
        return listed

    @cuda.jit(device=True)
    def elements(w0, w1, w2, w3, first, vocabulary, base):
        # Which elements of a vector reach `base` and belong to the row.
        mask = reaching_of(w0, w1, w2, w3, base)
        if first < 0:
            mask = np.int32(mask & (-1 << min(np.int32(-first), np.int32(lanes))))
        if first + lanes > vocabulary:
            mask = np.int32(mask & ((1 << max(np.int32(vocabulary - first), np.int32(0))) - 1))
        return mask

    @cuda.jit(device=True)
    def put(w0, w1, w2, w3, mask, first, at, shared):
        while mask != 0:
            lane = np.int32(cuda.ffs(mask) - 1)
            mask = np.int32(mask & np.int32(mask - 1))
            if at < CANDIDATES:
                shared[np.uint32(KEYS + at)] = np.int32(rank_of(w0, w1, w2, w3, lane))
                shared[np.uint32(IDS + at)] = np.int32(first + lane)
            at = np.int32(at + 1)
        return at

    @cuda.jit(device=True)
    def take(row, num_listed, base, shared):
        # A thread takes two listed granules, four vectors, at a time.
        size = np.int32(0)
        for begin in range(0, num_listed, 2 * threads):
            i = np.int32(begin + 2 * cuda.threadIdx.x)
            g0 = np.int32(shared[np.uint32(WORK + min(i, np.int32(num_listed - 1)))])
            g1 = np.int32(shared[np.uint32(WORK + min(np.int32(i + 1), np.int32(num_listed - 1)))])
            v0, v1 = np.int64(row.first_vector + 2 * g0), np.int64(row.first_vector + 2 * g1)
            a0, a1, a2, a3 = load_kept(row.words, v0)
            b0, b1, b2, b3 = load_kept(row.words, np.int64(v0 + 1))
            c0, c1, c2, c3 = load_kept(row.words, v1)
            d0, d1, d2, d3 = load_kept(row.words, np.int64(v1 + 1))
            g0, g1 = np.int32(2 * g0 * lanes - row.head), np.int32(2 * g1 * lanes - row.head)
            m0, m1, m2, m3 = np.int32(0), np.int32(0), np.int32(0), np.int32(0)
            if i < num_listed:
                m0 = elements(a0, a1, a2, a3, g0, row.vocabulary, base)
                m1 = elements(b0, b1, b2, b3, np.int32(g0 + lanes), row.vocabulary, base)
            if i + 1 < num_listed:
                m2 = elements(c0, c1, c2, c3, g1, row.vocabulary, base)
                m3 = elements(d0, d1, d2, d3, np.int32(g1 + lanes), row.vocabulary, base)
            own = np.int32(cuda.popc(m0) + cuda.popc(m1) + cuda.popc(m2) + cuda.popc(m3))
            before, total = prefix32(own, shared[SCRATCHES + WARP :])
            at = np.int32(size + before)
            at = put(a0, a1, a2, a3, m0, g0, at, shared)
            at = put(b0, b1, b2, b3, m1, np.int32(g0 + lanes), at, shared)
            at = put(c0, c1, c2, c3, m2, g1, at, shared)
            put(d0, d1, d2, d3, m3, np.int32(g1 + lanes), at, shared)
            size = np.int32(size + total)
            cuda.syncthreads()
        return size

    return Gather(maxima, bound, clear, refine, list_granules, take)

"""From stored maxima to candidates in shared memory: every element whose key reaches a bound, in ascending id.

The bound is the least key of the bin of the need-th largest granule maximum: at least `need` elements reach it, rarely
many more.
"""

from functools import lru_cache
from typing import Any, NamedTuple

import numpy as np
from numba import cuda

from gpu.device.block import WARP, block_of, warp_prefix32
from gpu.device.instructions import load_kept
from gpu.device.vectors import format_of, halves_reaching, interleave_halves
from gpu.support.bins import BINS, bins_of

CANDIDATES = 3456  # that fit in shared memory
LISTED = 4096  # granules that can be read again for them
KEYS, IDS, WORK = 0, CANDIDATES, 2 * CANDIDATES  # where they lie in the shared int32 array; a window's keys in both
BOX = WORK + LISTED  # a few words that one thread leaves for all
SCRATCHES = BOX + 8  # of the block-wide operations, a word for each of 32 warps
SHARED = SCRATCHES + 4 * WARP
_PARTS = 128  # parts that a bin is divided in, where it holds too many


class Gather(NamedTuple):
    """The steps, for one dtype and block size."""

    maxima: Any  # (row, begin) -> this thread's stored maxima, 32 from granule `begin` on
    first_counts: Any  # (counts, at) -> of this thread's uppermost four bins
    bound: Any  # (counts, at, first_counts, need, shared): box = bin, granules that reach it, granules above it
    clear: Any  # (counts, at): zero again
    refine: Any  # (row, need, shared): from the box, a bound within the bin; box 1: granules that reach it
    list_granules: Any  # (row, maxima, bound, shared) -> how many; ascending, to the work area
    take: Any  # (row, num_listed, base, shared) -> how many elements have key >= base; the first CANDIDATES stored


@lru_cache
def gather_of(name: str, threads: int) -> Gather:
    """The steps for logits of this dtype."""
    form, block = format_of(name), block_of(threads)
    octave, _, least_of = bins_of(name)
    lanes, rank_of, reaching_of, prefix32 = form.lanes, form.rank, form.reaching, block.prefix32
    per_thread, to_part = max(BINS // threads, 4), max(octave - 7, 0)
    batch = 32 * threads

    @cuda.jit(device=True)
    def eight(row, granule):
        # Stored maxima; 0, which nothing stores, beyond the row.
        if granule < row.num_granules:
            return load_kept(row.maxima, np.int64((row.maxima_at + granule) >> 3))
        return np.uint32(0), np.uint32(0), np.uint32(0), np.uint32(0)

    @cuda.jit(device=True)
    def maxima(row, begin):
        first = np.int32(begin + 32 * cuda.threadIdx.x)
        return (
            eight(row, first),
            eight(row, np.int32(first + 8)),
            eight(row, np.int32(first + 16)),
            eight(row, np.int32(first + 24)),
        )

    @cuda.jit(device=True)
    def first_counts(counts, at):
        top = np.int32(BINS - per_thread * cuda.threadIdx.x)
        if top > 0:
            return load_kept(counts, np.int64((at + top - 4) >> 2))
        return np.uint32(0), np.uint32(0), np.uint32(0), np.uint32(0)

    @cuda.jit(device=True)
    def bound(counts, at, first, need, shared):
        top, own = np.int32(BINS - 1 - per_thread * cuda.threadIdx.x), np.int32(0)
        if top > 0:
            d, c, b, a = np.int32(first[0]), np.int32(first[1]), np.int32(first[2]), np.int32(first[3])
            shared[np.uint32(WORK + top)], shared[np.uint32(WORK + top - 1)] = a, b
            shared[np.uint32(WORK + top - 2)], shared[np.uint32(WORK + top - 3)] = c, d
            own = np.int32(a + b + c + d)
            for i in range(4, per_thread):
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
        for i in range(cuda.threadIdx.x, BINS, threads):
            counts[at + i] = 0

    @cuda.jit(device=True)
    def reaching(words, least):
        # Of a thread's 32 stored maxima: granule 2 * i at bit i, its neighbour at bit 16 + i.
        least = np.uint32(least | (least << np.uint32(16)))
        mask = np.uint32(0)
        for four in words:
            for word in four:
                mask = np.uint32((mask >> np.uint32(1)) | halves_reaching(word, least))
        return mask

    @cuda.jit(device=True)
    def refine(row, need, shared):
        slot, above = np.int32(shared[BOX]), np.int32(shared[BOX + 2])
        low, beyond = max(least_of(slot), np.uint32(1)), least_of(np.int32(slot + 1))  # 0 lies beyond the row
        for i in range(cuda.threadIdx.x, _PARTS, threads):
            shared[np.uint32(WORK + i)] = 0
        cuda.syncthreads()
        for granule in range(8 * cuda.threadIdx.x, row.num_granules, 8 * threads):
            for word in eight(row, np.int32(granule)):
                for half in (np.uint32(word & np.uint32(0xFFFF)), np.uint32(word >> np.uint32(16))):
                    if low <= half < beyond:
                        cuda.atomic.add(shared, np.uint32(WORK + (np.uint32(half - low) >> np.uint32(to_part))), 1)
        cuda.syncthreads()
        if cuda.threadIdx.x < WARP:
            part = np.int32(_PARTS - 1 - 4 * cuda.threadIdx.x)
            own = np.int32(0)
            for i in range(4):
                own = np.int32(own + shared[np.uint32(WORK + part - i)])
            through = np.int32(warp_prefix32(own) + above - own)
            if through < need <= through + own:
                through = np.int32(through + shared[np.uint32(WORK + part)])
                while through < need:
                    part = np.int32(part - 1)
                    through = np.int32(through + shared[np.uint32(WORK + part)])
                shared[BOX], shared[BOX + 1] = np.int32(np.int32(low) + (part << to_part)), through
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
            mask = np.int32(interleave_halves(reaching(words, least)))
            before, total = prefix32(np.int32(cuda.popc(mask)), shared[SCRATCHES:])
            write_list(mask, np.int32(begin + 32 * cuda.threadIdx.x), np.int32(listed + before), shared)
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
    def take_few(row, num_listed, base, shared):
        # A thread takes a granule.
        i, zero, first, m0, m1 = np.int32(cuda.threadIdx.x), np.uint32(0), np.int32(0), np.int32(0), np.int32(0)
        a0, a1, a2, a3, b0, b1, b2, b3 = zero, zero, zero, zero, zero, zero, zero, zero
        if i < num_listed:
            granule = np.int32(shared[np.uint32(WORK + i)])
            vector = np.int64(row.first_vector + 2 * granule)
            a0, a1, a2, a3 = load_kept(row.words, vector)
            b0, b1, b2, b3 = load_kept(row.words, np.int64(vector + 1))
            first = np.int32(2 * granule * lanes - row.head)
            m0 = elements(a0, a1, a2, a3, first, row.vocabulary, base)
            m1 = elements(b0, b1, b2, b3, np.int32(first + lanes), row.vocabulary, base)
        at, size = prefix32(np.int32(cuda.popc(m0) + cuda.popc(m1)), shared[SCRATCHES + WARP :])
        at = put(a0, a1, a2, a3, m0, first, at, shared)
        put(b0, b1, b2, b3, m1, np.int32(first + lanes), at, shared)
        cuda.syncthreads()
        return size

    @cuda.jit(device=True)
    def take_many(row, num_listed, base, shared):
        # A thread takes two listed granules, four vectors, at a time.
        size, zero = np.int32(0), np.uint32(0)
        for begin in range(0, num_listed, 2 * threads):
            i = np.int32(begin + 2 * cuda.threadIdx.x)
            a0, a1, a2, a3, b0, b1, b2, b3 = zero, zero, zero, zero, zero, zero, zero, zero
            c0, c1, c2, c3, d0, d1, d2, d3 = zero, zero, zero, zero, zero, zero, zero, zero
            g0, g1 = np.int32(0), np.int32(0)
            m0, m1, m2, m3 = np.int32(0), np.int32(0), np.int32(0), np.int32(0)
            if i < num_listed:
                g0 = np.int32(shared[np.uint32(WORK + i)])
                g1 = np.int32(shared[np.uint32(WORK + min(np.int32(i + 1), np.int32(num_listed - 1)))])
                v0, v1 = np.int64(row.first_vector + 2 * g0), np.int64(row.first_vector + 2 * g1)
                a0, a1, a2, a3 = load_kept(row.words, v0)
                b0, b1, b2, b3 = load_kept(row.words, np.int64(v0 + 1))
                c0, c1, c2, c3 = load_kept(row.words, v1)
                d0, d1, d2, d3 = load_kept(row.words, np.int64(v1 + 1))
                g0, g1 = np.int32(2 * g0 * lanes - row.head), np.int32(2 * g1 * lanes - row.head)
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

    @cuda.jit(device=True)
    def take(row, num_listed, base, shared):
        if num_listed <= threads:
            return take_few(row, num_listed, base, shared)
        return take_many(row, num_listed, base, shared)

    return Gather(maxima, first_counts, bound, clear, refine, list_granules, take)

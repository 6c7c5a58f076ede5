"""Candidates of a row in shared memory, each a logit and its token id in one int64, and their order.

An entry's upper part is the logit's signed key (-0.0 taken for +0.0), its lower 31 bits count down with the id: in
descending order the entries go by logit descending, then by id ascending, and no two are equal.
"""

from functools import lru_cache
from typing import Any, NamedTuple

import numpy as np
from numba import cuda

from gpu.device.block import WARP, block_of
from gpu.device.instructions import load_kept
from gpu.device.rows import stored_maximum
from gpu.device.vectors import element_of, format_of, in_row, reach_of
from gpu.top_tokens.limit import MOST_ON_DEVICE
from gpu.top_tokens.search import BINS, BOX, MAXIMA, SCRATCH, SLOTS
from gpu.weights import key_of as signed_key_of

ROOM = 2 * MOST_ON_DEVICE  # entries: candidates outnumber k
_LISTED = SLOTS  # granules
_ID_MASK = np.int64(0x7FFFFFFF)
_NOTHING = np.int64(-(1 << 63))
_FEWEST = 2 * WARP  # entries of one warp in a step of the sort


class Entries(NamedTuple):
    """The ways to fill `entries` (int64 [ROOM], shared), for one dtype and block size; each ends with a barrier."""

    stored: Any  # (words, start, count, token_ids, at, entries): of the support's own ids
    reaching: Any  # (row, least, cutoff, entries, shared) -> how many; all that reach both, or more than ROOM
    largest: Any  # (row, key, num_ties, cutoff, entries, shared) -> how many: above key, and the first of those at it
    sort: Any  # (entries, size): in descending order


@cuda.jit(device=True)
def entry_of(x, token):
    """The entry of a logit and its token id."""
    key = np.int64(signed_key_of(np.float32(x + np.float32(0.0))))
    return np.int64((key << np.int64(31)) | np.int64(_ID_MASK - token))


@cuda.jit(device=True)
def token_of(entry):
    """The token id of an entry."""
    return np.int32(_ID_MASK - np.int64(entry & _ID_MASK))


@lru_cache
def entries_of(name: str, threads: int) -> Entries:
    """The ways for logits of this dtype."""
    form, element, reach = format_of(name), element_of(name), reach_of(name)
    lanes, key_of, value_of, to_stored = form.lanes, form.key, form.value, np.uint32(form.bits - 16)
    rank_of, prefix32 = form.rank, block_of(threads).prefix32
    count_eights, load_eight, key_in = MAXIMA

    @cuda.jit(device=True)
    def stored(words, start, count, token_ids, at, entries):
        for i in range(cuda.threadIdx.x, count, threads):
            token = np.int32(token_ids[at + i])
            entries[i] = entry_of(element(words, np.int64(start + token)), token)
        cuda.syncthreads()

    @cuda.jit(device=True)
    def list_eight(words, eight, row, least, shared):
        # Which of eight granules reach `least`: to the list, in any order.
        mask = np.int32(0)
        for i in range(8):
            if key_in(words, i) >= least and 8 * eight + i < row.num_granules:
                mask |= np.int32(1 << i)
        if mask != 0:
            to = np.int32(cuda.atomic.add(shared, BOX, np.int32(cuda.popc(mask))))
            while mask != 0 and to < _LISTED:
                shared[BINS + to] = np.int32(8 * eight + cuda.ffs(mask) - 1)
                mask = np.int32(mask & np.int32(mask - 1))
                to = np.int32(to + 1)

    @cuda.jit(device=True)
    def list_granules(row, least, shared):
        for begin in range(0, count_eights(row), 2 * threads):
            first = np.int32(begin + cuda.threadIdx.x)
            second = np.int32(first + threads)
            a, b = load_eight(row, first), load_eight(row, second)
            list_eight(a, first, row, least, shared)
            list_eight(b, second, row, least, shared)

    @cuda.jit(device=True)
    def put(w0, w1, w2, w3, mask, first, entries, shared):
        # These elements of a vector, in any order.
        if mask != 0:
            to = np.int32(cuda.atomic.add(shared, BOX + 1, np.int32(cuda.popc(mask))))
            while mask != 0 and to < ROOM:
                lane = np.int32(cuda.ffs(mask) - 1)
                entries[to] = entry_of(value_of(key_of(w0, w1, w2, w3, lane)), np.int32(first + lane))
                mask = np.int32(mask & np.int32(mask - 1))
                to = np.int32(to + 1)

    @cuda.jit(device=True)
    def open_box(shared):
        if cuda.threadIdx.x == 0:
            shared[BOX], shared[BOX + 1] = 0, 0
        cuda.syncthreads()

    @cuda.jit(device=True)
    def reaching(row, least, cutoff, entries, shared):
        open_box(shared)
        list_granules(row, least, shared)
        cuda.syncthreads()
        listed, base = np.int32(shared[BOX]), np.uint32(least << to_stored)
        if listed > _LISTED:
            return np.int32(ROOM + 1)
        for i in range(cuda.threadIdx.x, 2 * listed, threads):
            vector = np.int32(2 * shared[BINS + (i >> 1)] + (i & 1))
            w0, w1, w2, w3 = load_kept(row.words, np.int64(row.first_vector + vector))
            first, mask = np.int32(vector * lanes - row.head), np.int32(0)
            for lane in range(lanes):
                key = key_of(w0, w1, w2, w3, lane)
                if key >= base and value_of(key) >= cutoff and in_row(first, lane, row.vocabulary):
                    mask |= np.int32(1 << lane)
            put(w0, w1, w2, w3, mask, first, entries, shared)
        cuda.syncthreads()
        return np.int32(shared[BOX + 1])

    @cuda.jit(device=True)
    def largest(row, least, num_ties, cutoff, entries, shared):
        open_box(shared)
        least_stored, ties = reach(least), np.int32(0)
        for begin in range(0, 2 * row.num_granules, threads):
            vector = np.int32(begin + cuda.threadIdx.x)
            reaches = np.int32(0)
            if vector < 2 * row.num_granules and stored_maximum(row, vector >> 1) >= least_stored:
                reaches = np.int32(1)
            if cuda.syncthreads_or(reaches):
                above, equal, first = np.int32(0), np.int32(0), np.int32(vector * lanes - row.head)
                w0, w1, w2, w3 = np.uint32(0), np.uint32(0), np.uint32(0), np.uint32(0)
                if reaches != 0:
                    w0, w1, w2, w3 = load_kept(row.words, np.int64(row.first_vector + vector))
                    for lane in range(lanes):
                        key = rank_of(w0, w1, w2, w3, lane)
                        kept = value_of(key) >= cutoff and in_row(first, lane, row.vocabulary)
                        if kept and key > least:
                            above |= np.int32(1 << lane)
                        if kept and key == least:
                            equal |= np.int32(1 << lane)
                before, total = prefix32(np.int32(cuda.popc(equal)), shared[SCRATCH:])
                wanted = np.int32(num_ties - ties - before)
                while equal != 0 and wanted > 0:
                    above |= np.int32(equal & np.int32(-equal))
                    equal = np.int32(equal & np.int32(equal - 1))
                    wanted = np.int32(wanted - 1)
                put(w0, w1, w2, w3, above, first, entries, shared)
                ties = np.int32(ties + total)
        cuda.syncthreads()
        return np.int32(shared[BOX + 1])

    @cuda.jit(device=True)
    def exchange(entries, size, length, stride):
        for pair in range(cuda.threadIdx.x, size >> 1, threads):
            i = np.int32(2 * pair - (pair & (stride - 1)))
            a, b = entries[i], entries[i + stride]
            if (a < b) == ((i & length) == 0):
                entries[i], entries[i + stride] = b, a

    @cuda.jit(device=True)
    def sort(entries, size):
        # Bitonic (Batcher 1968). A warp's pairs at strides up to 32 are of the same 64 entries, its own.
        full = np.int32(_FEWEST)
        while full < size:
            full = np.int32(2 * full)
        for i in range(size + cuda.threadIdx.x, full, threads):
            entries[i] = _NOTHING
        cuda.syncthreads()
        length = np.int32(2)
        while length <= full:
            stride = np.int32(length >> 1)
            while stride > 0:
                exchange(entries, full, length, stride)
                following = np.int32(stride >> 1) if stride > 1 else length
                if max(stride, following) > WARP:
                    cuda.syncthreads()
                else:
                    cuda.syncwarp()
                stride = np.int32(stride >> 1)
            length = np.int32(2 * length)

    return Entries(stored, reaching, largest, sort)

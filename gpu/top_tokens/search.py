"""The k-th largest stored maximum of a row, and its k-th largest element, by counting.

The keys of a window are counted in SLOTS bins, and the bin with the k-th becomes the next window. The first window
holds the largest keys, one a bin: of stored maxima it is nearly always the only one.
"""

from functools import lru_cache
from typing import Any, NamedTuple

import numpy as np
from numba import cuda

from gpu.device.block import WARP, block_of
from gpu.device.instructions import load_kept
from gpu.device.rows import stored_maximum
from gpu.device.vectors import format_of, in_row, reach_of
from gpu.support.keys import keys_between, keys_in_slot, slot_of

LEVEL = 11
SLOTS = 1 << LEVEL
# Where things lie in the shared int32 array. The bins' room is the granules' once the search is over.
BINS, BOX, SCRATCH = 0, SLOTS, SLOTS + 4
SHARED = SCRATCH + WARP


class Search(NamedTuple):
    """The searches, for one dtype and block size: (row, need, base, top, coarse, shared) -> key, how many above it.

    Among keys in base..top; `base` where there are fewer than `need`. Every thread of the block takes part.
    """

    maximum: Any  # of the stored maxima, or where `coarse` of the largest of each eight
    element: Any  # of the elements, -0.0 taken for +0.0; `coarse` isn't read


class Maxima(NamedTuple):
    """How a thread reads stored maxima: eight at a time, four times over."""

    count: Any  # row -> eights
    load: Any  # (row, eights) -> four words
    key: Any  # (four words, 0..7) -> key


@cuda.jit(device=True)
def _count(row):
    return np.int32((row.num_granules + 7) >> 3)


@cuda.jit(device=True)
def _load(row, eight):
    inside = min(eight, np.int32(_count(row) - 1))
    return load_kept(row.maxima, np.int64((row.maxima_at >> 3) + inside))


@cuda.jit(device=True)
def _key(words, i):
    w0, w1, w2, w3 = words
    word = (w0 if i < 2 else w1) if i < 4 else (w2 if i < 6 else w3)
    return np.uint32((word >> np.uint32(16)) if i & 1 else (word & np.uint32(0xFFFF)))


MAXIMA = Maxima(_count, _load, _key)


@cuda.jit(device=True)
def _add(key, keys, shared):
    if keys.low <= key <= keys.high:
        cuda.atomic.add(shared, BINS + slot_of(keys, key), 1)


@cuda.jit(device=True)
def _add_eight(words, eight, row, keys, coarse, shared):
    largest = np.uint32(0)
    for i in range(8):
        if 8 * eight + i < row.num_granules:
            key = _key(words, i)
            largest = max(largest, key)
            if not coarse:
                _add(key, keys, shared)
    if coarse:
        _add(largest, keys, shared)


def _search_by(tally: Any, threads: int) -> Any:
    prefix32, per_thread = block_of(threads).prefix32, SLOTS // threads

    @cuda.jit(device=True)
    def find(above, need, shared):
        # box: the bin of the need-th or -1, and how many lie above it. Returns how many lie in the window and above.
        first = np.int32(SLOTS - 1 - per_thread * cuda.threadIdx.x)
        own = np.int32(0)
        for i in range(per_thread):
            own = np.int32(own + shared[BINS + first - i])
        before, total = prefix32(own, shared[SCRATCH:])
        before = np.int32(above + before)
        if before < need <= before + own:
            slot = first
            count = np.int32(before + shared[BINS + slot])
            while count < need:
                slot = np.int32(slot - 1)
                count = np.int32(count + shared[BINS + slot])
            shared[BOX], shared[BOX + 1] = slot, np.int32(count - shared[BINS + slot])
        cuda.syncthreads()
        return np.int32(above + total)

    @cuda.jit(device=True)
    def search(row, need, base, top, coarse, shared):
        low, above = np.uint32(base), np.int32(0)
        if np.uint32(top - base) >= SLOTS:
            low = np.uint32(top - np.uint32(SLOTS - 1))
        keys = keys_between(low, top, LEVEL)
        while True:
            for i in range(cuda.threadIdx.x, SLOTS, threads):
                shared[BINS + i] = 0
            if cuda.threadIdx.x == 0:
                shared[BOX] = -1
            cuda.syncthreads()
            tally(row, keys, coarse, shared)
            cuda.syncthreads()
            reached = find(above, need, shared)
            found, found_above = np.int32(shared[BOX]), np.int32(shared[BOX + 1])
            cuda.syncthreads()
            if found < 0:
                if keys.low == base:
                    return np.uint32(base), reached
                above, keys = reached, keys_between(base, np.uint32(keys.low - np.uint32(1)), LEVEL)
            else:
                last, above = keys.shift == 0, found_above
                keys = keys_in_slot(keys, found, LEVEL)
                if last:
                    return keys.low, above

    return search


@lru_cache
def search_of(name: str, threads: int) -> Search:
    """The searches for logits of this dtype."""
    form, reach = format_of(name), reach_of(name)
    lanes, rank_of = form.lanes, form.rank

    @cuda.jit(device=True)
    def tally_maxima(row, keys, coarse, shared):
        for begin in range(0, _count(row), 2 * threads):
            first = np.int32(begin + cuda.threadIdx.x)
            second = np.int32(first + threads)
            a, b = _load(row, first), _load(row, second)
            _add_eight(a, first, row, keys, coarse, shared)
            _add_eight(b, second, row, keys, coarse, shared)

    @cuda.jit(device=True)
    def tally_elements(row, keys, coarse, shared):
        least = reach(keys.low)
        for vector in range(cuda.threadIdx.x, 2 * row.num_granules, threads):
            if stored_maximum(row, vector >> 1) >= least:
                w0, w1, w2, w3 = load_kept(row.words, np.int64(row.first_vector + vector))
                first = np.int32(vector * lanes - row.head)
                for lane in range(lanes):
                    if in_row(first, lane, row.vocabulary):
                        _add(rank_of(w0, w1, w2, w3, lane), keys, shared)

    return Search(_search_by(tally_maxima, threads), _search_by(tally_elements, threads))

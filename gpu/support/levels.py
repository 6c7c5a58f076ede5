"""Cutoffs of a row by counting: the k-th largest key and the top-p crossing, LEVEL bits of the key at a time.

At each level the keys of a window are tallied in SLOTS bins, their number and their integer mass, and one bin becomes
the next window. What is tallied: `size` candidates in shared memory, or where size < 0 the whole row.
"""

from functools import lru_cache
from typing import Any, NamedTuple

import numpy as np
from numba import cuda

from gpu.device.block import WARP, block_of
from gpu.device.instructions import load_kept
from gpu.device.rows import stored_maximum
from gpu.device.vectors import format_of, in_row, reach_of
from gpu.support.cutoffs import mass_limit
from gpu.support.gather import BOX, KEYS, SCRATCHES, WORK
from gpu.support.keys import Keys, keys_between, keys_in_slot, slot_of
from gpu.weights import weight

LEVEL = 10
SLOTS = 1 << LEVEL


class Scale(NamedTuple):
    """What weighs a logit of a row."""

    maximum: np.float32
    c_hi: np.float32
    c_lo: np.float32


class Levels(NamedTuple):
    """The two searches, for one dtype and block size."""

    kth: Any  # (row, size, base, top, k, scale, shared, scratch64) -> k-th largest key, mass of the keys >= it
    crossing: Any  # (row, size, floor, top, above, top_p, whole, scale, shared, scratch64) -> key, whether it's reached
    both: Any  # both at once where one level is enough: see there


@cuda.jit(device=True)
def _add_mass(shared, slot, mass):
    # A 64-bit shared atomic is a loop; two 32-bit ones with a carry aren't.
    low = np.int32(np.int64(np.int64(mass) & np.int64(0xFFFFFFFF)))
    high = np.int32(np.int64(mass) >> np.int64(32))
    before = np.uint32(cuda.atomic.add(shared, np.uint32(WORK + SLOTS + slot), low))
    if np.uint32(before + np.uint32(low)) < before:
        high = np.int32(high + 1)
    if high != 0:
        cuda.atomic.add(shared, np.uint32(WORK + 2 * SLOTS + slot), high)


@cuda.jit(device=True)
def _mass_at(shared, slot):
    high, low = (
        np.int64(shared[np.uint32(WORK + 2 * SLOTS + slot)]),
        np.int64(np.uint32(shared[np.uint32(WORK + SLOTS + slot)])),
    )
    return np.int64((high << np.int64(32)) + low)


@lru_cache
def levels_of(name: str, threads: int) -> Levels:
    """The searches for logits of this dtype."""
    form, block = format_of(name), block_of(threads)
    lanes, rank_of, value_of = form.lanes, form.rank, form.value
    prefix64, prefix_both = block.prefix64, block.prefix_both
    reach = reach_of(name)
    per_thread = SLOTS // threads

    @cuda.jit(device=True)
    def add(key, keys, scale, shared):
        if keys.low <= key <= keys.high:
            slot = slot_of(keys, key)
            cuda.atomic.add(shared, np.uint32(WORK + slot), 1)
            _add_mass(shared, slot, weight(value_of(key), scale.maximum, scale.c_hi, scale.c_lo))

    @cuda.jit(device=True)
    def tally(row, size, keys, scale, shared):
        for i in range(cuda.threadIdx.x, 3 * SLOTS, threads):
            shared[np.uint32(WORK + i)] = 0
        cuda.syncthreads()
        if size >= 0:
            for i in range(cuda.threadIdx.x, size, threads):
                add(np.uint32(shared[np.uint32(KEYS + i)]), keys, scale, shared)
        else:
            least = reach(keys.low)
            for vector in range(cuda.threadIdx.x, 2 * row.num_granules, threads):
                if stored_maximum(row, vector >> 1) >= least:
                    w0, w1, w2, w3 = load_kept(row.words, np.int64(row.first_vector + vector))
                    first = np.int32(vector * lanes - row.head)
                    for lane in range(lanes):
                        if in_row(first, lane, row.vocabulary):
                            add(rank_of(w0, w1, w2, w3, lane), keys, scale, shared)
        cuda.syncthreads()

    @cuda.jit(device=True)
    def own_slots(shared):
        # This thread's slots, from `top` down, their number and their mass.
        top = np.int32(SLOTS - 1 - per_thread * cuda.threadIdx.x)
        count, mass = np.int32(0), np.int64(0)
        for i in range(per_thread):
            count = np.int32(count + shared[np.uint32(WORK + top - i)])
            mass = np.int64(mass + _mass_at(shared, top - i))
        return top, count, mass

    @cuda.jit(device=True)
    def find_kth(top, count_before, own, mass_before, k, shared, scratch64):
        # box: the slot of the k-th, what is above it; scratch64 past the warps: the mass down to it.
        if count_before < k <= count_before + own:
            slot = top
            count, mass = (
                np.int32(count_before + shared[np.uint32(WORK + slot)]),
                np.int64(mass_before + _mass_at(shared, slot)),
            )
            while count < k:
                slot = np.int32(slot - 1)
                count = np.int32(count + shared[np.uint32(WORK + slot)])
                mass = np.int64(mass + _mass_at(shared, slot))
            shared[BOX], shared[BOX + 1] = slot, np.int32(count - shared[np.uint32(WORK + slot)])
            scratch64[WARP], scratch64[WARP + 1] = mass, np.int64(mass - _mass_at(shared, slot))

    @cuda.jit(device=True)
    def find_crossing(top, before, own, limit, shared, scratch64):
        # box: the slot where the mass first reaches the limit; scratch64 past the warps: the mass above it.
        if np.float64(before) < limit <= np.float64(before + own):
            slot = top
            mass = np.int64(before + _mass_at(shared, slot))
            while np.float64(mass) < limit:
                slot = np.int32(slot - 1)
                mass = np.int64(mass + _mass_at(shared, slot))
            shared[BOX + 2] = slot
            scratch64[WARP + 1] = np.int64(mass - _mass_at(shared, slot))

    @cuda.jit(device=True)
    def kth(row, size, base, top, k, scale, shared, scratch64):
        keys, above, mass_above = keys_between(base, top, LEVEL), np.int32(0), np.int64(0)
        while True:
            tally(row, size, keys, scale, shared)
            if cuda.threadIdx.x == 0:
                shared[BOX] = -1
            slot, own, mass = own_slots(shared)
            before, _, mass_before, mass_total = prefix_both(own, mass, shared[SCRATCHES:], scratch64)
            find_kth(slot, np.int32(above + before), own, np.int64(mass_above + mass_before), k, shared, scratch64)
            cuda.syncthreads()
            found, above = np.int32(shared[BOX]), np.int32(shared[BOX + 1])
            mass, mass_above = np.int64(scratch64[WARP]), np.int64(scratch64[WARP + 1])
            cuda.syncthreads()
            if found < 0:  # fewer than k: all of them
                return base, mass_total
            last = keys.shift == 0
            keys = keys_in_slot(keys, found, LEVEL)
            if last:
                return keys.low, mass

    @cuda.jit(device=True)
    def crossing(row, size, floor, top, above, top_p, whole, scale, shared, scratch64):
        # above: the mass of the keys beyond `top`; a crossing there isn't reached here.
        keys, limit = keys_between(floor, top, LEVEL), mass_limit(top_p, whole)
        while True:
            tally(row, size, keys, scale, shared)
            if cuda.threadIdx.x == 0:
                shared[BOX + 2] = -1
            slot, _, mass = own_slots(shared)
            before, _ = prefix64(mass, scratch64)
            find_crossing(slot, np.int64(above + before), mass, limit, shared, scratch64)
            cuda.syncthreads()
            found, above = np.int32(shared[BOX + 2]), np.int64(scratch64[WARP + 1])
            cuda.syncthreads()
            if found < 0:
                return floor, False
            last = keys.shift == 0
            keys = keys_in_slot(keys, found, LEVEL)
            if last:
                return keys.low, True

    @cuda.jit(device=True)
    def both(row, size, base, top, k, top_p, whole, scale, shared, scratch64):
        # Where top - base < SLOTS. k = 0: no top-k; whole = 0: the mass of the top-k set.
        # Returns the k-th key, the crossing key (not below it), whether the mass reached the limit.
        tally(row, size, Keys(base, top, np.uint32(0)), scale, shared)
        if cuda.threadIdx.x == 0:
            shared[BOX], shared[BOX + 2] = -1, -1
        slot, own, mass = own_slots(shared)
        before, _, mass_before, mass_total = prefix_both(own, mass, shared[SCRATCHES:], scratch64)
        floor = base
        if k > 0:
            find_kth(slot, before, own, mass_before, k, shared, scratch64)
            cuda.syncthreads()
            if shared[BOX] >= 0:
                floor = np.uint32(base + np.uint32(shared[BOX]))
                mass_total = np.int64(scratch64[WARP])
        if top_p >= np.float32(1.0):
            return floor, floor, False
        find_crossing(slot, mass_before, mass, mass_limit(top_p, whole if whole > 0 else mass_total), shared, scratch64)
        cuda.syncthreads()
        found = np.int32(shared[BOX + 2])
        if found < 0:
            return floor, floor, False
        return floor, max(floor, np.uint32(base + np.uint32(found))), True

    return Levels(kth, crossing, both)

"""The filter behind the scan: one block a row, from its marks to its kept set.

1  bound    a key that at least `need` elements reach (need: top_k; 1 for greedy rows)
2  gather   the elements that reach it: candidates (key, id) in shared memory, in ascending id
3  cutoffs  the k-th largest key and the top-p crossing, by counts and integer masses
4  finish   count, mass and least key of what is kept; its entries

A row that has no bound, or more candidates than fit, runs 3 and 4 over its memory, unless gpu/support/whole.py has
found out what there is to know. Nothing depends on the launch.
"""

from functools import lru_cache
from typing import Any, NamedTuple

import numpy as np
from numba import cuda, int32, int64, void

from gpu import status
from gpu.device.block import WARP
from gpu.device.launch import Kernel
from gpu.device.rows import LOGITS, open_row
from gpu.device.vectors import format_of
from gpu.support.bins import BINS, bins_of
from gpu.support.cutoffs import min_p_cutoff
from gpu.support.finish import finish_of
from gpu.support.gather import BOX, CANDIDATES, LISTED, SHARED, gather_of
from gpu.support.levels import SLOTS, Scale, levels_of
from gpu.support.limits import FILTER, limits_of
from gpu.support.marks import MARKS
from gpu.support.policy import ROWS, Policy
from gpu.support.scan import row_of
from gpu.support.whole import top_of
from gpu.weights import LOWEST, ONE, split_scale

THREADS = 512
MAX_REGISTERS = 64  # two blocks a multiprocessor
SCRATCH64 = WARP + 2  # int64 of shared memory
_GUESS = 1024  # candidates looked at first where only top-p or min-p bounds a row
_OK, _INVALID = np.uint8(status.OK), np.uint8(status.INVALID)
_POSITIVE_ZERO, _NEGATIVE_ZERO = np.uint32(0x8000), np.uint32(0x7FFF)  # stored maxima


@cuda.jit(device=True)
def need_of(k, top_p, min_p, greedy):
    """How many of a row's largest elements are looked at first; 0: none, because all are kept."""
    need = np.int32(1) if greedy else np.int32(k)
    if need == 0 and (top_p < np.float32(1.0) or min_p > np.float32(0.0)):
        need = np.int32(_GUESS)
    return need


class Steps(NamedTuple):
    """What picks have in common, for one dtype and block size."""

    gather: (
        Any  # (row, prefetched, need, known_base, shared), behind `bound` -> how many or -1, the key that they reach
    )
    cut: Any  # (row, size, base, top, k, top_p, joint, of_row, scale, shared, scratch64): see there
    write: Any  # (index, out, greedy, count, total, kept, arg, maximum, rows) -> cutoff: leaves what is known of a row


@lru_cache
def steps_of(name: str, threads: int) -> Steps:
    """The steps for logits of this dtype."""
    form = format_of(name)
    value_of, minus_inf, to_stored = form.value, form.minus_inf, np.uint32(form.bits - 16)
    _, _, _, _, refine, list_granules, take = gather_of(name, threads)
    least_of = bins_of(name).least_of
    kth, crossing, both = levels_of(name, threads)
    row_mass = finish_of(name, threads).row_mass

    @cuda.jit(device=True)
    def gather(row, prefetched, need, known_base, shared):
        least = least_of(np.int32(shared[BOX]))
        if known_base == 0 and shared[BOX + 1] > need + (need >> 1) + 128:
            refine(row, need, shared)
            least = np.uint32(shared[BOX])
        reach = np.int32(shared[BOX + 1])
        if least == _POSITIVE_ZERO:  # the two zeros are one value
            least = _NEGATIVE_ZERO
        least = max(least, np.uint32(1))
        base = max(np.uint32(least << to_stored), np.uint32(minus_inf + 1))
        if known_base != 0:
            base, least, need, reach = known_base, np.uint32(known_base >> to_stored), np.int32(1), np.int32(0)
        size = np.int32(-1)
        if need > 0 and reach <= LISTED:
            num_listed = list_granules(row, prefetched, least, shared)
            if num_listed <= LISTED:
                size = take(row, num_listed, base, shared)
                size = size if size <= CANDIDATES else np.int32(-1)
        return size, base

    @cuda.jit(device=True)
    def cut(row, size, base, top, k, top_p, joint, of_row, scale, shared, scratch64):
        # Top-k (k > 0) and top-p. Returns the least kept key and whether it is one: else the row isn't cut here.
        whole = np.int64(0)
        if top_p < np.float32(1.0) and (joint != 0 or k == 0):
            whole = of_row if of_row > 0 else row_mass(row, scale, scratch64)
        if np.uint32(top - base) < SLOTS:
            floor, least, reached = both(row, size, base, top, k, top_p, whole, scale, shared, scratch64)
        else:
            floor, reached = base, False
            if k > 0:
                floor, mass = kth(row, size, base, top, k, scale, shared, scratch64)
                whole = whole if whole > 0 else mass
            least = floor
            if top_p < np.float32(1.0):
                least, reached = crossing(row, size, floor, top, np.int64(0), top_p, whole, scale, shared, scratch64)
        return least, reached or k > 0

    @cuda.jit(device=True)
    def write(index, out, greedy, count, total, kept, arg, maximum, rows):
        cutoff = np.float32(value_of(kept) + np.float32(0.0))  # a kept -0.0 and a kept +0.0 are one value
        if cuda.threadIdx.x == 0:
            if greedy:
                rows.token_ids[out], rows.weights[out] = np.int32(arg), np.int64(ONE)
                rows.entry_logits[out] = maximum
            rows.status[index], rows.greedy[index] = _OK, np.uint8(1 if greedy else 0)
            rows.maximum[index], rows.cutoff[index] = maximum, cutoff
            rows.count[index], rows.total[index], rows.argmax[index] = count, total, np.int32(arg)
        return cutoff

    return Steps(gather, cut, write)


@lru_cache
def pick_of(name: str, threads: int) -> Any:
    """A device function for logits of this dtype: (index, mass, base, cutoff, logits, marks, bounds, rows, shared,
    scratch64).

    Fills one row of `rows` and returns its Policy, in every thread and before all of the row is in memory. mass: of the
    whole row, 0 where it isn't known. base: where it isn't 0, all but min-p has cut the row: what is kept has no key
    below the base and no value below the cutoff. shared: int32 [gather.SHARED], scratch64: int64 [SCRATCH64].
    """
    form = format_of(name)
    granule, value_of = 2 * form.lanes, form.value
    minus_inf, plus_inf = form.minus_inf, form.plus_inf
    negative_zero = np.uint32(form.negative_zero)
    maxima_of, first_counts, bound, clear, _, _, _ = gather_of(name, threads)
    gather, cut, write = steps_of(name, threads)
    finish_candidates, finish_row, write_row, _, _ = finish_of(name, threads)

    @cuda.jit(device=True)
    def pick(index, mass, known_base, known_cutoff, logits, marks, bounds, rows, shared, scratch64):
        vocabulary = logits.vocabulary
        row = open_row(logits, index, granule, marks.maxima, marks.stride)
        prefetched, first = maxima_of(row, 0), first_counts(marks.counts, np.int64(index) * BINS)
        temperature, k, top_p, min_p, greedy, good = limits_of(bounds, rows, index, vocabulary)
        top = top_of(marks, index)
        top = np.uint32(top + np.uint32(1 if top == negative_zero else 0))
        need = need_of(k, top_p, min_p, greedy)
        bound(marks.counts, np.int64(index) * BINS, first, max(need, np.int32(1)), shared)
        clear(marks.counts, np.int64(index) * BINS)
        if not (minus_inf < top < plus_inf and good):
            if cuda.threadIdx.x == 0:
                rows.status[index], rows.greedy[index] = _INVALID, np.uint8(0)
                rows.maximum[index], rows.cutoff[index] = np.float32(np.nan), np.float32(np.nan)
                rows.count[index], rows.total[index], rows.argmax[index] = 0, 0, -1
            nothing = np.float32(np.nan)
            return Policy(
                False, False, np.int32(0), np.int32(-1), np.int64(0), nothing, nothing, temperature, nothing, nothing
            )  # fmt: skip
        size, base = gather(row, prefetched, need, known_base, shared)
        maximum = np.float32(value_of(top) + np.float32(0.0))  # never -0.0
        cutoff, scale = maximum, Scale(maximum, np.float32(1.0), np.float32(0.0))
        if not greedy:
            c_hi, c_lo = split_scale(temperature)
            scale = Scale(maximum, np.float32(c_hi), np.float32(c_lo))
            cutoff = max(np.float32(LOWEST), np.float32(min_p_cutoff(maximum, temperature, min_p)))
            if known_base != 0:
                cutoff = max(cutoff, known_cutoff)
            elif k > 0 or top_p < np.float32(1.0):
                kept, known, last = np.uint32(0), False, k == 0 and size < 0
                while True:
                    if last:  # what was gathered doesn't hold the crossing
                        size, base = np.int32(-1), np.uint32(minus_inf + 1)
                    kept, known = cut(row, size, base, top, k, top_p, bounds.joint, mass, scale, shared, scratch64)
                    if known or last:
                        break
                    last = True
                if known:
                    cutoff = max(cutoff, value_of(kept))
            if k == 0 and cutoff < value_of(base):
                size = np.int32(-1)  # more is kept than was gathered
        out = np.int64(index) * rows.capacity
        cuda.syncthreads()
        count, total, kept, arg = np.int32(0), np.int64(0), np.uint32(0), np.uint32(0)
        if size >= 0:
            count, total, kept, arg = finish_candidates(size, cutoff, scale, shared, scratch64, rows, out)
        if size < 0 or (count > rows.capacity and not greedy):  # readers walk a row that carries no entries by segments
            cuda.syncthreads()
            count, total, kept, arg = finish_row(
                row, cutoff, scale, shared, scratch64, rows.segments, np.int64(index) * rows.num_segments
            )
            if count <= rows.capacity and not greedy:
                write_row(row, kept, cutoff, scale, shared, rows, out)
        if greedy:
            count, total, kept = np.int32(1), np.int64(ONE), top
        cutoff = write(index, out, greedy, count, total, kept, arg, maximum, rows)
        return Policy(
            True, greedy, count, np.int32(arg), total, cutoff, maximum, temperature, scale.c_hi, scale.c_lo
        )  # fmt: skip

    return pick


@lru_cache
def pick_kernel(name: str, scans: bool = False, threads: int = THREADS) -> Kernel:
    """The kernel for logits of this dtype; scans, and its grid: as of `row_of`."""
    row_of_block, pick = row_of(name, scans, False, threads), pick_of(name, threads)

    def pick_rows(logits, marks, bounds, rows):
        shared = cuda.shared.array(SHARED, int32)
        scratch64 = cuda.shared.array(SCRATCH64, int64)
        row = row_of_block(logits, marks, None, None, None, shared)
        if row >= 0:
            pick(row, np.int64(0), np.uint32(0), np.float32(0.0), logits, marks, bounds, rows, shared, scratch64)

    return Kernel(pick_rows, void(LOGITS, MARKS, FILTER, ROWS), threads, MAX_REGISTERS)

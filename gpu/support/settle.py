"""The settling kernel: rows whose kept set is certain without weighing them whole, one block each, as the pick does it.

It stands between the scan and the other kernels of gpu/support/whole.py and takes all rows, those that a top_k bounds
too: what it finds out is what the pick would. It leaves to them what would have to be walked, or what depends on more
than the estimate tells: the crossing of top-p for the least that the row can weigh is the crossing for all that it can
weigh if what is kept weighs top_p of the most, for

    mass(> x) < top_p * low <= top_p * mass <= top_p * high <= mass(>= x)
"""

from functools import lru_cache
from typing import Any

import numpy as np
from numba import cuda, int32, int64, void

from gpu.device.instructions import add_at
from gpu.device.launch import Kernel
from gpu.device.rows import LOGITS, open_row
from gpu.device.vectors import format_of
from gpu.support.bins import BINS
from gpu.support.cutoffs import mass_limit, min_p_cutoff
from gpu.support.estimate import mass_between_of, needs_mass
from gpu.support.finish import finish_of
from gpu.support.gather import SHARED, gather_of
from gpu.support.levels import Scale
from gpu.support.limits import FILTER, limits_of
from gpu.support.marks import MARKS
from gpu.support.pick import MAX_REGISTERS, SCRATCH64, THREADS, need_of, steps_of
from gpu.support.policy import ROWS
from gpu.support.scan import row_of
from gpu.support.whole import SETTLED, SUMS, TOTAL, WHOLE, top_of
from gpu.weights import HOTTEST, LOWEST, ONE, split_scale

_FEW = 256  # candidates that are looked at first
_NOT_YET, _SETTLED, _NEVER = range(3)


@lru_cache
def settle_of(name: str, threads: int) -> Any:
    """A device function for logits of this dtype: (index, logits, marks, bounds, rows, whole, shared, scratch64).

    Returns whether the row is settled: then it stands in `rows`, entries and all. shared, scratch64: as of `pick_of`.
    """
    form = format_of(name)
    granule, value_of, negative_zero = 2 * form.lanes, form.value, np.uint32(form.negative_zero)
    minus_inf, plus_inf = form.minus_inf, form.plus_inf
    maxima_of, first_counts, bound, _, _, _, _ = gather_of(name, threads)
    gather, cut, write = steps_of(name, threads)
    finish_candidates, mass_between = finish_of(name, threads).candidates, mass_between_of(name)

    @cuda.jit(device=True)
    def try_with(need, index, row, limits, top, scale, low, high, marks, bounds, rows, shared, scratch64):
        # Among the row's largest, `need` of them or a few more: whether it is settled, or may be with more.
        k, top_p, greedy = limits.k, limits.top_p, limits.greedy
        prefetched, first = maxima_of(row, 0), first_counts(marks.counts, np.int64(index) * BINS)
        bound(marks.counts, np.int64(index) * BINS, first, need, shared)
        size, base = gather(row, prefetched, need, np.uint32(0), shared)
        if size < 0:
            return _NEVER
        cutoff, kept = scale.maximum, np.uint32(0)
        if not greedy:
            cutoff = max(np.float32(LOWEST), np.float32(min_p_cutoff(scale.maximum, limits.temperature, limits.min_p)))
            if k > 0 or top_p < np.float32(1.0):
                kept, known = cut(row, size, base, top, k, top_p, bounds.joint, low, scale, shared, scratch64)
                if not known:
                    return _NOT_YET
                cutoff = max(cutoff, value_of(kept))
            if k == 0 and cutoff < value_of(base):
                return _NOT_YET  # more is kept than was gathered
        out = np.int64(index) * rows.capacity
        cuda.syncthreads()
        count, total, least, arg = finish_candidates(size, cutoff, scale, shared, scratch64, rows, out)
        if greedy:
            count, total, least = np.int32(1), np.int64(ONE), top
        elif count > rows.capacity:
            return _NEVER
        cut_last = low > 0 and not greedy and not (0 < k <= count or cutoff > value_of(kept))  # by top-p
        if cut_last and np.float64(total) < mass_limit(top_p, high):
            return _NEVER
        write(index, out, greedy, count, total, least, arg, scale.maximum, rows)
        return _SETTLED

    @cuda.jit(device=True)
    def settle(index, logits, marks, bounds, rows, whole, shared, scratch64):
        row = open_row(logits, index, granule, marks.maxima, marks.stride)
        limits = limits_of(bounds, rows, index, logits.vocabulary)
        k, top_p, greedy = limits.k, limits.top_p, limits.greedy
        need = need_of(k, top_p, limits.min_p, greedy)
        top = top_of(marks, index)
        top = np.uint32(top + np.uint32(1 if top == negative_zero else 0))
        if need == 0 or not (minus_inf < top < plus_inf and limits.good):
            return False
        maximum = np.float32(value_of(top) + np.float32(0.0))  # never -0.0
        scale, low, high = Scale(maximum, np.float32(1.0), np.float32(0.0)), np.int64(0), np.int64(0)
        if not greedy:
            c_hi, c_lo = split_scale(limits.temperature)
            scale = Scale(maximum, np.float32(c_hi), np.float32(c_lo))
            if top_p < np.float32(1.0) and (k == 0 or bounds.joint != 0):
                if needs_mass(limits, bounds.joint):
                    low, high = mass_between(marks, whole.estimates, index, scale)
                if low == 0:
                    return False
        looked_at = min(need, np.int32(_FEW)) if k == 0 and not greedy else need  # most supports are small
        found = _NOT_YET
        while found == _NOT_YET and looked_at <= need:
            found = try_with(
                looked_at, index, row, limits, top, scale, low, high, marks, bounds, rows, shared, scratch64
            )
            looked_at = need if looked_at < need else np.int32(need + 1)
            cuda.syncthreads()
        return found == _SETTLED

    return settle


@cuda.jit(device=True)
def is_weighed(limits, joint):
    """Whether a row that isn't settled is weighed by many blocks."""
    whole = limits.k == 0 or (joint != 0 and limits.top_p < np.float32(1.0))
    return whole and limits.good and not limits.greedy and limits.temperature <= np.float32(HOTTEST)


@lru_cache
def settle_kernel(name: str, scans: bool = False, threads: int = THREADS) -> Kernel:
    """The kernel for logits of this dtype; scans, and its grid: as of `row_of`."""
    row_of_block = row_of(name, scans, True, threads)
    settle, clear = settle_of(name, threads), gather_of(name, threads).clear

    def settle_rows(logits, marks, bounds, rows, whole):
        shared = cuda.shared.array(SHARED, int32)
        scratch64 = cuda.shared.array(SCRATCH64, int64)
        index = row_of_block(logits, marks, bounds, rows, whole, shared)
        if index < 0:
            return
        settled = settle(index, logits, marks, bounds, rows, whole, shared, scratch64)
        if settled:
            clear(marks.counts, np.int64(index) * BINS)
        if cuda.threadIdx.x == 0:
            if settled:
                whole.sums[np.int64(index) * SUMS + TOTAL] = SETTLED
            elif is_weighed(limits_of(bounds, rows, index, logits.vocabulary), bounds.joint):
                whole.listed[1 + add_at(whole.listed, np.int64(0), np.int32(1))] = index

    return Kernel(settle_rows, void(LOGITS, MARKS, FILTER, ROWS, WHOLE), threads, MAX_REGISTERS)

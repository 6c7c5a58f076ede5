"""The weighing kernel: of every row that has to be weighed whole, its chunks; whoever is last, the row.

It reads the last rows first: those are what the scan has left in the cache. As a rule there is no row to weigh and all
blocks leave at once, which takes their number's time: where there are many, each takes a larger piece.
"""

from functools import lru_cache
from typing import Any, NamedTuple

import numpy as np
from numba import cuda, int32, int64, void

from gpu.device.block import WARP, warp_sum64
from gpu.device.instructions import add_at, load_kept, take_ticket, warp_min_u32, warp_sum_s32
from gpu.device.launch import Kernel
from gpu.device.rows import LOGITS, row_start
from gpu.device.vectors import cut_of, format_of, in_row
from gpu.support.cutoffs import min_p_cutoff
from gpu.support.levels import Scale
from gpu.support.limits import FILTER, limits_of
from gpu.support.marks import MARKS
from gpu.support.policy import ROWS
from gpu.support.scan import LOADS, THREADS
from gpu.support.whole import (
    COUNT,
    DONE,
    FIRST,
    HIGH,
    LEAST,
    LOW,
    PARTS,
    SUMS,
    TOTAL,
    WHOLE,
    piece_of,
    place_of,
    top_of,
)
from gpu.support.window import BINS_A_POWER, EVERY, TALLIED, window_of
from gpu.weights import LOWEST, least_difference, split_scale, weight_of_difference

MAX_REGISTERS = 40  # three blocks a multiprocessor
_NONE = 0xFFFFFFFF


class Task(NamedTuple):
    """What a block does with its chunk."""

    interior: Any  # bool: all of it belongs to the row
    guesses: Any  # bool: a tally is made
    vocabulary: Any


@lru_cache
def weigh_kernel(name: str, threads: int = THREADS) -> Kernel:
    """The kernel for logits of this dtype; its grid is (pieces * rows,), a piece of a row being some of its chunks."""
    form, window, cut = format_of(name), window_of(name, threads), cut_of(name)
    lanes, decode, only, value_of, key_of_value = form.lanes, form.decode, form.only, form.value, form.key_of_value
    minus_inf, plus_inf = form.minus_inf, form.plus_inf
    warps, vector_a_thread, granule, of_warps = threads // WARP, threads * lanes, 2 * lanes, PARTS * WARP
    infinity = np.float32(np.inf)

    @cuda.jit(device=True)
    def reduced(mass, number, least, first):
        # Of the warp.
        return warp_sum64(mass), warp_sum_s32(number), warp_min_u32(least), warp_min_u32(first)

    @cuda.jit(device=True)
    def store(to, at, mass, number, least, first):
        to[at + TOTAL], to[at + COUNT] = mass, np.int64(number)
        to[at + LEAST], to[at + FIRST] = np.int64(np.uint32(least)), np.int64(np.uint32(first))

    @cuda.jit(device=True)
    def gathered(source, at, number_of_parts):
        # The parts of others, by the first warp.
        mass, number, least, first = np.int64(0), np.int32(0), np.uint32(_NONE), np.uint32(_NONE)
        for i in range(cuda.laneid, number_of_parts, WARP):
            part = np.int64(at + np.int64(i) * PARTS)
            mass = np.int64(mass + source[part + TOTAL])
            number = np.int32(number + np.int32(source[part + COUNT]))
            least = min(least, np.uint32(source[part + LEAST]))
            first = min(first, np.uint32(source[part + FIRST]))
        return reduced(mass, number, least, first)

    @cuda.jit(device=True)
    def keep(w0, w1, w2, w3, cutoff):
        # The vector with -inf in place of what is below the cutoff, how many aren't, and the least of these.
        least = decode(w0, w1, w2, w3, 0)
        for lane in range(1, lanes):
            least = min(least, decode(w0, w1, w2, w3, lane))
        if least >= cutoff:
            return w0, w1, w2, w3, np.int32(lanes), least
        mask, least = np.int32(0), infinity
        for lane in range(lanes):
            x = decode(w0, w1, w2, w3, lane)
            if x >= cutoff:
                mask = np.int32(mask | (1 << lane))
                least = min(least, x)
        w0, w1, w2, w3 = only(w0, w1, w2, w3, mask)
        return w0, w1, w2, w3, np.int32(cuda.popc(mask)), least

    @cuda.jit(device=True)
    def count(w0, w1, w2, w3, scale, tally):
        per_logit = np.float32(scale.c_hi * BINS_A_POWER)
        for lane in range(0, lanes, EVERY):
            distance = np.float32(np.float32(scale.maximum - decode(w0, w1, w2, w3, lane)) * per_logit)
            if distance < np.float32(TALLIED):
                cuda.atomic.add(tally, np.int32(distance), np.int32(1))

    @cuda.jit(device=True)
    def pair(words, place, i):
        # The thread's i-th vector and the next; anything beyond the row.
        a0, a1, a2, a3 = np.uint32(0), np.uint32(0), np.uint32(0), np.uint32(0)
        b0, b1, b2, b3 = a0, a1, a2, a3
        if place.left >= i * WARP:
            a0, a1, a2, a3 = load_kept(words, np.int64(place.vector + i * WARP))
        if place.left >= (i + 1) * WARP:
            b0, b1, b2, b3 = load_kept(words, np.int64(place.vector + (i + 1) * WARP))
        return a0, a1, a2, a3, b0, b1, b2, b3

    @cuda.jit(device=True)
    def take(w0, w1, w2, w3, i, place, task, scale, cutoff, least_d, tally):
        # Mass, number and least of a vector; the i-th of this thread's.
        if not task.interior:
            w0, w1, w2, w3 = cut(w0, w1, w2, w3, np.int32(place.first + i * WARP * lanes), task.vocabulary)
        w0, w1, w2, w3, number, least = keep(w0, w1, w2, w3, cutoff)
        mass = np.int64(0)
        for lane in range(lanes):
            d = max(np.float32(decode(w0, w1, w2, w3, lane) - scale.maximum), least_d)
            mass = np.int64(mass + weight_of_difference(d, scale.c_hi, scale.c_lo))
        if task.guesses:
            count(w0, w1, w2, w3, scale, tally)
        return mass, number, least

    @cuda.jit(device=True)
    def holds(maximum, row, piece, chunks_a_piece, marks):
        # Whether the row's largest logit is in the piece.
        found = False
        for chunk in range(piece * chunks_a_piece, min((piece + 1) * chunks_a_piece, marks.chunks)):
            largest = np.uint32(marks.chunk_largest[np.int64(row) * marks.chunks + chunk])
            found = found or value_of(largest) == maximum
        return found

    @cuda.jit(device=True)
    def first_largest(words, place, per_thread, task, maximum):
        # The lowest token of the piece with the row's largest logit. Few hold one, so that they are read again.
        first = np.uint32(_NONE)
        for i in range(per_thread):
            at = np.int32(place.first + i * WARP * lanes)
            if place.left >= i * WARP:
                w0, w1, w2, w3 = load_kept(words, np.int64(place.vector + i * WARP))
                for lane in range(lanes):
                    if in_row(at, lane, task.vocabulary) and decode(w0, w1, w2, w3, lane) == maximum:
                        first = min(first, np.uint32(at + lane))
        return first

    def weigh(logits, marks, bounds, rows, whole, chunks_a_piece):
        tally = cuda.shared.array(TALLIED, int32)
        parts = cuda.shared.array(of_warps, int64)
        scratch64 = cuda.shared.array(WARP, int64)
        scratch32 = cuda.shared.array(WARP, int32)
        box = cuda.shared.array(4, int32)
        thread, vocabulary = np.int32(cuda.threadIdx.x), logits.vocabulary
        row, piece, pieces, chunks_a_piece = piece_of(marks, whole, chunks_a_piece)
        if row < 0:
            return
        limits = limits_of(bounds, rows, row, vocabulary)
        filters, alone = limits.top_p < np.float32(1.0), limits.k == 0
        start = row_start(logits, row)
        head = np.int32(start & np.int64(granule - 1))
        per_thread = np.int32(LOADS * chunks_a_piece)
        place = place_of(start, head, piece, per_thread, lanes, vocabulary)
        a0, a1, a2, a3, b0, b1, b2, b3 = pair(logits.words, place, 0)  # under way meanwhile
        top = top_of(marks, row)
        if not (minus_inf < top < plus_inf):
            return
        guesses = alone and filters
        if guesses:
            for i in range(thread, TALLIED, threads):
                tally[i] = 0
        cuda.syncthreads()
        maximum = np.float32(value_of(top) + np.float32(0.0))
        c_hi, c_lo = split_scale(limits.temperature)
        scale = Scale(maximum, np.float32(c_hi), np.float32(c_lo))
        least_d = np.float32(least_difference(scale.c_hi))
        cutoff = np.float32(LOWEST)
        if not filters:  # else what top-p keeps is cut, last
            cutoff = max(cutoff, np.float32(min_p_cutoff(maximum, limits.temperature, limits.min_p)))
        piece_size = np.int32(per_thread * vector_a_thread)
        begin = np.int32(piece * piece_size - head)
        interior = begin >= 0 and np.int32(begin + piece_size) <= vocabulary
        task = Task(interior, guesses, vocabulary)
        mass, number, least = np.int64(0), np.int32(0), infinity
        segment_at = np.int64(np.int64(row) * rows.num_segments)
        for i in range(0, per_thread, 2):
            mass_a, number_a, least_a = take(a0, a1, a2, a3, i, place, task, scale, cutoff, least_d, tally)
            mass_b, number_b, least_b = take(b0, b1, b2, b3, i + 1, place, task, scale, cutoff, least_d, tally)
            of_segment = warp_sum64(np.int64(mass_a + mass_b))
            segment = np.int32(place.granule // WARP + i // 2)
            if cuda.laneid == 0 and segment < rows.num_segments:
                rows.segments[segment_at + segment] = of_segment
            mass, number = np.int64(mass + of_segment), np.int32(number + number_a + number_b)
            least = min(least, min(least_a, least_b))
            if i + 2 < per_thread:
                a0, a1, a2, a3, b0, b1, b2, b3 = pair(logits.words, place, i + 2)
        first = np.uint32(_NONE)
        if holds(maximum, row, piece, chunks_a_piece, marks):
            first = first_largest(logits.words, place, per_thread, task, maximum)
        number, first = warp_sum_s32(number), warp_min_u32(first)
        lowest_key = warp_min_u32(np.uint32(key_of_value(least)))
        if cuda.laneid == 0:
            store(parts, np.int64((thread // WARP) * PARTS), mass, number, lowest_key, first)
        cuda.syncthreads()
        if thread < WARP:
            total, number, lowest_key, first = gathered(parts, np.int64(0), warps)
            if thread == 0:
                at_part = np.int64((np.int64(row) * pieces + piece) * PARTS)
                store(whole.parts, at_part, total, number, lowest_key, first)
        tally_at = np.int64(np.int64(row) * TALLIED)
        if guesses:
            for i in range(thread, TALLIED, threads):
                if tally[i] > 0:
                    add_at(whole.tally, np.int64(tally_at + i), np.int32(tally[i]))
        cuda.syncthreads()
        sums_at = np.int64(np.int64(row) * SUMS)
        if thread == 0:
            box[3] = np.int32(take_ticket(whole.sums, np.int64(sums_at + DONE)))
        cuda.syncthreads()
        if box[3] != pieces - 1:
            return
        if thread < WARP:
            total, number, lowest_key, first = gathered(whole.parts, np.int64(np.int64(row) * pieces * PARTS), pieces)
            if thread == 0:
                store(whole.sums, sums_at, total, number, lowest_key, first)
                parts[0] = total
        cuda.syncthreads()
        if guesses:
            low, high = window(whole.tally, tally_at, parts[0], limits.top_p, top, scale, box, scratch32, scratch64)
            cuda.syncthreads()
            for i in range(thread, TALLIED, threads):
                whole.tally[tally_at + i] = 0
            if thread == 0:
                whole.sums[sums_at + LOW], whole.sums[sums_at + HIGH] = np.int64(low), np.int64(high)

    return Kernel(weigh, void(LOGITS, MARKS, FILTER, ROWS, WHOLE, int32), threads, MAX_REGISTERS)

"""The narrowing kernel: of every row with a window, what lies above it and what in it."""

from functools import lru_cache

import numpy as np
from numba import cuda, int32, int64, void

from gpu.device.block import FULL, WARP, warp_prefix32, warp_sum64
from gpu.device.instructions import add_at, load_four, warp_sum_s32
from gpu.device.launch import Kernel
from gpu.device.rows import LOGITS, row_start
from gpu.device.vectors import format_of, in_row
from gpu.support.marks import MARKS
from gpu.support.policy import ROWS
from gpu.support.scan import LOADS, THREADS
from gpu.support.whole import (
    ABOVE,
    HIGH,
    LOW,
    NUM_ABOVE,
    NUM_INSIDE,
    SUMS,
    WHOLE,
    further,
    piece_of,
    place_of,
    top_of,
    vector_of,
)
from gpu.weights import least_difference, split_scale, weight_of_difference

MAX_REGISTERS = 40  # three blocks a multiprocessor


@lru_cache
def narrow_kernel(name: str, threads: int = THREADS) -> Kernel:
    """The kernel for logits of this dtype; its grid is weigh_kernel's."""
    form, load = format_of(name), load_four(WARP)
    lanes, decode, reaching, key_of, value_of = form.lanes, form.decode, form.reaching, form.key, form.value
    warps, chunk_size, granule = threads // WARP, LOADS * threads * lanes, 2 * lanes
    all_lanes, of_warps = (1 << lanes) - 1, 2 * WARP

    @cuda.jit(device=True)
    def mass_of(w0, w1, w2, w3, mask, maximum, least_d, c_hi, c_lo):
        mass = np.int64(0)
        while mask != 0:
            lane = np.int32(cuda.ffs(mask) - 1)
            mask = np.int32(mask & np.int32(mask - 1))
            d = max(np.float32(decode(w0, w1, w2, w3, lane) - maximum), least_d)
            mass = np.int64(mass + weight_of_difference(d, c_hi, c_lo))
        return mass

    @cuda.jit(device=True)
    def append(words, place, mask, row, whole):
        # The elements in the window, wherever there is room: their order is nobody's.
        own = np.int32(cuda.popc(mask))
        through = warp_prefix32(own)
        in_all = np.int32(cuda.shfl_sync(FULL, through, WARP - 1))
        if in_all == 0:
            return
        base = np.int32(0)
        if cuda.laneid == 0:
            base = np.int32(add_at(whole.sums, np.int64(np.int64(row) * SUMS + NUM_INSIDE), np.int64(in_all)))
        base = np.int32(cuda.shfl_sync(FULL, base, 0))
        to = np.int32(base + through - own)
        keys_at = np.int64(np.int64(row) * 2 * whole.room)
        ids_at = np.int64(keys_at + whole.room)
        while mask != 0 and to < whole.room:
            bit = np.int32(cuda.ffs(mask) - 1)
            mask = np.int32(mask & np.int32(mask - 1))
            i, lane = np.int32(bit // lanes), np.int32(bit % lanes)
            w0, w1, w2, w3 = vector_of(words, i)
            whole.inside[keys_at + to] = np.int32(key_of(w0, w1, w2, w3, lane))
            whole.inside[ids_at + to] = np.int32(place.first + i * WARP * lanes + lane)
            to = np.int32(to + 1)

    def narrow(logits, marks, rows, whole, chunks_a_piece):
        scratch = cuda.shared.array(of_warps, int64)
        thread, vocabulary = np.int32(cuda.threadIdx.x), logits.vocabulary
        row, piece, _, chunks_a_piece = piece_of(marks, whole, chunks_a_piece)
        if row < 0:
            return
        sums_at = np.int64(np.int64(row) * SUMS)
        low, high = np.uint32(whole.sums[sums_at + LOW]), np.uint32(whole.sums[sums_at + HIGH])
        if low == 0:
            return
        beyond = np.uint32(high + np.uint32(1))
        start = row_start(logits, row)
        head = np.int32(start & np.int64(granule - 1))
        place = place_of(start, head, piece, np.int32(LOADS * chunks_a_piece), lanes, vocabulary)
        maximum = np.float32(value_of(top_of(marks, row)) + np.float32(0.0))
        c_hi, c_lo = split_scale(rows.temperature[row])
        c_hi, c_lo = np.float32(c_hi), np.float32(c_lo)
        least_d = np.float32(least_difference(c_hi))
        piece_size = np.int32(chunks_a_piece * chunk_size)
        begin = np.int32(piece * piece_size - head)
        interior = begin >= 0 and np.int32(begin + piece_size) <= vocabulary
        mass, segment, number = np.int64(0), np.int64(0), np.int32(0)
        segments_at = np.int64(np.int64(row) * rows.num_segments)
        for _ in range(chunks_a_piece):
            words, inside = load(logits.words, place.vector, place.left), np.int32(0)
            for i in range(LOADS):
                w0, w1, w2, w3 = vector_of(words, i)
                reach = np.int32(reaching(w0, w1, w2, w3, low))
                above = np.int32(reaching(w0, w1, w2, w3, beyond))
                if not interior:
                    first, valid = np.int32(place.first + i * WARP * lanes), np.int32(0)
                    for lane in range(lanes):
                        if in_row(first, lane, vocabulary):
                            valid = np.int32(valid | (1 << lane))
                    reach, above = np.int32(reach & valid), np.int32(above & valid)
                reach = np.int32(reach & ~above & all_lanes)
                inside = np.int32(inside | np.int32(reach << np.int32(i * lanes)))
                number = np.int32(number + cuda.popc(above))
                segment = np.int64(segment + mass_of(w0, w1, w2, w3, above, maximum, least_d, c_hi, c_lo))
                if i & 1:
                    mass = np.int64(mass + segment)
                    segment = warp_sum64(segment)
                    at = np.int32(place.granule // WARP + i // 2)
                    if cuda.laneid == 0 and at < rows.num_segments:
                        rows.segments[segments_at + at] = segment
                    segment = np.int64(0)
            append(words, place, inside, row, whole)
            place = further(place, np.int32(LOADS * WARP), lanes)
        mass, number = warp_sum64(mass), warp_sum_s32(number)
        if cuda.laneid == 0:
            scratch[np.uint32(thread // WARP)] = mass
            scratch[np.uint32(WARP + thread // WARP)] = np.int64(number)
        cuda.syncthreads()
        if thread < WARP:
            mass, in_all = np.int64(0), np.int64(0)
            if thread < warps:
                mass, in_all = np.int64(scratch[thread]), np.int64(scratch[WARP + thread])
            mass, in_all = warp_sum64(mass), warp_sum64(in_all)
            if thread == 0:
                add_at(whole.sums, np.int64(sums_at + ABOVE), mass)
                add_at(whole.sums, np.int64(sums_at + NUM_ABOVE), in_all)

    return Kernel(narrow, void(LOGITS, MARKS, ROWS, WHOLE, int32), threads, MAX_REGISTERS)

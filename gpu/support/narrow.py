"""The narrowing kernel: of every row with a window, what lies above it and what in it."""

from functools import lru_cache

import numpy as np
from numba import cuda, int64, void

from gpu.device.block import FULL, WARP, warp_prefix32, warp_sum64
from gpu.device.instructions import add_at, load_four, warp_sum_s32
from gpu.device.launch import Kernel
from gpu.device.rows import LOGITS, row_start
from gpu.device.vectors import format_of, in_row
from gpu.support.marks import MARKS
from gpu.support.policy import ROWS
from gpu.support.scan import LOADS, THREADS
from gpu.support.whole import ABOVE, HIGH, LOW, NUM_ABOVE, NUM_INSIDE, SUMS, WHOLE, place_of, top_of, vector_of
from gpu.weights import least_difference, split_scale, weight_of_difference

MAX_REGISTERS = 40  # three blocks a multiprocessor


@lru_cache
def narrow_kernel(name: str, threads: int = THREADS) -> Kernel:
    """The kernel for logits of this dtype; its grid is the scan's, (chunks * rows,)."""
    form, load = format_of(name), load_four(WARP)
    lanes, decode, reaching, key_of, value_of = form.lanes, form.decode, form.reaching, form.key, form.value
    warps, chunk_vectors = threads // WARP, LOADS * threads
    chunk_size, granule = chunk_vectors * lanes, 2 * lanes
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

    def narrow(logits, marks, rows, whole):
        scratch = cuda.shared.array(of_warps, int64)
        thread, vocabulary, chunks = np.int32(cuda.threadIdx.x), logits.vocabulary, marks.chunks
        row = np.int32(np.uint32(cuda.blockIdx.x) // np.uint32(chunks))
        chunk = np.int32(cuda.blockIdx.x - row * chunks)
        sums_at = np.int64(np.int64(row) * SUMS)
        low, high = np.uint32(whole.sums[sums_at + LOW]), np.uint32(whole.sums[sums_at + HIGH])
        if low == 0:
            return
        beyond = np.uint32(high + np.uint32(1))
        start = row_start(logits, row)
        head = np.int32(start & np.int64(granule - 1))
        place = place_of(start, head, chunk_vectors, chunk, lanes, vocabulary)
        words = load(logits.words, place.vector, place.left)
        maximum = np.float32(value_of(top_of(marks, row)) + np.float32(0.0))
        c_hi, c_lo = split_scale(rows.temperature[row])
        c_hi, c_lo = np.float32(c_hi), np.float32(c_lo)
        least_d = np.float32(least_difference(c_hi))
        begin = np.int32(chunk * chunk_size - head)
        interior = begin >= 0 and np.int32(begin + chunk_size) <= vocabulary
        mass, segment, number, inside = np.int64(0), np.int64(0), np.int32(0), np.int32(0)
        segments_at = np.int64(np.int64(row) * rows.num_segments)
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

    return Kernel(narrow, void(LOGITS, MARKS, ROWS, WHOLE), threads, MAX_REGISTERS)

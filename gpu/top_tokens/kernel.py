"""The kernel of the most probable tokens: a block a row.

1  bound    the k-th largest of the stored maxima: at least k elements reach it, rarely many more
2  gather   the elements that reach it and the cutoff; of a support with entries, those
3  order    a sort of them in shared memory; the first k are written

A row with more candidates than fit finds its k-th largest element by counting, and gathers what reaches that.
"""

from functools import lru_cache

import numpy as np
from numba import cuda, float32, int32, int64, void

from gpu.device.block import WARP
from gpu.device.instructions import warp_max_u32
from gpu.device.launch import Kernel, pointer_to
from gpu.device.rows import LOGITS, open_row, row_start
from gpu.device.vectors import element_of, format_of
from gpu.support.marks import MARKS
from gpu.support.policy import ROWS, log_probability_under, log_scale, open_policy
from gpu.top_tokens.entries import ROOM, entries_of, entry_of, token_of
from gpu.top_tokens.search import SHARED, search_of

THREADS = 256
_POSITIVE_ZERO, _NEGATIVE_ZERO = np.uint32(0x8000), np.uint32(0x7FFF)  # stored maxima
_COARSE = 4  # eights of granules for each wanted element, from which on their maxima bound it well


@lru_cache
def top_kernel(name: str, wide_rows: bool, threads: int = THREADS, max_registers: int = 80) -> Kernel:
    """The kernel for logits of this dtype and rows int64 or int32; its grid is (number of rows asked for,)."""
    form, element = format_of(name), element_of(name)
    granule, to_stored, lowest = 2 * form.lanes, np.uint32(form.bits - 16), np.uint32(form.minus_inf + 1)
    negative_zero = np.uint32(form.negative_zero)
    search, ways = search_of(name, threads), entries_of(name, threads)
    search_maximum, search_element = search.maximum, search.element
    stored, reaching, largest, sort = ways.stored, ways.reaching, ways.largest, ways.sort

    @cuda.jit(device=True)
    def row_top(marks, index):
        # The largest key of a row, as the search takes it.
        top = np.uint32(0)
        for i in range(cuda.laneid, marks.chunks, WARP):
            top = max(top, np.uint32(marks.chunk_largest[index * marks.chunks + i]))
        top = warp_max_u32(top)
        return np.uint32(top + np.uint32(1 if top == negative_zero else 0))

    @cuda.jit(device=True)
    def gather(row, top, need, cutoff, entries, shared):
        # At least the `need` largest elements of the row, and nothing below its cutoff; how many.
        coarse = _COARSE * 8 * need <= row.num_granules
        least, _ = search_maximum(
            row, need, np.uint32(lowest >> to_stored), np.uint32(top >> to_stored), coarse, shared
        )
        if least == _POSITIVE_ZERO:  # the two zeros are one value
            least = _NEGATIVE_ZERO
        size = reaching(row, least, cutoff, entries, shared)
        if size > ROOM:
            cuda.syncthreads()
            key, above = search_element(row, need, lowest, top, False, shared)
            size = largest(row, key, np.int32(need - above), cutoff, entries, shared)
        return size

    def top_tokens(logits, support, marks, rows, num_rows, k, out_ids, out_logprobs):
        shared = cuda.shared.array(SHARED, int32)
        entries = cuda.shared.array(ROOM, int64)
        thread, out, index = cuda.threadIdx.x, np.int64(cuda.blockIdx.x) * k, np.int64(rows[cuda.blockIdx.x])
        size = np.int32(0)
        if 0 <= index < num_rows and support.status[index] == 0:
            found = np.int32(support.count[index])
            size = min(np.int32(k), found)
            start = row_start(logits, index)
            if support.greedy[index] != 0:
                if thread == 0:
                    entries[0] = entry_of(support.maximum[index], support.argmax[index])
            elif found <= support.capacity and found <= ROOM:
                stored(logits.words, start, found, support.token_ids, index * support.capacity, entries)
            else:
                row = open_row(logits, index, granule, marks.maxima, marks.stride)
                found = gather(row, row_top(marks, index), size, support.cutoff[index], entries, shared)
            sort(entries, found)
            size = min(size, found)
            # Opened here, not to keep its fields through the sort.
            policy = open_policy(support, index)
            scale = log_scale(policy)
            for place in range(thread, size, threads):
                token = token_of(entries[place])
                x = element(logits.words, np.int64(start + token))
                out_ids[out + place] = token
                out_logprobs[out + place] = log_probability_under(policy, x, scale)
        for place in range(size + thread, k, threads):
            out_ids[out + place] = -1
            out_logprobs[out + place] = np.float32(-np.inf)

    signature = void(
        LOGITS, ROWS, MARKS, pointer_to(int64 if wide_rows else int32), int32, int32, pointer_to(int32),
        pointer_to(float32),
    )  # fmt: skip
    return Kernel(top_tokens, signature, threads, max_registers)

"""The kernel of the most probable tokens: a block a row.

1  bound    the k-th largest of the stored maxima: at least k elements reach it, rarely many more
2  gather   the elements that reach it and the cutoff; of a support with entries, those
3  order    a sort of them in shared memory; the first k are written

A row with more candidates than fit finds its k-th largest element by counting, and gathers what reaches that.
"""

from functools import lru_cache

import numpy as np
from numba import cuda, float32, int32, int64, types, void

from gpu.device.block import WARP
from gpu.device.instructions import warp_max_u32
from gpu.device.launch import LOGIT_TYPES, Kernel, pointer_to
from gpu.device.rows import open_row
from gpu.device.vectors import element_of, format_of, row_start
from gpu.support.policy import SUPPORT_TYPES, log_probability_under, log_scale, open_policy
from gpu.top_tokens.entries import ROOM, entries_of, entry_of, token_of
from gpu.top_tokens.search import SHARED, search_of

THREADS = 256
MAX_K = ROOM // 2  # candidates outnumber k
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
    def row_top(chunk_largest, at, chunks):
        # The largest key of a row, as the search takes it.
        top = np.uint32(0)
        for i in range(cuda.laneid, chunks, WARP):
            top = max(top, np.uint32(chunk_largest[at + i]))
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

    def top_tokens(
        words, skew, width, request_step, row_step, vocabulary,
        status, maximum, cutoff, total, count, argmax, greedy, temperature, token_ids, weights, segments, capacity,
        num_segments,
        maxima, stride, chunk_largest, chunks, rows, num_rows, k, out_ids, out_logprobs,
    ):  # fmt: skip
        shared = cuda.shared.array(SHARED, int32)
        entries = cuda.shared.array(ROOM, int64)
        thread, out, index = cuda.threadIdx.x, np.int64(cuda.blockIdx.x) * k, np.int64(rows[cuda.blockIdx.x])
        size = np.int32(0)
        if 0 <= index < num_rows and status[index] == 0:
            found = np.int32(count[index])
            size = min(np.int32(k), found)
            start = row_start(index, width, request_step, row_step, skew)
            if greedy[index] != 0:
                if thread == 0:
                    entries[0] = entry_of(maximum[index], argmax[index])
            elif found <= capacity and found <= ROOM:
                stored(words, start, found, token_ids, index * capacity, entries)
            else:
                row = open_row(index, words, skew, width, request_step, row_step, vocabulary, maxima, stride, granule)
                top = row_top(chunk_largest, index * chunks, chunks)
                found = gather(row, top, size, cutoff[index], entries, shared)
            sort(entries, found)
            size = min(size, found)
            # Opened here, not to keep its fields through the sort.
            policy = open_policy(index, status, maximum, cutoff, total, count, argmax, greedy, temperature)
            scale = log_scale(policy)
            for place in range(thread, size, threads):
                token = token_of(entries[place])
                x = element(words, np.int64(start + token))
                out_ids[out + place] = token
                out_logprobs[out + place] = log_probability_under(policy, x, scale)
        for place in range(size + thread, k, threads):
            out_ids[out + place] = -1
            out_logprobs[out + place] = np.float32(-np.inf)

    signature = void(
        *LOGIT_TYPES, *SUPPORT_TYPES,
        pointer_to(types.uint32), int32, pointer_to(types.uint32), int32, pointer_to(int64 if wide_rows else int32),
        int32, int32, pointer_to(int32), pointer_to(float32),
    )  # fmt: skip
    return Kernel(top_tokens, signature, threads, max_registers)

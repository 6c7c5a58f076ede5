"""Packing on a device: a block writes the mask of one row, at a place that it is given."""

from functools import lru_cache
from typing import Any

import numpy as np
from numba import cuda

from gpu.device.block import block_of
from gpu.device.instructions import load_kept
from gpu.device.policy import log_probability_under
from gpu.device.rows import open_row
from gpu.device.vectors import element_of, format_of, in_row, row_start


@lru_cache
def pack_of(name: str, threads: int) -> Any:
    """A device function that packs one row, for logits of this dtype.

    (policy, row, words, skew, width, request_step, row_step, vocabulary, token_ids, capacity, out_ids, out_logprobs,
    at, shared): row counts from 0; shared: int32, an element for each warp.
    """
    form, block = format_of(name), block_of(threads)
    lanes, key_of, value_of = form.lanes, form.key, form.value
    element, prefix32 = element_of(name), block.prefix32
    granule = 2 * lanes

    @cuda.jit(device=True)
    def pack_entries(words, start, policy, scale, token_ids, entries_at, out_ids, out_logprobs, at):
        for i in range(cuda.threadIdx.x, policy.count, threads):
            token = np.int32(token_ids[entries_at + i])
            x = element(words, np.int64(start + token))
            out_ids[at + i] = token
            out_logprobs[at + i] = log_probability_under(policy, x, scale)

    @cuda.jit(device=True)
    def pack_walked(row, policy, scale, out_ids, out_logprobs, at, shared):
        for begin in range(0, 2 * row.num_granules, threads):
            vector = np.int32(begin + cuda.threadIdx.x)
            mask, first = np.int32(0), np.int32(vector * lanes - row.head)
            w0, w1, w2, w3 = np.uint32(0), np.uint32(0), np.uint32(0), np.uint32(0)
            if vector < 2 * row.num_granules:
                w0, w1, w2, w3 = load_kept(row.words, np.int64(row.first_vector + vector))
                for lane in range(lanes):
                    value = value_of(key_of(w0, w1, w2, w3, lane))
                    if value >= policy.cutoff and in_row(first, lane, row.vocabulary):
                        mask |= np.int32(1 << lane)
            before, total = prefix32(np.int32(cuda.popc(mask)), shared)
            to = np.int64(at + before)
            while mask != 0:
                lane = np.int32(cuda.ffs(mask) - 1)
                mask = np.int32(mask & np.int32(mask - 1))
                out_ids[to] = np.int32(first + lane)
                value = value_of(key_of(w0, w1, w2, w3, lane))
                out_logprobs[to] = log_probability_under(policy, value, scale)
                to = np.int64(to + 1)
            at = np.int64(at + total)
            cuda.syncthreads()

    @cuda.jit(device=True)
    def pack_row(
        policy, scale, index, words, skew, width, request_step, row_step, vocabulary, token_ids, capacity,
        out_ids, out_logprobs, at, shared,
    ):  # fmt: skip
        if policy.count <= capacity:
            start = row_start(index, width, request_step, row_step, skew)
            pack_entries(words, start, policy, scale, token_ids, np.int64(index) * capacity, out_ids, out_logprobs, at)
        else:
            row = open_row(index, words, skew, width, request_step, row_step, vocabulary, words, 0, granule)
            pack_walked(row, policy, scale, out_ids, out_logprobs, at, shared)

    return pack_row

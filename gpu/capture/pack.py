"""Packing on a device: where masks go, and how a block writes the mask of one row there."""

from functools import lru_cache
from typing import Any, NamedTuple

import numpy as np
from numba import cuda, float32, int32, int64, types

from gpu.device.block import block_of
from gpu.device.instructions import load_kept
from gpu.device.launch import pointer_to, record_of
from gpu.device.rows import row_without_maxima
from gpu.device.vectors import format_of, in_row
from gpu.support.policy import log_probability_under


class Captures(NamedTuple):
    """What capture reads, and a Capture as kernels take it: pointers to the arrays of that name."""

    wanted: Any  # bool [B]
    max_support: Any
    room: Any  # entries
    status: Any
    failed_row: Any
    counts: Any
    row_start: Any
    offsets: Any
    token_ids: Any
    logprobs: Any
    progress: Any  # int64, zero between launches: see gpu/capture/request.py


CAPTURES = record_of(
    Captures,
    pointer_to(types.uint8), int32, int64, pointer_to(types.uint8), pointer_to(int32), pointer_to(int32),
    pointer_to(int64), pointer_to(int64), pointer_to(int32), pointer_to(float32), pointer_to(int64),
)  # fmt: skip


@lru_cache
def walk_of(name: str, threads: int) -> Any:
    """A device function that packs a row by walking it, for one that carries no entries.

    (row, policy, scale, out_ids, out_logprobs, at, scratch): scratch is shared int32, an element for each warp.
    """
    form, prefix32 = format_of(name), block_of(threads).prefix32
    lanes, decode = form.lanes, form.decode

    @cuda.jit(device=True)
    def vector_at(row, vector):
        if vector < 2 * row.num_granules:
            return load_kept(row.words, np.int64(row.first_vector + vector))
        return np.uint32(0), np.uint32(0), np.uint32(0), np.uint32(0)

    @cuda.jit(device=True)
    def pack_walked(row, policy, scale, out_ids, out_logprobs, at, shared):
        following = vector_at(row, cuda.threadIdx.x)
        for begin in range(0, 2 * row.num_granules, threads):
            vector = np.int32(begin + cuda.threadIdx.x)
            mask, first = np.int32(0), np.int32(vector * lanes - row.head)
            w0, w1, w2, w3 = following
            following = vector_at(row, vector + threads)  # under way while these are written
            if vector < 2 * row.num_granules:
                for lane in range(lanes):
                    if decode(w0, w1, w2, w3, lane) >= policy.cutoff and in_row(first, lane, row.vocabulary):
                        mask |= np.int32(1 << lane)
            before, total = prefix32(np.int32(cuda.popc(mask)), shared)
            to = np.int64(at + before)
            while mask != 0:
                lane = np.int32(cuda.ffs(mask) - 1)
                mask = np.int32(mask & np.int32(mask - 1))
                out_ids[to] = np.int32(first + lane)
                out_logprobs[to] = log_probability_under(policy, decode(w0, w1, w2, w3, lane), scale)
                to = np.int64(to + 1)
            at = np.int64(at + total)
            cuda.syncthreads()

    return pack_walked


@lru_cache
def pack_of(name: str, threads: int) -> Any:
    """Two device functions that pack one row, for logits of this dtype; `index` counts rows from 0.

    (policy, scale, index, rows, wanted) -> first entry
    (first entry, policy, scale, index, logits, rows, captures, at, shared): writes all from `at` on; shared: int32, an
    element for each warp
    """
    granule, pack_walked = 2 * format_of(name).lanes, walk_of(name, threads)

    @cuda.jit(device=True)
    def entry(policy, scale, rows, i):
        # Token id and log-probability of an entry; -1 beyond the last.
        if i < 0:
            return np.int32(-1), np.float32(0.0)
        return np.int32(rows.token_ids[i]), log_probability_under(policy, np.float32(rows.entry_logits[i]), scale)

    @cuda.jit(device=True)
    def first_entry(policy, scale, index, rows, wanted):
        # This thread's first entry: it needs no place yet, so it is read while the block adds up.
        inside = wanted and cuda.threadIdx.x < policy.count and policy.count <= rows.capacity
        i = np.int64(index) * rows.capacity + cuda.threadIdx.x if inside else np.int64(-1)
        return entry(policy, scale, rows, i)

    @cuda.jit(device=True)
    def pack_row(first, policy, scale, index, logits, rows, captures, at, shared):
        out_ids, out_logprobs = captures.token_ids, captures.logprobs
        if policy.count > rows.capacity:
            row = row_without_maxima(logits, index, granule)
            pack_walked(row, policy, scale, out_ids, out_logprobs, at, shared)
            return
        if cuda.threadIdx.x < policy.count:
            out_ids[at + cuda.threadIdx.x], out_logprobs[at + cuda.threadIdx.x] = first
        for i in range(cuda.threadIdx.x + threads, policy.count, threads):
            out_ids[at + i], out_logprobs[at + i] = entry(policy, scale, rows, np.int64(index) * rows.capacity + i)

    return first_entry, pack_row

"""The kernel of a draw, behind the filter's scan: a block filters a draft's row and draws its draft."""

from functools import lru_cache
from typing import Any, NamedTuple

import numpy as np
from numba import cuda, float32, float64, int32, int64, void

from gpu.device.launch import Kernel, pointer_to, record_of
from gpu.device.rows import LOGITS, row_without_maxima
from gpu.device.vectors import format_of
from gpu.support.gather import SHARED
from gpu.support.limits import FILTER
from gpu.support.marks import MARKS
from gpu.support.pick import MAX_REGISTERS, SCRATCH64, THREADS, pick_of
from gpu.support.pick_whole import pick_whole_of
from gpu.support.policy import ROWS, open_policy
from gpu.support.scan import row_of
from gpu.support.whole import WHOLE
from gpu.verification.draw import Law, draw_of
from gpu.verification.law import Laws
from gpu.weights import GREEDY_TEMPERATURE


class Drafts(NamedTuple):
    """A Drawn as kernels take it: pointers to the arrays of that name, and where this call's drafts lie."""

    drawn: Any  # its index
    maximum: Any
    cutoff: Any
    scale: Any
    share: Any
    uniforms: Any  # float64 [B, D]
    num_drafts: Any  # D
    first: Any


DRAFTS = record_of(
    Drafts, pointer_to(int64), pointer_to(float32), pointer_to(float32), pointer_to(float32), pointer_to(float64),
    pointer_to(float64), int32, int32,
)  # fmt: skip


@lru_cache
def draw_kernel(name: str, whole_rows: bool = False, scans: bool = False, threads: int = THREADS) -> Kernel:
    """The kernel for logits of this dtype; scans, and its grid: as of `row_of`.

    whole_rows: behind the kernels of gpu/support/whole.py, whose argument it takes too; its grid is (rows,).
    """
    row_of_block = row_of(name, scans, False, threads)
    pick, pick_whole = pick_of(name, threads), pick_whole_of(name, threads)
    draw, granule = draw_of(name, None, threads).draw, 2 * format_of(name).lanes

    @cuda.jit(device=True)
    def draw_picked(row, logits, bounds, rows, drafts, shared, scratch64):
        cuda.syncthreads()  # behind what one thread wrote of the row
        policy = open_policy(rows, row)
        request = np.int32(np.uint32(row) // np.uint32(logits.width))
        at = np.int64(np.int64(request) * drafts.num_drafts + drafts.first + (row - request * logits.width))
        greedy = rows.temperature[row] < GREEDY_TEMPERATURE or bounds.top_k[row] == 1
        entry = np.int32(0)
        if policy.valid:
            entry = np.int32(policy.argmax)
            if not greedy:
                unread = Laws(
                    logits, drafts.drawn, drafts.maximum, drafts.cutoff, drafts.scale, drafts.share, bounds.top_k,
                    np.int32(0),
                )  # fmt: skip
                law = Law(np.int32(-1), np.int32(-1), np.int64(0), np.float64(1.0), unread)
                view = row_without_maxima(logits, row, granule)
                entry, _ = draw(view, row, policy, drafts.uniforms[at], law, rows, shared, scratch64)
        if cuda.threadIdx.x == 0:
            drafts.drawn[at] = np.int64(entry)
            drafts.maximum[at], drafts.cutoff[at] = policy.maximum, policy.cutoff
            drafts.scale[2 * at] = np.float32(0.0) if greedy else policy.c_hi
            drafts.scale[2 * at + 1] = np.float32(0.0) if greedy else policy.c_lo
            drafts.share[at] = 1.0 / np.float64(policy.total) if policy.valid else np.nan

    def draw_rows(logits, marks, bounds, rows, drafts):
        shared = cuda.shared.array(SHARED, int32)
        scratch64 = cuda.shared.array(SCRATCH64, int64)
        row = row_of_block(logits, marks, None, None, None, shared)
        if row >= 0:
            pick(row, np.int64(0), np.uint32(0), np.float32(0.0), logits, marks, bounds, rows, shared, scratch64)
            draw_picked(row, logits, bounds, rows, drafts, shared, scratch64)

    def draw_whole_rows(logits, marks, bounds, rows, whole, drafts):
        shared = cuda.shared.array(SHARED, int32)
        scratch64 = cuda.shared.array(SCRATCH64, int64)
        row = np.int32(cuda.blockIdx.x)
        pick_whole(row, logits, marks, bounds, rows, whole, shared, scratch64)
        draw_picked(row, logits, bounds, rows, drafts, shared, scratch64)

    if whole_rows:
        return Kernel(draw_whole_rows, void(LOGITS, MARKS, FILTER, ROWS, WHOLE, DRAFTS), threads, MAX_REGISTERS)
    return Kernel(draw_rows, void(LOGITS, MARKS, FILTER, ROWS, DRAFTS), threads, MAX_REGISTERS)

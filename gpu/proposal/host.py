"""The draw on the host: one row a thread."""

from dataclasses import replace

import numba
import numpy as np
from numba import njit, prange

from gpu import status
from gpu.arrays import on_device
from gpu.checks import check_uniforms
from gpu.draft_law import NO_LAWS
from gpu.logit_rows import logit_rows
from gpu.proposal.record import Drawn
from gpu.row_walk import WALK_CHUNK, draw_token
from gpu.support import host as support_host
from gpu.weights import GREEDY_TEMPERATURE, split_scale

_OK = np.uint8(status.OK)
_CHOSEN = np.float32(0.0)


@njit(nogil=True, parallel=True, cache=True)
def _draw(
    flat, starts, vocabulary, width, support, top_k, uniforms, first, laws, index, maximum, cutoff, scale, share,
    threads,
):  # fmt: skip
    ids = np.empty((threads, WALK_CHUNK), np.int32)
    weights = np.empty((threads, WALK_CHUNK), np.int64)
    for i in prange(starts.size):
        row = np.int64(i)  # prange counts in uint64
        b, k = row // width, first + row % width
        thread = numba.get_thread_id()
        valid = support.status[row] == _OK
        greedy = support.temperature[row] < GREEDY_TEMPERATURE or top_k[row] == 1
        entry = np.int32(0)
        if valid and greedy:
            entry = support.argmax[row]
        elif valid:
            entry = draw_token(
                uniforms[b, k], support.total[row], np.int32(-1), laws, np.int64(-1), 1.0, flat, starts[row],
                vocabulary, support, row, ids[thread], weights[thread],
            )  # fmt: skip
        index[b, k] = entry
        maximum[b, k], cutoff[b, k] = support.maximum[row], support.cutoff[row]
        scale[b, k, 0], scale[b, k, 1] = (_CHOSEN, _CHOSEN) if greedy else split_scale(support.temperature[row])
        share[b, k] = 1.0 / np.float64(support.total[row]) if valid else np.nan


def draw(
    logits: np.ndarray,
    temperature: np.ndarray,
    top_k: np.ndarray,
    top_p: np.ndarray,
    min_p: np.ndarray,
    joint: bool,
    capacity: int,
    uniforms: np.ndarray,
    index: np.ndarray,
    first: int,
    out: Drawn | None,
) -> Drawn:
    """draw_drafts of NumPy arrays."""
    rows = logit_rows(logits, 3)
    batch, width, _ = logits.shape
    if not isinstance(index, np.ndarray) or index.dtype != np.int64 or index.shape[0] != batch or index.ndim != 2:
        got = f"{index.dtype}{list(index.shape)}" if isinstance(index, np.ndarray) else type(index).__name__
        raise ValueError(f"index={got}, expected a NumPy array int64[{batch}, D]")
    uniforms = check_uniforms("uniforms", uniforms, index.shape)
    if out is not None and (on_device(out.share) or out.share.shape != index.shape):
        raise ValueError(f"out={out.share.shape}, expected a Drawn of an earlier call with the same shapes")
    flat = logits.reshape(batch * width, rows.vocabulary)
    support = support_host.select(
        flat, temperature, top_k, top_p, min_p, joint, capacity, None if out is None else out.support
    )
    drawn = out or Drawn(
        index=index,
        maximum=np.full(index.shape, np.nan, np.float32),
        cutoff=np.full(index.shape, np.nan, np.float32),
        scale=np.full((*index.shape, 2), np.nan, np.float32),
        share=np.full(index.shape, np.nan),
        support=support,
    )
    drawn = replace(drawn, index=index, support=support)
    _draw(
        rows.flat, rows.starts, rows.vocabulary, width, support.arrays(), np.ascontiguousarray(top_k),
        uniforms, first, NO_LAWS, index, drawn.maximum, drawn.cutoff, drawn.scale, drawn.share,
        numba.get_num_threads(),
    )  # fmt: skip
    return drawn

"""The most probable tokens on the host: an ordered list a row, one pass."""

import numba
import numpy as np
from numba import njit, prange

from gpu import status
from gpu.checks import check_range
from gpu.logit_rows import load, logit_rows
from gpu.row_walk import WALK_CHUNK, load_chunk, log_probability_of, num_chunks
from gpu.support import Support, check_host_support, check_support

_OK = np.uint8(status.OK)


@njit(nogil=True)
def _top_row(flat, start, vocabulary, support, row, top_ids, top_values, ids, weights):
    # An ordered list of the best so far. Ids ascend, so a newcomer goes behind its equals.
    size, k = 0, top_ids.size
    for place in range(k):
        top_ids[place] = -1
        top_values[place] = np.float32(-np.inf)
    if support.status[row] != _OK:
        return
    for chunk in range(num_chunks(support, row, vocabulary)):
        num = load_chunk(chunk, flat, start, vocabulary, support, row, ids, weights)
        for i in range(num):
            x = load(flat, start + ids[i])
            if size == k and not x > top_values[k - 1]:
                continue
            if size < k:
                size += 1
            place = size - 1
            while place > 0 and x > top_values[place - 1]:
                top_values[place] = top_values[place - 1]
                top_ids[place] = top_ids[place - 1]
                place -= 1
            top_values[place] = x
            top_ids[place] = ids[i]
    for place in range(size):
        top_values[place] = log_probability_of(top_ids[place], flat, start, support, row)


@njit(nogil=True, parallel=True, cache=True)
def _top(flat, starts, vocabulary, support, rows, top_ids, top_values, threads):
    ids = np.empty((threads, WALK_CHUNK), np.int32)
    weights = np.empty((threads, WALK_CHUNK), np.int64)
    for index in prange(rows.size):
        n = np.int64(index)  # prange counts in uint64
        thread = numba.get_thread_id()
        _top_row(
            flat, starts[rows[n]], vocabulary, support, rows[n], top_ids[n], top_values[n],
            ids[thread], weights[thread],
        )  # fmt: skip


def top(
    logits: np.ndarray, support: Support, k: int, rows: np.ndarray, out: tuple[np.ndarray, np.ndarray] | None
) -> tuple[np.ndarray, np.ndarray]:
    """top_logprobs of NumPy arrays."""
    view = logit_rows(logits, 3 if getattr(logits, "ndim", 2) == 3 else 2)
    num_rows = view.starts.size
    check_host_support(support)
    check_support(support, num_rows)
    if not isinstance(rows, np.ndarray) or rows.dtype not in (np.int32, np.int64) or rows.ndim != 1:
        raise ValueError(f"rows={rows!r}, expected a NumPy array int32 or int64 [N]")
    check_range("rows", rows, (rows >= 0) & (rows < num_rows), f"0..{num_rows - 1}")
    if out is None:
        out = np.empty((rows.size, k), np.int32), np.empty((rows.size, k), np.float32)
    top_ids, top_values = out
    if top_ids.shape != (rows.size, k) or top_values.shape != (rows.size, k):
        raise ValueError(f"out={top_ids.shape}, {top_values.shape}, expected two of shape {(rows.size, k)}")
    _top(
        view.flat, view.starts, view.vocabulary, support.arrays(), rows.astype(np.int64), top_ids, top_values,
        numba.get_num_threads(),
    )  # fmt: skip
    return top_ids, top_values

"""Packing: the supports of chosen rows, back to back in one buffer (CSR).

Entry j of row r: token_ids[offsets[r] + j], ascending, with its log-probability under the row's policy.
The buffers may be larger than needed: a caller with fixed buffers passes those.
"""

import numba
import numpy as np
from numba import njit, prange

from gpu.logit_rows import LogitRows
from gpu.row_walk import WALK_CHUNK, load_chunk, log_probability_of, num_chunks
from gpu.support import Support


@njit(nogil=True)
def _pack_row(flat, start, vocabulary, support, row, offset, token_ids, logprobs, ids, weights):
    for chunk in range(num_chunks(support, row, vocabulary)):
        num = load_chunk(chunk, flat, start, vocabulary, support, row, ids, weights)
        for i in range(num):
            token_ids[offset + i] = ids[i]
            logprobs[offset + i] = log_probability_of(ids[i], flat, start, support, row)
        offset += num


@njit(nogil=True, parallel=True, cache=True)
def _pack(flat, starts, vocabulary, support, rows, offsets, token_ids, logprobs, threads):
    ids = np.empty((threads, WALK_CHUNK), np.int32)
    weights = np.empty((threads, WALK_CHUNK), np.int64)
    for index in prange(rows.size):
        r = np.int64(index)  # prange counts in uint64
        thread = numba.get_thread_id()
        _pack_row(
            flat, starts[rows[r]], vocabulary, support, rows[r], offsets[r], token_ids, logprobs,
            ids[thread], weights[thread],
        )  # fmt: skip


def pack_masks(
    logits: LogitRows,
    support: Support,
    rows: np.ndarray,
    offsets: np.ndarray,
    token_ids: np.ndarray,
    logprobs: np.ndarray,
) -> None:
    """Write the supports of `rows` (int64 [N], indices into R) to token_ids int32 and logprobs float32.

    offsets int64 [N+1] from the true counts; both buffers hold at least offsets[N] entries, else ValueError.
    """
    needed = int(offsets[-1])
    if token_ids.size < needed or logprobs.size < needed:
        raise ValueError(f"capacity={min(token_ids.size, logprobs.size)}, expected at least {needed} entries")
    _pack(
        logits.flat, logits.starts, logits.vocabulary, support.arrays(), rows, offsets, token_ids, logprobs,
        numba.get_num_threads(),
    )  # fmt: skip

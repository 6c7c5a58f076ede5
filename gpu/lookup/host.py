"""Prompt lookup on the host: one request a thread."""

from typing import Any

import numpy as np
from numba import njit, prange

from gpu.checks import check_array, check_range


@njit(nogil=True)
def _longest_match(tokens, max_ngram):
    # (length, where it ends) of the longest match, the latest of several; (0, 0) of none.
    last = tokens.size - 1
    most, where = 0, 0
    for j in range(last - 1, -1, -1):
        size = 0
        while size < max_ngram and size <= j and tokens[j - size] == tokens[last - size]:
            size += 1
        if size > most:
            most, where = size, j
            if most == max_ngram:
                break
    return most, where


@njit(nogil=True, parallel=True, cache=True)
def _lookup(token_ids, lengths, max_ngram, min_ngram, drafts, counts):
    for index in prange(lengths.size):
        b = np.int64(index)  # prange counts in uint64
        tokens = token_ids[b, : lengths[b]]
        most, where = _longest_match(tokens, max_ngram)
        if most < min_ngram:
            continue
        counts[b] = drafts.shape[1]
        period = tokens.size - 1 - where
        for k in range(drafts.shape[1]):
            drafts[b, k] = tokens[where + 1 + k % period]


def lookup(
    token_ids: np.ndarray, lengths: np.ndarray, num_drafts: int, max_ngram: int, min_ngram: int, out: Any
) -> tuple[np.ndarray, np.ndarray]:
    """prompt_lookup of NumPy arrays."""
    if not isinstance(token_ids, np.ndarray) or token_ids.ndim != 2:
        got = getattr(token_ids, "shape", type(token_ids).__name__)
        raise ValueError(f"token_ids={got}, expected a NumPy array int32 [B, L]")
    token_ids = check_array("token_ids", token_ids, np.int32, token_ids.shape)
    lengths = check_array("lengths", lengths, np.int32, token_ids.shape[:1])
    longest = token_ids.shape[1]
    check_range("lengths", lengths, (lengths >= 0) & (lengths <= longest), f"0..{longest}")
    if out is None:
        out = np.empty((lengths.size, num_drafts), np.int32), np.empty(lengths.size, np.int32)
    for i, (value, shape) in enumerate(zip(out, ((lengths.size, num_drafts), lengths.shape), strict=True)):
        if check_array(f"out[{i}]", value, np.int32, shape) is not value:
            raise ValueError(f"out[{i}].strides={value.strides}, expected a contiguous array")
    drafts, counts = out
    drafts[...], counts[...] = 0, 0
    _lookup(token_ids, lengths, max_ngram, min_ngram, drafts, counts)
    return drafts, counts

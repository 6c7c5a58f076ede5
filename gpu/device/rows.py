"""A row as a block reads it again: its granules, and their stored maxima to skip those that don't matter."""

from typing import Any, NamedTuple

import numpy as np
from numba import cuda

from gpu.device.vectors import row_start


class Row(NamedTuple):
    """One row of logits."""

    words: Any  # the logits
    first_vector: np.int64  # of the row, from `words`
    head: np.int32  # elements of the neighbour in front, in the first granule
    vocabulary: np.int32
    num_granules: np.int32
    maxima: Any  # words with two stored maxima each
    maxima_at: np.int64  # index of the row's first one, in maxima, a multiple of eight


@cuda.jit(device=True)
def open_row(row, words, skew, width, request_step, row_step, vocabulary, maxima, stride, granule):
    """The row's view; `granule`: elements in one, `stride`: stored maxima a row."""
    start = row_start(row, width, request_step, row_step, skew)
    head = np.int32(start % granule)
    first_vector = np.int64(start // granule) * 2
    num_granules = np.int32((head + vocabulary + granule - 1) // granule)
    return Row(words, first_vector, head, vocabulary, num_granules, maxima, np.int64(row) * stride)


@cuda.jit(device=True)
def stored_maximum(row, granule):
    """The key of a granule's largest element, cut to 16 bits."""
    index = row.maxima_at + granule
    word = row.maxima[index >> 1]
    return np.uint32((word >> np.uint32(16)) if index & 1 else (word & np.uint32(0xFFFF)))

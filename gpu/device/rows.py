"""Logits as kernels take them, and a row as a block reads it again: its granules, and their stored maxima."""

from typing import Any, NamedTuple

import numpy as np
from numba import cuda, int32, int64, types

from gpu.device.launch import pointer_to, record_of


class Logits(NamedTuple):
    """Logits [B, W, V], or [R, V] with a width of 1; draft probabilities too."""

    words: Any  # uint32 pointer, at a granule
    skew: Any  # elements from there to the first logit
    width: Any  # rows a request
    row_step: Any  # elements from a row to the next
    request_gap: Any  # elements between a request's rows and the next one's, beyond row_step
    vocabulary: Any


LOGITS = record_of(Logits, pointer_to(types.uint32), int32, int32, int64, int64, int32)


class Row(NamedTuple):
    """One row of logits."""

    words: Any
    first_vector: Any  # int64, of the row, from `words`
    head: Any  # int32, elements of the neighbour in front, in the first granule
    vocabulary: Any  # int32
    num_granules: Any  # int32
    maxima: Any  # words with two stored maxima each
    maxima_at: Any  # int64, index of the row's first one, in maxima, a multiple of eight


@cuda.jit(device=True)
def row_start(logits, row):
    """The first element of a row, counted from the pointer."""
    start = np.int64(logits.skew) + np.int64(row) * logits.row_step
    if logits.request_gap != 0:
        start = np.int64(start + np.int64(np.uint32(row) // np.uint32(logits.width)) * logits.request_gap)
    return start


@cuda.jit(device=True)
def open_row(logits, row, granule, maxima, stride):
    """The row's view; `granule`: elements in one, `stride`: stored maxima a row."""
    start = row_start(logits, row)
    head = np.int32(start & np.int64(granule - 1))
    first_vector = np.int64(np.int64(start - head) // np.int64(granule // 2))
    num_granules = np.int32((head + logits.vocabulary + granule - 1) // granule)
    return Row(
        logits.words, first_vector, head, logits.vocabulary, num_granules, maxima, np.int64(row) * stride
    )  # fmt: skip


@cuda.jit(device=True)
def row_without_maxima(logits, row, granule):
    """The row's view for who reads all of it."""
    return open_row(logits, row, granule, logits.words, 0)


@cuda.jit(device=True)
def stored_maximum(row, granule):
    """The key of a granule's largest element, cut to 16 bits."""
    index = row.maxima_at + granule
    word = row.maxima[index >> 1]
    return np.uint32((word >> np.uint32(16)) if index & 1 else (word & np.uint32(0xFFFF)))

"""The kernel of penalties and bias: a block a row.

Every token is changed by one thread: of the history, of the drafts before the row that it lacks, then of the bias.
A token that the bias names twice gets both values in their order, as a sum of float32 depends on it.
"""

from functools import lru_cache

import numpy as np
from numba import cuda, float32, int32, int64, void

from gpu.adjust.penalty import is_neutral, penalise
from gpu.device.launch import Kernel, pointer_to
from gpu.weights import MAX_VOCABULARY

THREADS = 512
HAS_HISTORY, HAS_REPETITION, HAS_FREQUENCY, HAS_PRESENCE, HAS_BIAS = 1, 2, 4, 8, 16  # which arguments are there
_MARKS = MAX_VOCABULARY // 32


@cuda.jit(device=True)
def penalties_of(given, request, repetitions, frequencies, presences):
    """The three penalties of a request, neutral where they aren't given."""
    repetition, frequency, presence = np.float32(1.0), np.float32(0.0), np.float32(0.0)
    if given & HAS_REPETITION:
        repetition = np.float32(repetitions[request])
    if given & HAS_FREQUENCY:
        frequency = np.float32(frequencies[request])
    if given & HAS_PRESENCE:
        presence = np.float32(presences[request])
    return repetition, frequency, presence


@cuda.jit(device=True)
def _occurrences(drafts, at, size, token):
    count = np.int32(0)
    for i in range(size):
        count = np.int32(count + (1 if drafts[at + i] == token else 0))
    return count


@cuda.jit(device=True)
def _bounds(offsets, request, num_entries):
    first = max(np.int64(offsets[request]), np.int64(0))
    return first, min(np.int64(offsets[request + 1]), np.int64(num_entries))


@cuda.jit(device=True)
def _holds(ids, first, last, token):
    # Whether `token` is among the ascending ids[first:last].
    low, high = first, last
    while low < high:
        middle = np.int64((low + high) >> 1)
        if ids[middle] < token:
            low = np.int64(middle + 1)
        else:
            high = middle
    return low < last and ids[low] == token


@lru_cache
def adjust_kernel(threads: int = THREADS) -> Kernel:
    """The kernel; its grid is (rows,)."""

    @cuda.jit(device=True)
    def apply(logits, start, vocabulary, token, count, repetition, frequency, presence):
        if 0 <= token < vocabulary:
            x = np.float32(logits[start + token])
            logits[start + token] = penalise(x, count, repetition, frequency, presence)

    @cuda.jit(device=True)
    def penalise_row(
        logits, start, vocabulary, drafts, at, num_before, ids, counts, first, last, repetition, frequency, presence
    ):
        for j in range(first + cuda.threadIdx.x, last, threads):
            token = np.int32(ids[j])
            count = np.int32(counts[j] + _occurrences(drafts, at, num_before, token))
            apply(logits, start, vocabulary, token, count, repetition, frequency, presence)
        for i in range(cuda.threadIdx.x, num_before, threads):
            token = np.int32(drafts[at + i])
            if _occurrences(drafts, at, i, token) == 0 and not _holds(ids, first, last, token):
                count = _occurrences(drafts, at, num_before, token)
                apply(logits, start, vocabulary, token, count, repetition, frequency, presence)

    @cuda.jit(device=True)
    def any_twice(ids, first, last, vocabulary, marks):
        for i in range(cuda.threadIdx.x, _MARKS, threads):
            marks[i] = 0
        cuda.syncthreads()
        twice = np.int32(0)
        for j in range(first + cuda.threadIdx.x, last, threads):
            token = np.int32(ids[j])
            if 0 <= token < vocabulary:
                mark = np.int32(np.int32(1) << np.int32(token & 31))
                if np.int32(cuda.atomic.or_(marks, token >> 5, mark)) & mark:
                    twice = np.int32(1)
        return cuda.syncthreads_or(twice)

    @cuda.jit(device=True)
    def add_bias(logits, start, vocabulary, ids, values, first, last, marks):
        if any_twice(ids, first, last, vocabulary, marks):
            # All entries of a token are one thread's.
            for j in range(first, last):
                token, value = np.int32(ids[j]), np.float32(values[j])
                if token % threads == cuda.threadIdx.x and 0 <= token < vocabulary and value != 0:
                    logits[start + token] = np.float32(logits[start + token] + value)
        else:
            for j in range(first + cuda.threadIdx.x, last, threads):
                token, value = np.int32(ids[j]), np.float32(values[j])
                if 0 <= token < vocabulary and value != 0:
                    logits[start + token] = np.float32(logits[start + token] + value)

    def adjust(
        logits, request_step, row_step, width, vocabulary, drafts, num_drafts, given,
        offsets, ids, counts, num_ids, repetitions, frequencies, presences,
        bias_offsets, bias_ids, bias_values, num_biases,
    ):  # fmt: skip
        marks = cuda.shared.array(_MARKS, int32)
        request, i = np.int32(cuda.blockIdx.x // width), np.int32(cuda.blockIdx.x % width)
        if i > num_drafts[request]:
            return
        start = np.int64(np.int64(request) * request_step + np.int64(i) * row_step)
        repetition, frequency, presence = penalties_of(given, request, repetitions, frequencies, presences)
        if not is_neutral(repetition, frequency, presence):
            first, last = np.int64(0), np.int64(0)
            if given & HAS_HISTORY:
                first, last = _bounds(offsets, request, num_ids)
            penalise_row(
                logits, start, vocabulary, drafts, np.int64(request) * (width - 1), i, ids, counts, first, last,
                repetition, frequency, presence,
            )  # fmt: skip
        if given & HAS_BIAS:
            first, last = _bounds(bias_offsets, request, num_biases)
            if first < last:
                cuda.syncthreads()
                add_bias(logits, start, vocabulary, bias_ids, bias_values, first, last, marks)

    signature = void(
        pointer_to(float32), int64, int64, int32, int32, pointer_to(int32), pointer_to(int32), int32,
        pointer_to(int64), pointer_to(int32), pointer_to(int32), int64,
        pointer_to(float32), pointer_to(float32), pointer_to(float32),
        pointer_to(int64), pointer_to(int32), pointer_to(float32), int64,
    )  # fmt: skip
    return Kernel(adjust, signature, threads)

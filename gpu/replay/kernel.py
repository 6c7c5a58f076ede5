"""The kernels of replay: a block a row, a thread a partial sum of gpu.replay.arithmetic.

A thread comes back to its own entries only, so what it wrote to them needs no barrier. Ids, entries and gradients by
entries are read and written side by side; the logits of a support lie where their ids say, 32 bytes each.
"""

from functools import lru_cache
from typing import Any

import numpy as np
from numba import cuda, float32, float64, int16, int32, int64, types, void

from gpu.device.block import FULL, WARP
from gpu.device.instructions import half_to_float
from gpu.device.launch import Kernel, pointer_to
from gpu.replay.arithmetic import LANES, exp64, log1p64, logit_gradient
from gpu.replay.elements import bfloat16_bits, half_bits
from gpu.weights import GREEDY_TEMPERATURE

_WARPS = LANES // WARP
_GREEDY = float(GREEDY_TEMPERATURE)
_ELEMENTS = {"float32": float32, "float64": float64, "float16": int16, "bfloat16": types.uint16}
_SUPPORTS = pointer_to(int32), pointer_to(int64), int64, pointer_to(float64)  # token_ids, offsets, nnz, temperature


@cuda.jit(device=True)
def _bounds(offsets, row, num_entries):
    first = max(np.int64(offsets[row]), np.int64(0))
    return first, min(np.int64(offsets[row + 1]), np.int64(num_entries))


@cuda.jit(device=True)
def _sum(value, scratch):
    # tree_sum over the block. A barrier must lie between two uses of the same scratch.
    for i in range(5):
        value = np.float64(value + cuda.shfl_xor_sync(FULL, value, 1 << i))
    if cuda.laneid == 0:
        scratch[cuda.threadIdx.x // WARP] = value
    cuda.syncthreads()
    return np.float64((scratch[0] + scratch[1]) + (scratch[2] + scratch[3]))


@cuda.jit(device=True)
def _sum_row(values, first, last, scratch):
    total = np.float64(0.0)
    for entry in range(first + cuda.threadIdx.x, last, LANES):
        total = np.float64(total + values[entry])
    return _sum(total, scratch)


@cuda.jit(device=True)
def _larger(value, place, other, other_place):
    # Of equal values the one that stands first.
    if other > value or (other == value and other_place < place):
        return other, other_place
    return value, place


@cuda.jit(device=True)
def _largest(value, place, values, places):
    # Over the block.
    for i in range(5):
        other, other_place = cuda.shfl_xor_sync(FULL, value, 1 << i), cuda.shfl_xor_sync(FULL, place, 1 << i)
        value, place = _larger(value, place, other, other_place)
    if cuda.laneid == 0:
        values[cuda.threadIdx.x // WARP], places[cuda.threadIdx.x // WARP] = value, place
    cuda.syncthreads()
    value, place = np.float64(values[0]), np.int32(places[0])
    for warp in range(1, _WARPS):
        value, place = _larger(value, place, np.float64(values[warp]), np.int32(places[warp]))
    return value, place


def _reader(kind: str) -> Any:
    @cuda.jit(device=True)
    def read_float(elements, index):
        return np.float64(elements[index])

    @cuda.jit(device=True)
    def read_half(elements, index):
        return np.float64(half_to_float(np.uint32(elements[index])))

    @cuda.jit(device=True)
    def read_bfloat16(elements, index):
        return np.float64(np.uint32(np.uint32(elements[index]) << np.uint32(16)).view(np.float32))

    return {"float16": read_half, "bfloat16": read_bfloat16}.get(kind, read_float)


def _writer(kind: str) -> Any:
    @cuda.jit(device=True)
    def write_float(elements, index, value):
        elements[index] = value

    @cuda.jit(device=True)
    def write_half(elements, index, value):
        elements[index] = np.int16(half_bits(np.float32(value)))

    @cuda.jit(device=True)
    def write_bfloat16(elements, index, value):
        elements[index] = np.uint16(bfloat16_bits(np.float32(value)))

    return {"float16": write_half, "bfloat16": write_bfloat16}.get(kind, write_float)


@lru_cache
def log_softmax_kernel(kind: str) -> Kernel:
    """The forward kernel for logits of this dtype; its grid is (rows,)."""
    read = _reader(kind)

    def log_softmax(
        logits, row_step, vocabulary, token_ids, offsets, num_entries, temperatures, entries
    ):  # fmt: skip
        values, places = cuda.shared.array(_WARPS, float64), cuda.shared.array(_WARPS, int32)
        partial = cuda.shared.array(_WARPS, float64)
        row, thread = np.int64(cuda.blockIdx.x), cuda.threadIdx.x
        first, last = _bounds(offsets, row, num_entries)
        start, temperature = np.int64(row * row_step), np.float64(temperatures[row])
        if temperature < _GREEDY:
            for entry in range(first + thread, last, LANES):
                entries[entry] = 0.0
            return
        maximum, top = np.float64(-np.inf), np.int32(0)
        for entry in range(first + thread, last, LANES):
            token = np.int64(token_ids[entry])
            x = np.float64(np.nan)
            if 0 <= token < vocabulary:
                x = read(logits, np.int64(start + token))
            entries[entry] = x
            if x > maximum:
                maximum, top = x, np.int32(entry - first)
        maximum, top = _largest(maximum, top, values, places)
        others = np.float64(0.0)
        for entry in range(first + thread, last, LANES):
            score = np.float64((entries[entry] - maximum) / temperature)
            entries[entry] = score
            if np.int32(entry - first) != top:
                others = np.float64(others + np.float64(exp64(score)))
        log_total = np.float64(log1p64(_sum(others, partial)))
        for entry in range(first + thread, last, LANES):
            entries[entry] = np.float64(entries[entry] - log_total)

    signature = void(pointer_to(_ELEMENTS[kind]), int64, int64, *_SUPPORTS, pointer_to(float64))
    return Kernel(log_softmax, signature, LANES)


@lru_cache
def backward_kernel(kind: str) -> Kernel:
    """The kernel of the gradient by logits of this dtype; its grid is (rows,)."""
    write = _writer(kind)

    def backward(
        grad_logits, row_step, vocabulary, token_ids, offsets, num_entries, temperatures, entries, grad_entries
    ):  # fmt: skip
        partial = cuda.shared.array(_WARPS, float64)
        row = np.int64(cuda.blockIdx.x)
        first, last = _bounds(offsets, row, num_entries)
        start, temperature = np.int64(row * row_step), np.float64(temperatures[row])
        if temperature < _GREEDY:
            return
        total = _sum_row(grad_entries, first, last, partial)
        for entry in range(first + cuda.threadIdx.x, last, LANES):
            token = np.int64(token_ids[entry])
            if 0 <= token < vocabulary:
                gradient = logit_gradient(grad_entries[entry], entries[entry], total, temperature)
                write(grad_logits, np.int64(start + token), gradient)

    signature = void(
        pointer_to(_ELEMENTS[kind]), int64, int64, *_SUPPORTS, pointer_to(float64), pointer_to(float64)
    )  # fmt: skip
    return Kernel(backward, signature, LANES)


@lru_cache
def sums_kernel() -> Kernel:
    """The kernel of the rows' sums; its grid is (rows,)."""

    def sums(entries, offsets, num_entries, out):
        partial = cuda.shared.array(_WARPS, float64)
        row = np.int64(cuda.blockIdx.x)
        first, last = _bounds(offsets, row, num_entries)
        total = _sum_row(entries, first, last, partial)
        if cuda.threadIdx.x == 0:
            out[row] = total

    return Kernel(sums, void(pointer_to(float64), pointer_to(int64), int64, pointer_to(float64)), LANES)

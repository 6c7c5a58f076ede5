"""Rotary embedding of queries and keys, and keys and values to the cache, in one kernel.

RoPE (arXiv 2104.09864) in the half-split layout of GPT-NeoX and Llama: of a head x = (x1, x2) at a position with the
angles' cosines (c1, c2) and sines (s1, s2), (x1 * c1 - x2 * s1, x2 * c2 + x1 * s2), in float32; the result is rounded.
"""

from functools import lru_cache
from typing import Any, NamedTuple

import numpy as np
from numba import cuda, int32, int64, njit, types, void

from gpu.arrays import Array, on_device
from gpu.checks import check_like
from gpu.device.launch import Kernel, pointer, pointer_to, record_of
from gpu.instructions import product
from gpu.layers.elements import check_format, nearest, to_float32, words_of, words_pointer

THREADS = 256


class Heads(NamedTuple):
    """Sizes, as the kernel takes them."""

    words: Any  # of all heads of all rows, halved: each thread takes one of the first half and one of the second
    half: Any  # words of half a head
    queries: Any  # heads
    keys: Any
    width: Any  # rows of a block
    head_step: Any  # words from a head of the queries to the next
    row_step: Any  # and from a row


HEADS = record_of(Heads, *[int32] * len(Heads._fields))


def turn_heads(
    rows: Array, cosines: Array, sines: Array, index: Array, queries: Array, keys: Array, values: Array
) -> None:
    """Turn what a layer projected, the queries to an array and the keys, with the values beside, to a cache.

    rows [B, W, (H + 2 * K) * D]: H heads of queries, K of keys and K of values, D wide each; cosines, sines [B, W, D],
    of each row's position. queries [B, H, W, D] is written whole; of keys and values [N, D] the rows index[b, k, w]
    are, index int64 [B, K, W], none twice and all in 0..N-1: nobody looks, on a device. float32, float16, or uint16
    with the bits of bfloat16, all the same; contiguous, but queries may be the transpose of a contiguous [B, W, H, D].
    All are NumPy's, or all CuPy's: there it is one launch, for the same bits. ValueError for other arrays, and for D no
    multiple of 2, or of 4 where elements have 16 bits.
    """
    form, device, dtype = check_format("rows", rows), on_device(rows), rows.dtype
    shape: tuple[int, ...] = getattr(queries, "shape", ())
    if len(shape) != 4 or getattr(index, "ndim", 0) != 3:
        raise ValueError(f"queries={list(shape)}, expected [B, H, W, D], and index int64 [B, K, W]")
    (batch, heads, width, size), held = shape, index.shape[1]
    check_like("rows", rows, dtype, (batch, width, (heads + 2 * held) * size), device)
    by_rows = not queries.flags.c_contiguous
    memory = queries.transpose(0, 2, 1, 3) if by_rows else queries
    check_like("queries", memory, dtype, (batch, width, heads, size) if by_rows else shape, device)
    check_like("index", index, np.int64, (batch, held, width), device)
    for name, array in (("cosines", cosines), ("sines", sines)):
        check_like(name, array, dtype, (batch, width, size), device)
    for name, array in (("keys", keys), ("values", values)):
        check_like(name, array, dtype, (getattr(array, "shape", (0,))[0], size), device)
    lanes = words_of(form).lanes
    if size % (2 * lanes):
        raise ValueError(f"queries={list(shape)}, expected D to be a multiple of {2 * lanes}")
    if not device:
        _turn_on_host(rows, cosines, sines, index, queries, keys, values)
        return
    half = size // 2 // lanes
    words = batch * width * (heads + 2 * held) * half
    if words:
        kernel = turn_kernel(form)
        arrays = [words_pointer(array) for array in (rows, cosines, sines, memory, keys, values)]
        steps = (2 * half, heads * 2 * half) if by_rows else (width * 2 * half, 2 * half)
        kernel.launch(
            (-(-words // kernel.threads),), *arrays[:3], pointer(index), *arrays[3:],
            Heads(words, half, heads, held, width, *steps),
        )  # fmt: skip


def _turn_on_host(
    rows: np.ndarray, cosines: np.ndarray, sines: np.ndarray, index: np.ndarray,
    queries: np.ndarray, keys: np.ndarray, values: np.ndarray,
) -> None:  # fmt: skip
    batch, heads, width, size = queries.shape
    held, dtype = index.shape[1], rows.dtype
    parts = rows.reshape(batch, width, -1, size).transpose(0, 2, 1, 3)
    first, second = np.split(to_float32(parts[:, : heads + held]), 2, -1)
    (c1, c2), (s1, s2) = (np.split(to_float32(x)[:, None], 2, -1) for x in (cosines, sines))
    turned = nearest(np.concatenate((first * c1 - second * s1, second * c2 + first * s2), -1), dtype)
    queries[...] = turned[:, :heads]
    keys[index], values[index] = turned[:, heads:], parts[:, heads + held :]


@njit(nogil=True)
def _turned(x1, x2, c1, c2, s1, s2):
    return product(x1, c1) - product(x2, s1), product(x2, c2) + product(x1, s2)


@lru_cache
def turn_kernel(name: str, threads: int = THREADS) -> Kernel:
    """The kernel for this format; its grid is (ceil(words / threads),)."""
    lanes, unpack, pack = words_of(name)

    def turn(rows, cosines, sines, index, queries, keys, values, heads):
        i = np.int32(cuda.blockIdx.x * threads + cuda.threadIdx.x)
        if i >= heads.words:
            return
        half, num_heads = np.uint32(heads.half), np.uint32(heads.queries + 2 * heads.keys)
        part = np.uint32(np.uint32(i) // half)
        word, row = np.int32(np.uint32(i) - part * half), np.int32(part // num_heads)
        head = np.int32(part - np.uint32(row) * num_heads)
        at = np.int64(np.int64(part) * np.int64(2 * heads.half) + word)
        first, second = np.uint32(rows[at]), np.uint32(rows[at + heads.half])
        b = np.int32(np.uint32(row) // np.uint32(heads.width))
        w = np.int32(row - b * heads.width)
        if head < heads.queries + heads.keys:
            of_row = np.int64(np.int64(row) * np.int64(2 * heads.half) + word)
            a0, a1 = unpack(first)
            b0, b1 = unpack(second)
            c0, c1 = unpack(cosines[of_row])
            d0, d1 = unpack(cosines[of_row + heads.half])
            s0, s1 = unpack(sines[of_row])
            t0, t1 = unpack(sines[of_row + heads.half])
            x0, y0 = _turned(a0, b0, c0, d0, s0, t0)
            x1, y1 = np.float32(0.0), np.float32(0.0)
            if lanes == 2:
                x1, y1 = _turned(a1, b1, c1, d1, s1, t1)
            first, second = np.uint32(pack(x0, x1)), np.uint32(pack(y0, y1))
        if head < heads.queries:
            of_block = np.int64(np.int64(b) * heads.width * heads.queries * (2 * heads.half))
            to = np.int64(of_block + np.int64(head) * heads.head_step + np.int64(w) * heads.row_step + word)
            queries[to], queries[to + heads.half] = first, second
        else:
            held = np.int32(head - heads.queries)
            key = np.int32(held if held < heads.keys else np.int32(held - heads.keys))
            place = np.int64(index[np.int64(np.int64(b * heads.keys + key) * heads.width + w)])
            to = np.int64(place * np.int64(2 * heads.half) + word)
            if held < heads.keys:
                keys[to], keys[to + heads.half] = first, second
            else:
                values[to], values[to + heads.half] = first, second

    words = pointer_to(types.uint32)
    return Kernel(turn, void(words, words, words, pointer_to(int64), words, words, words, HEADS), threads)

"""Philox4x32-10 on a device: one launch, no synchronisation."""

from functools import lru_cache

import numpy as np
from numba import cuda, float64, int32, int64, types, void

from gpu.arrays import Array
from gpu.device.launch import Kernel, pointer, pointer_to
from gpu.device.memory import check_device, empty
from gpu.random.parameters import ACCEPT_BLOCK, KEY_STEPS, MULTIPLIERS, ROUNDS

THREADS = 256
_M0, _M1 = (np.uint64(multiplier) for multiplier in MULTIPLIERS)
_STEP0, _STEP1 = KEY_STEPS


@cuda.jit(device=True)
def philox(c0, c1, c2, c3, k0, k1):
    """The four random words uint32 of a counter and a key, words uint32."""
    for _ in range(ROUNDS):
        first, second = np.uint64(_M0 * np.uint64(c0)), np.uint64(_M1 * np.uint64(c2))
        high0, high1 = np.uint32(first >> np.uint64(32)), np.uint32(second >> np.uint64(32))
        c0, c2 = np.uint32(high1 ^ c1 ^ k0), np.uint32(high0 ^ c3 ^ k1)
        c1, c3 = low_word(second), low_word(first)
        k0, k1 = np.uint32(k0 + _STEP0), np.uint32(k1 + _STEP1)
    return c0, c1, c2, c3


@cuda.jit(device=True)
def low_word(value):
    """The lower half of a uint64."""
    return np.uint32(value & np.uint64(0xFFFFFFFF))


@lru_cache
def uniforms_kernel(threads: int = THREADS) -> Kernel:
    """The kernel; a thread a number."""

    def fill(seeds, positions, num_requests, width, purpose, out):
        index = np.int64(np.int64(cuda.blockIdx.x) * threads + cuda.threadIdx.x)
        if index < np.int64(num_requests) * width:
            request, i = np.int64(index // width), np.int64(index % width)
            step, place = (np.int64(0), i) if purpose == ACCEPT_BLOCK else (i, np.int64(0))
            seed, position = np.uint64(seeds[request]), np.uint64(np.int64(positions[request] + step))
            word, _, _, _ = philox(
                low_word(position), low_word(np.uint64(position >> np.uint64(32))), np.uint32(purpose),
                np.uint32(place), low_word(seed), low_word(np.uint64(seed >> np.uint64(32))),
            )  # fmt: skip
            out[index] = (np.float64(word) + 0.5) * 2.0**-32

    signature = void(pointer_to(types.uint64), pointer_to(int64), int32, int32, int32, pointer_to(float64))
    return Kernel(fill, signature, threads)


def uniforms(seeds: Array, positions: Array, width: int, purpose: int, out: Array | None) -> Array:
    """uniforms of CuPy arrays."""
    if seeds.ndim != 1:
        raise ValueError(f"seeds={list(seeds.shape)}, expected a CuPy array uint64 [B]")
    check_device("seeds", seeds, np.uint64, seeds.shape)
    check_device("positions", positions, np.int64, seeds.shape)
    shape = seeds.size, width
    out = empty(shape, np.float64) if out is None else check_device("out", out, np.float64, shape)
    if out.size:
        kernel = uniforms_kernel()
        kernel.launch(
            (-(-out.size // kernel.threads),),
            pointer(seeds), pointer(positions), seeds.size, width, purpose, pointer(out),
        )  # fmt: skip
    return out

"""Operations of a warp and of a block. Every thread of the block must reach the block-wide ones."""

from functools import lru_cache
from typing import Any, NamedTuple

import numpy as np
from numba import cuda

from gpu.device.instructions import take_ticket

FULL = 0xFFFFFFFF
WARP = 32


@cuda.jit(device=True)
def warp_prefix32(value):
    """The int32 sum over the lanes up to and including this one."""
    for i in range(5):
        other = cuda.shfl_up_sync(FULL, value, 1 << i)
        if cuda.laneid >= (1 << i):
            value = np.int32(value + other)
    return value


@cuda.jit(device=True)
def warp_prefix64(value):
    """The int64 sum over the lanes up to and including this one."""
    for i in range(5):
        other = cuda.shfl_up_sync(FULL, value, 1 << i)
        if cuda.laneid >= (1 << i):
            value = np.int64(value + other)
    return value


@cuda.jit(device=True)
def warp_sum64(value):
    """The int64 sum of the warp, in every lane."""
    for i in range(5):
        value = np.int64(value + cuda.shfl_xor_sync(FULL, value, 1 << i))
    return value


@cuda.jit(device=True)
def last_to_come(number, tickets, at, box, place):
    """Whether this block is the last of `number` that come here, for which its ticket (int64) counts from zero.

    What the others have written before is seen by the last one, and the ticket is zero again. box: shared int32.
    """
    cuda.syncthreads()
    if cuda.threadIdx.x == 0:
        taken = np.int32(take_ticket(tickets, at))
        box[place] = taken
        if taken == number - 1:
            tickets[at] = np.int64(0)
    cuda.syncthreads()
    return box[place] == number - 1


class Block(NamedTuple):
    """The operations of a block of `threads`. A scratch is a shared array with an element for each warp.

    None ends with a barrier: one must lie between two uses of the same scratch.
    """

    threads: int
    offset32: Any  # (the warp's int32, int32 scratch) -> sum of the warps before, sum of all
    prefix32: Any  # (int32, int32 scratch) -> sum of the threads before, sum of all
    prefix64: Any  # the same in int64
    prefix_both: Any  # (int32, int64, int32 scratch, int64 scratch): prefix32 and prefix64 behind one barrier
    sum64: Any  # (int64, int64 scratch) -> sum of all


@lru_cache
def block_of(threads: int) -> Block:
    """The operations of a block of this many threads, a multiple of 32 up to 1024."""
    warps = threads // WARP

    @cuda.jit(device=True)
    def over_warps32(scratch):
        warp = cuda.threadIdx.x // WARP
        part = np.int32(0)
        if cuda.laneid < warps:
            part = np.int32(scratch[np.uint32(cuda.laneid)])
        through = warp_prefix32(part)
        before = np.int32(cuda.shfl_sync(FULL, through, warp) - cuda.shfl_sync(FULL, part, warp))
        return before, cuda.shfl_sync(FULL, through, warps - 1)

    @cuda.jit(device=True)
    def over_warps64(scratch):
        warp = cuda.threadIdx.x // WARP
        part = np.int64(0)
        if cuda.laneid < warps:
            part = np.int64(scratch[np.uint32(cuda.laneid)])
        through = warp_prefix64(part)
        before = np.int64(cuda.shfl_sync(FULL, through, warp) - cuda.shfl_sync(FULL, part, warp))
        return before, cuda.shfl_sync(FULL, through, warps - 1)

    @cuda.jit(device=True)
    def offset32(value, scratch):
        if cuda.laneid == 0:
            scratch[np.uint32(cuda.threadIdx.x // WARP)] = value
        cuda.syncthreads()
        return over_warps32(scratch)

    @cuda.jit(device=True)
    def prefix32(value, scratch):
        inclusive = warp_prefix32(value)
        if cuda.laneid == WARP - 1:
            scratch[np.uint32(cuda.threadIdx.x // WARP)] = inclusive
        cuda.syncthreads()
        before, total = over_warps32(scratch)
        return np.int32(before + inclusive - value), total

    @cuda.jit(device=True)
    def prefix64(value, scratch):
        inclusive = warp_prefix64(value)
        if cuda.laneid == WARP - 1:
            scratch[np.uint32(cuda.threadIdx.x // WARP)] = inclusive
        cuda.syncthreads()
        before, total = over_warps64(scratch)
        return np.int64(before + inclusive - value), total

    @cuda.jit(device=True)
    def prefix_both(small, large, scratch32, scratch64):
        inclusive32, inclusive64 = warp_prefix32(small), warp_prefix64(large)
        if cuda.laneid == WARP - 1:
            scratch32[np.uint32(cuda.threadIdx.x // WARP)] = inclusive32
            scratch64[np.uint32(cuda.threadIdx.x // WARP)] = inclusive64
        cuda.syncthreads()
        before32, total32 = over_warps32(scratch32)
        before64, total64 = over_warps64(scratch64)
        return (
            np.int32(before32 + inclusive32 - small), total32, np.int64(before64 + inclusive64 - large), total64
        )  # fmt: skip

    @cuda.jit(device=True)
    def sum64(value, scratch):
        value = warp_sum64(value)
        if cuda.laneid == 0:
            scratch[np.uint32(cuda.threadIdx.x // WARP)] = value
        cuda.syncthreads()
        part = np.int64(0)
        if cuda.laneid < warps:
            part = np.int64(scratch[np.uint32(cuda.laneid)])
        return warp_sum64(part)

    return Block(threads, offset32, prefix32, prefix64, prefix_both, sum64)

"""A round's results from one place to another: the fixed part whole, and of the masks' room what is used.

How much that is only the device knows, so a kernel copies, also to pinned memory on the host, which it can address.
"""

from functools import lru_cache
from typing import Any, NamedTuple

from numba import cuda, int64, void

from gpu.device.launch import Kernel, pointer_to, record_of

THREADS = 256
BLOCKS = 64


class Layout(NamedTuple):
    """Where a buffer's parts begin, in words of 8 bytes.

    head: words of the fixed part, which comes first. entries: where in it the number of all entries stands, int64.
    token_ids, logprobs: the masks' entries, two a word. room: entries.
    """

    head: Any
    entries: Any
    token_ids: Any
    logprobs: Any
    room: Any


LAYOUT = record_of(Layout, *[int64] * len(Layout._fields))


@lru_cache
def relay_kernel(threads: int = THREADS) -> Kernel:
    """The kernel; any grid (blocks,)."""

    def relay(source, destination, layout):
        first = int64(cuda.blockIdx.x) * threads + cuda.threadIdx.x
        step = int64(cuda.gridDim.x) * threads
        # What is loaded before anything is stored is under way together: the compiler can't know that they are apart.
        entries, ids, logprobs = source[layout.entries], int64(0), int64(0)
        if 2 * first < layout.room:  # before it is known whether they are used
            ids, logprobs = source[layout.token_ids + first], source[layout.logprobs + first]
        at = first
        while at < layout.head:
            destination[at] = source[at]
            at += step
        used = min(max(entries, int64(0)), layout.room)
        at = first
        while 2 * at < used:
            destination[layout.token_ids + at], destination[layout.logprobs + at] = ids, logprobs
            at += step
            if 2 * at < used:
                ids, logprobs = source[layout.token_ids + at], source[layout.logprobs + at]

    return Kernel(relay, void(pointer_to(int64), pointer_to(int64), LAYOUT), threads)


def relay(source: Any, destination: Any, layout: Layout) -> None:
    """Copy on CuPy's current stream; source and destination are addresses (in the simulator int64 arrays)."""
    relay_kernel().launch((BLOCKS,), source, destination, layout)

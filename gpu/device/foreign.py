"""Memory and streams of another library, used where they are: nothing is copied, nobody waits."""

from collections.abc import Iterator
from contextlib import contextmanager
from functools import cache
from typing import Any

import numpy as np

from gpu.arrays import Array


def array_at(address: int, shape: tuple[int, ...], dtype: Any, strides: tuple[int, ...] | None, owner: Any) -> Array:
    """A CuPy array over device memory of somebody else's; strides in bytes, None: C-contiguous.

    owner: whose life the memory depends on; the array keeps it. Unlike DLPack it takes bfloat16 as uint16, and works
    while a CUDA graph is captured.
    """
    import cupy

    dtype = np.dtype(dtype)
    if not all(shape):
        return cupy.empty(shape, dtype)
    steps = strides or tuple(int(np.prod(shape[i + 1 :])) * dtype.itemsize for i in range(len(shape)))
    span = dtype.itemsize + sum((n - 1) * step for n, step in zip(shape, steps, strict=True))
    memory = cupy.cuda.MemoryPointer(cupy.cuda.UnownedMemory(address, span, owner), 0)
    return cupy.ndarray(shape, dtype, memory, strides)


def release_memory() -> None:
    """Give the device back what CuPy keeps of its memory for arrays to come, so that another library can have it."""
    import cupy

    cupy.get_default_memory_pool().free_all_blocks()


class _Foreign:
    """A stream as CUDA Python's protocol wants it."""

    def __init__(self, address: int):
        self.address = address

    def __cuda_stream__(self) -> tuple[int, int]:
        return 0, self.address


@cache
def _stream_at(address: int, device: int) -> Any:
    # Kept for good: when a Stream of CuPy's goes, it may destroy what it wraps, whoever made it (seen in 14's source).
    import cupy

    wrap = getattr(cupy.cuda.Stream, "from_external", None)  # since CuPy 14
    return cupy.cuda.ExternalStream(address) if wrap is None else wrap(_Foreign(address))


@contextmanager
def on_stream(address: int) -> Iterator[None]:
    """Kernels and copies of this package go to the stream with this address (torch: `stream.cuda_stream`)."""
    import cupy

    with _stream_at(address, cupy.cuda.runtime.getDevice()):
        yield

"""Kernels with explicit signatures over raw pointers, launched on CuPy's current stream.

A launch passes an address for each array: Numba would otherwise unpack every array anew, which costs more than
these kernels run. To work on torch's stream: `with gpu.on_stream(torch_stream.cuda_stream): ...`.
"""

import warnings
from collections.abc import Callable
from functools import cached_property, lru_cache
from typing import Any

import numpy as np
from numba import cuda, types

from gpu.arrays import Array
from gpu.device.compiled import compiled
from gpu.device.instructions import SIMULATED


def pointer_to(kind: types.Type) -> types.Type:
    """The type of a kernel's array argument."""
    return types.CPointer(kind)


def record_of(record: type, *kinds: types.Type) -> types.Type:
    """The type of a kernel's argument that is a named tuple of such pointers and numbers."""
    return types.NamedTuple(kinds, record)


class Kernel:
    """A kernel of a fixed block size; compiled, or read from the disk, at its first launch."""

    def __init__(self, function: Callable, signature: types.Type, threads: int, max_registers: int | None = None):
        self.function, self.signature, self.threads, self.max_registers = function, signature, threads, max_registers
        self._configured = lru_cache(64)(self._configure)  # bounded: grids differ with the batch

    @cached_property
    def _compiled(self) -> Any:
        if SIMULATED:
            return cuda.jit(self.function)
        return compiled(self.function, self.signature, self.max_registers)

    def load(self) -> None:
        """Compile it and load it onto the current device now, rather than at its first launch."""
        _ = self._compiled

    def _configure(self, grid: tuple[int, ...], stream: int) -> Any:
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", "Grid size")  # a small batch is a small grid
            return self._compiled[grid, self.threads, _wrapped(stream) if stream else 0]

    def launch(self, grid: tuple[int, ...], *arguments: Any) -> None:
        """Run it on CuPy's current stream; array arguments as `pointer` gives them."""
        if SIMULATED:  # where a configured kernel is the kernel itself, so none can be kept
            self._compiled[grid, self.threads](*arguments)
            return
        self._configured(grid, _current_stream())(*arguments)


@lru_cache(64)
def _wrapped(stream: int) -> Any:
    return cuda.external_stream(stream)


def _current_stream() -> int:
    import cupy

    return cupy.cuda.get_current_stream().ptr


def pointer(array: Array) -> Any:
    """A contiguous device array as a kernel takes it."""
    return np.asarray(array).reshape(-1) if SIMULATED else array.data.ptr

"""Kernels with explicit signatures over raw pointers, launched on CuPy's current stream.

A launch passes an address for each array: Numba would otherwise unpack every array anew, which costs more than
these kernels run. To work on torch's stream: `with gpu.on_stream(torch_stream.cuda_stream): ...`.
"""

from collections.abc import Callable
from functools import cache, cached_property
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

    @cached_property
    def _compiled(self) -> Any:
        if SIMULATED:
            return cuda.jit(self.function)
        return compiled(self.function, self.signature, self.max_registers)

    @cached_property
    def _launcher(self) -> Any:
        from gpu.device.launcher import Launcher

        return Launcher(self._compiled, self.signature, self.threads)

    def load(self) -> None:
        """Compile it and load it onto the current device now, rather than at its first launch."""
        _ = self._compiled if SIMULATED else self._launcher

    def launch(self, grid: tuple[int, ...], *arguments: Any) -> None:
        """Run it on CuPy's current stream; array arguments as `pointer` gives them."""
        if SIMULATED:  # where a configured kernel is the kernel itself, so none can be kept
            self._compiled[grid, self.threads](*arguments)
        else:
            self._launcher.launch(grid, arguments)


def resident_blocks() -> int:
    """How many blocks of a kernel run at once on the current device, at least: two a multiprocessor, of all kernels."""
    if SIMULATED:  # where one runs after the other
        return 1 << 30
    import cupy

    return 2 * _multiprocessors(cupy.cuda.runtime.getDevice())


@cache
def _multiprocessors(device: int) -> int:
    import cupy

    return cupy.cuda.Device(device).attributes["MultiProcessorCount"]


def pointer(array: Array) -> Any:
    """A contiguous device array as a kernel takes it."""
    return np.asarray(array).reshape(-1) if SIMULATED else array.data.ptr

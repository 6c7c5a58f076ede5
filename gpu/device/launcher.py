"""How a compiled kernel is launched: by the driver, its arguments side by side in one block of memory.

Numba's own way makes an object of each argument: a round's launches take two to three times as long.
"""

import struct
import threading
from collections.abc import Iterator
from functools import lru_cache
from typing import Any

import cupy
import numpy as np
from cuda.bindings import driver
from numba import types

_SLOT = 8  # bytes an argument: as many as the widest has
_FORMATS = {
    types.boolean: "?7x",
    types.int32: "i4x",
    types.int64: "q",
    types.uint32: "I4x",
    types.uint64: "Q",
    types.float32: "f4x",
    types.float64: "d",
}


def _parts(kind: types.Type) -> Iterator[str]:
    """The formats of a kernel's argument, which may be a named tuple, also of such."""
    if isinstance(kind, types.BaseTuple):
        for one in kind:
            yield from _parts(one)
    else:
        yield "Q" if isinstance(kind, types.CPointer) else _FORMATS[kind]


def _flatten(value: Any, to: list[Any]) -> None:
    if isinstance(value, tuple):
        for one in value:
            _flatten(one, to)
    else:
        to.append(value)


class Launcher:
    """Launches one kernel in blocks of `threads`, from any thread and on any device.

    compiled: Numba's dispatcher, with its one signature.
    """

    def __init__(self, compiled: Any, signature: types.Type, threads: int):
        (kernel,) = compiled.overloads.values()
        self._library, self._threads = kernel._codelibrary, threads
        formats = [part for kind in signature.args for part in _parts(kind)]
        self._packed, self._number = struct.Struct("=" + "".join(formats)), len(formats)
        self._rooms = threading.local()
        self._functions: dict[int, Any] = {}
        self._configured = lru_cache(64)(self._configure)  # bounded: grids differ with the batch
        self._load(cupy.cuda.runtime.getDevice())  # one that was read from the disk isn't loaded yet

    def launch(self, grid: tuple[int, ...], arguments: tuple[Any, ...]) -> None:
        """Queue it on CuPy's current stream. RuntimeError with the driver's reason if it refuses."""
        device = cupy.cuda.runtime.getDevice()
        function = self._functions[device] if device in self._functions else self._load(device)
        values, addresses, _ = getattr(self._rooms, "room", None) or self._make_room()
        flat: list[Any] = []
        _flatten(arguments, flat)
        self._packed.pack_into(values, 0, *flat)
        config = self._configured(grid, cupy.cuda.get_current_stream().ptr)
        (error,) = driver.cuLaunchKernelEx(config, function, addresses, 0)
        if error != driver.CUresult.CUDA_SUCCESS:
            raise RuntimeError(f"launch of {grid} blocks: {driver.cuGetErrorString(error)[1].decode()}")

    def _load(self, device: int) -> Any:
        function = driver.CUfunction(int(self._library.get_cufunc().handle))
        self._functions[device] = function
        return function

    def _make_room(self) -> tuple[np.ndarray, int, np.ndarray]:
        """This thread's: the arguments, and the address of where each of them lies."""
        values = np.zeros(_SLOT * self._number, np.uint8)
        addresses = values.ctypes.data + _SLOT * np.arange(self._number, dtype=np.uint64)
        self._rooms.room = values, addresses.ctypes.data, addresses
        return self._rooms.room

    def _configure(self, grid: tuple[int, ...], stream: int) -> Any:
        config = driver.CUlaunchConfig()
        config.gridDimX, config.gridDimY, config.gridDimZ = (*grid, 1, 1)[:3]
        config.blockDimX, config.blockDimY, config.blockDimZ = self._threads, 1, 1
        config.sharedMemBytes, config.numAttrs, config.hStream = 0, 0, driver.CUstream(stream)
        return config

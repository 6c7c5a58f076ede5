"""Device memory in the simulator that knows which of its bytes were written: compute-sanitizer's initcheck, in CI."""

import sys
from contextlib import ExitStack, contextmanager
from unittest import mock

import numpy as np

from gpu.device import launch, memory

_POISON = 0xCB


class Unwritten(RuntimeError):
    """A kernel reads what nothing wrote."""


class _Pointer(np.ndarray):
    """A kernel's array: an element that neither a kernel nor the host has written can't be read."""

    written = None  # bool, a byte each; of views that kernels make of it none

    def __getitem__(self, index):
        if self.written is not None and isinstance(index, (int, np.integer)) and not self._bytes(index).all():
            own = np.asarray(self)[index : index + 1].view(np.uint8)
            if (own == _POISON).all():  # else the host has written it
                raise Unwritten(f"index={index} of {self.dtype}[{self.size}]: read, but never written")
        return super().__getitem__(index)

    def __setitem__(self, index, value):
        if self.written is not None:
            self._bytes(index)[:] = True
        super().__setitem__(index, value)

    def _bytes(self, index):
        if not isinstance(index, (int, np.integer)):  # the simulator copies back what isn't in a record, whole
            return self.written
        first = int(index) * self.itemsize
        return self.written[first : first + self.itemsize]


class _Memory:
    """What `gpu.device.memory` has given out."""

    def __init__(self):
        self._regions = []

    def empty(self, shape, dtype):
        array, written = self._new(shape, dtype)
        written[:] = False
        return array

    def zeros(self, shape, dtype):
        array, _ = self._new(shape, dtype)
        array.fill(0)
        return array

    def pointer(self, array):
        flat = np.asarray(array).reshape(-1)
        address = flat.ctypes.data
        for start, written in self._regions:
            if flat.size and start <= address < start + written.size:
                own = flat.view(_Pointer)
                own.written = written[address - start : address - start + flat.nbytes]
                return own
        return flat

    def view16(self, array):
        return self.pointer(np.asarray(array).reshape(-1).view(np.uint32))

    def _new(self, shape, dtype):
        nbytes = int(np.prod(shape, dtype=np.int64)) * np.dtype(dtype).itemsize
        buffer = np.full(max(nbytes, 1), _POISON, np.uint8)
        written = np.ones(buffer.size, bool)
        self._regions.append((buffer.ctypes.data, written))
        return buffer[:nbytes].view(dtype).reshape(shape).view(memory.SimulatedArray), written


@contextmanager
def watched():
    """Inside, device memory is watched."""
    own = _Memory()
    functions = {"empty": memory.empty, "zeros": memory.zeros, "pointer": launch.pointer, "view16": memory.view16}
    modules = [module for name, module in sys.modules.items() if name.startswith("gpu.")]
    with ExitStack() as stack:
        for name, function in functions.items():
            for module in modules:
                if getattr(module, name, None) is function:
                    stack.enter_context(mock.patch.object(module, name, getattr(own, name)))
        yield

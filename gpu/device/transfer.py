"""A block of device memory and its pinned copies on the host."""

from typing import Any

import numpy as np

from gpu.device.instructions import SIMULATED
from gpu.device.memory import zeros


class Mirror:
    """Bytes on the device, and `num_slots` pinned copies of them that asynchronous copies fill.

    relayed: a copy goes through a second place on the device and a stream of its own, so that kernels queued behind it
    don't wait for the way to the host.
    """

    def __init__(self, nbytes: int, num_slots: int, relayed: bool = False):
        self.device = zeros((nbytes,), np.uint8)
        self._relays: list[Any] = []
        if SIMULATED:
            self.hosts: list[np.ndarray] = [np.empty(nbytes, np.uint8) for _ in range(num_slots)]
            self._events: list[Any] = []
            return
        import cupy
        import cupyx

        self.hosts = [cupyx.empty_pinned((nbytes,), np.uint8) for _ in range(num_slots)]
        self._events = [cupy.cuda.Event(disable_timing=True) for _ in range(num_slots)]
        if relayed:
            self._relays = [cupy.empty((nbytes,), np.uint8) for _ in range(num_slots)]
            self._stream = cupy.cuda.Stream(non_blocking=True)
            self._ready = cupy.cuda.Event(disable_timing=True)

    def send(self, slot: int) -> None:
        """Queue the copy to a slot on CuPy's current stream; part of the graph, where one is captured.

        A relayed one can't be part of a graph.
        """
        host = self.hosts[slot]
        if SIMULATED:
            host[:] = np.asarray(self.device)
            return
        import cupy

        runtime, stream = cupy.cuda.runtime, cupy.cuda.get_current_stream()
        if self._relays:
            source = self._relays[slot]
            runtime.memcpyAsync(
                source.data.ptr, self.device.data.ptr, host.nbytes, runtime.memcpyDeviceToDevice, stream.ptr
            )
            self._ready.record(stream)
            self._stream.wait_event(self._ready)
            runtime.memcpyAsync(
                host.ctypes.data, source.data.ptr, host.nbytes, runtime.memcpyDeviceToHost, self._stream.ptr
            )
            self._events[slot].record(self._stream)
            return
        # The runtime's own call: CuPy's array methods refuse to copy to the host while a graph is captured.
        runtime.memcpyAsync(host.ctypes.data, self.device.data.ptr, host.nbytes, runtime.memcpyDeviceToHost, stream.ptr)
        if not stream.is_capturing():
            self._events[slot].record(stream)

    def wait(self, slot: int) -> None:
        """Until the slot's last copy, queued outside a graph, is done."""
        if not SIMULATED:
            self._events[slot].synchronize()

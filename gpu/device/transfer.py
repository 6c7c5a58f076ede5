"""A block of device memory and its pinned copies on the host."""

from typing import Any

import numpy as np

from gpu.device.instructions import SIMULATED
from gpu.device.memory import zeros


class Mirror:
    """Bytes on the device, and `num_slots` pinned copies of them that asynchronous copies fill."""

    def __init__(self, nbytes: int, num_slots: int):
        self.device = zeros((nbytes,), np.uint8)
        if SIMULATED:
            self.hosts: list[np.ndarray] = [np.empty(nbytes, np.uint8) for _ in range(num_slots)]
            self._events: list[Any] = []
            return
        import cupy
        import cupyx

        self.hosts = [cupyx.empty_pinned((nbytes,), np.uint8) for _ in range(num_slots)]
        self._events = [cupy.cuda.Event(disable_timing=True) for _ in range(num_slots)]

    def send(self, slot: int) -> None:
        """Queue the copy to a slot on CuPy's current stream; part of the graph, where one is captured."""
        host = self.hosts[slot]
        if SIMULATED:
            host[:] = np.asarray(self.device)
            return
        import cupy

        runtime, stream = cupy.cuda.runtime, cupy.cuda.get_current_stream()
        # The runtime's own call: CuPy's array methods refuse to copy to the host while a graph is captured.
        runtime.memcpyAsync(host.ctypes.data, self.device.data.ptr, host.nbytes, runtime.memcpyDeviceToHost, stream.ptr)
        if not stream.is_capturing():
            self._events[slot].record(stream)

    def wait(self, slot: int) -> None:
        """Until the slot's last copy, queued outside a graph, is done."""
        if not SIMULATED:
            self._events[slot].synchronize()

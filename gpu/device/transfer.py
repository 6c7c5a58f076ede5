"""A block of device memory and its pinned copies on the host."""

from collections.abc import Callable
from typing import Any

import numpy as np

from gpu.device.instructions import SIMULATED
from gpu.device.memory import zeros


class Mirror:
    """Bytes on the device, and `num_slots` pinned copies of them, filled on CuPy's current stream.

    copy: (from, to) queues the copy of what matters, between the addresses of two such blocks; of pinned memory it is
    the address that kernels know too. relayed: a copy goes through a second place on the device and a stream of its
    own, so that kernels queued behind it don't wait for the way to the host.
    """

    def __init__(self, nbytes: int, num_slots: int, copy: Callable[[Any, Any], None], relayed: bool = False):
        self.device = zeros((nbytes,), np.uint8)
        self._copy = copy
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
            self._relays = [zeros((nbytes,), np.uint8) for _ in range(num_slots)]  # copies look further than they write
            self._stream = cupy.cuda.Stream(non_blocking=True)
            self._ready = cupy.cuda.Event(disable_timing=True)

    def send(self, slot: int) -> None:
        """Queue the copy to a slot on CuPy's current stream; part of the graph, where one is captured.

        A relayed one can't be part of a graph.
        """
        host = self.hosts[slot]
        if SIMULATED:
            self._copy(np.asarray(self.device).view(np.int64), host.view(np.int64))
            return
        import cupy

        stream, source = cupy.cuda.get_current_stream(), self.device.data.ptr
        if self._relays:
            relay = self._relays[slot].data.ptr
            self._copy(source, relay)
            self._ready.record(stream)
            self._stream.wait_event(self._ready)
            source, stream = relay, self._stream
        with stream:
            self._copy(source, host.ctypes.data)
        if not stream.is_capturing():
            self._events[slot].record(stream)

    def wait(self, slot: int) -> None:
        """Until the slot's last copy, queued outside a graph, is done."""
        if not SIMULATED:
            self._events[slot].synchronize()

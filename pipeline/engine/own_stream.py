"""The stream that an engine's rounds are queued on, in order with the caller's."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch

import gpu


class OwnStream:
    """A CUDA stream beside the one that is current where `entered` is called, or nothing on the CPU.

    A step enters it once a round, so its events are made once, and no more is asked of torch than has to be.
    """

    def __init__(self, device: torch.device):
        self._stream = None
        if device.type == "cuda":
            self._stream = torch.cuda.Stream(device)
            self._before, self._after = torch.cuda.Event(), torch.cuda.Event()

    @contextmanager
    def entered(self) -> Iterator[None]:
        """What is queued inside runs behind what the caller's stream holds, and before what that gets afterwards.

        `gpu` queues its work here too. No gradients are recorded.
        """
        own = self._stream
        with torch.inference_mode():
            if own is None:
                yield
                return
            with torch.cuda.device(own.device_index):
                outer = torch.cuda.current_stream(own.device_index)
                self._before.record(outer)
                own.wait_event(self._before)
                torch.cuda.set_stream(own)
                try:
                    with gpu.on_stream(own.cuda_stream):
                        yield
                finally:
                    torch.cuda.set_stream(outer)
                    self._after.record(own)
                    outer.wait_event(self._after)

"""Work beside other work of a round: a second stream that leaves the first one and comes back to it."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch


class Branch:
    """What a draft takes in of a block doesn't wait for the block's verification, nor that for it.

    In a CUDA graph the kernels of both run side by side. Tensors made on one side and read on the other must be held
    until `join`: the allocator doesn't know that they are in use. On the CPU one follows the other.
    """

    def __init__(self, device: torch.device):
        self._device = device
        self._stream = torch.cuda.Stream(device) if device.type == "cuda" else None

    @contextmanager
    def beside(self) -> Iterator[None]:
        """What is queued inside runs behind what the current stream holds, beside what it gets up to `join`."""
        if self._stream is None:
            yield
            return
        self._stream.wait_stream(torch.cuda.current_stream(self._device))
        with torch.cuda.stream(self._stream):
            yield

    def join(self) -> None:
        """What is queued from now on runs behind both."""
        if self._stream is not None:
            torch.cuda.current_stream(self._device).wait_stream(self._stream)

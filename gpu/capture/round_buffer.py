"""The results of a round in one buffer on the device, which one asynchronous copy of what is used brings to the host.

A decoding loop works one round behind: it sends a round's results when its kernels are queued, and receives those of
the round before while the device goes on.

    buffer = RoundBuffer(batch, width, room)
    run_round(..., out=(None, *buffer.out))     # in a CUDA graph, if wanted, with buffer.send(slot)
    buffer.send(slot)
    verdict, capture = buffer.receive(slot)     # waits for that copy only

With `relayed`, sending never delays the kernels queued behind it, and is no part of a graph. With `top`, there is also
room for the largest log-probabilities of every row (`buffer.top`, for `top_logprobs`), received by `receive_top`.
"""

from functools import partial
from typing import Any

import numpy as np

from gpu.capture.device import new_progress
from gpu.capture.record import Capture
from gpu.capture.relay import Layout, relay, relay_kernel
from gpu.device.transfer import Mirror
from gpu.verification import Verdict

_ALIGNED = 256  # bytes


class RoundBuffer:
    """Room for the Verdict and the Capture of B requests of W rows, on the device and in pinned memory."""

    def __init__(self, batch: int, width: int, room: int, num_slots: int = 2, *, top: int = 0, relayed: bool = False):
        """room: entries of all masks together; num_slots: pinned copies, used in turn. ValueError if not positive."""
        for name, value in (("batch", batch), ("width", width), ("room", room), ("num_slots", num_slots)):
            if value < 1:
                raise ValueError(f"{name}={value}, expected at least 1")
        self.room = room
        rows = batch * width
        self._fields: dict[str, tuple[tuple[int, ...], type]] = {
            "num_accepted": ((batch,), np.int32),
            "num_committed": ((batch,), np.int32),
            "tokens": ((batch, width), np.int32),
            "token_logprobs": ((batch, width), np.float32),
            "verdict_status": ((batch,), np.uint8),
            "error_row": ((batch,), np.int32),
            "status": ((batch,), np.uint8),
            "failed_row": ((batch,), np.int32),
            "counts": ((batch, width), np.int32),
            "row_start": ((batch + 1,), np.int64),
            "offsets": ((rows + 1,), np.int64),
            "top_ids": ((rows, top), np.int32),
            "top_values": ((rows, top), np.float32),
            "token_ids": ((room,), np.int32),
            "logprobs": ((room,), np.float32),
        }
        self._begin, size = {}, 0
        for name, (shape, dtype) in self._fields.items():
            self._begin[name] = size
            size += -(-int(np.prod(shape)) * np.dtype(dtype).itemsize // _ALIGNED) * _ALIGNED
        word = {name: begin // 8 for name, begin in self._begin.items()}
        ids, logprobs = word["token_ids"], word["logprobs"]
        # Behind the last row, offsets repeat the number of all entries.
        layout = Layout(ids, word["offsets"] + rows, ids, logprobs, room)
        relay_kernel().load()  # not at the first send, which a graph may be capturing
        self._mirror = Mirror(size, num_slots, partial(relay, layout=layout), relayed)
        self._hosts = [self._views(host) for host in self._mirror.hosts]  # once for all: to make them takes a while
        views = self._views(self._mirror.device)
        self.out: tuple[Verdict, Capture] = self._records(views, new_progress(batch))
        self.top: tuple[Any, Any] = views["top_ids"], views["top_values"]

    @property
    def nbytes(self) -> int:
        """Bytes of the whole; a copy moves the fixed part and the entries in use."""
        return self._mirror.device.nbytes

    def send(self, slot: int = 0) -> None:
        """Queue the copy of the device's results to a slot, on CuPy's current stream.

        In a CUDA graph the copy becomes part of it, and the caller waits for the graph before `view`.
        """
        self._mirror.send(slot)

    def receive(self, slot: int = 0) -> tuple[Verdict, Capture]:
        """Wait for the slot's copy and return it as NumPy views, the capture cut to the size that it has.

        The views are overwritten by the next send to this slot. ValueError if the masks didn't fit the room; the
        device still has all: capture_masks without `out` writes them again.
        """
        self._mirror.wait(slot)
        return self.view(slot)

    def view(self, slot: int = 0) -> tuple[Verdict, Capture]:
        """receive without waiting: for a caller who knows that the copy is done (the end of a graph, say)."""
        verdict, capture = self._records(self._hosts[slot], None)
        num_rows = int(capture.row_start[-1])
        needed = int(capture.offsets[num_rows])
        if needed > self.room:
            raise ValueError(f"room={self.room}, expected at least {needed} entries for the masks of this round")
        return verdict, Capture(
            capture.status, capture.failed_row, capture.counts, capture.row_start, capture.offsets[: num_rows + 1],
            capture.token_ids[:needed], capture.logprobs[:needed],
        )  # fmt: skip

    def receive_top(self, slot: int = 0) -> tuple[Any, Any]:
        """Ids int32 and log-probabilities float32 [B*W, top] of the slot's copy, as views; waits for it."""
        self._mirror.wait(slot)
        views = self._hosts[slot]
        return views["top_ids"], views["top_values"]

    def _views(self, buffer: Any) -> dict[str, Any]:
        views = {}
        for name, (shape, dtype) in self._fields.items():
            begin = self._begin[name]
            nbytes = int(np.prod(shape)) * np.dtype(dtype).itemsize
            views[name] = buffer[begin : begin + nbytes].view(dtype).reshape(shape)
        return views

    @staticmethod
    def _records(views: dict[str, Any], progress: Any) -> tuple[Verdict, Capture]:
        verdict = Verdict(
            views["num_accepted"], views["num_committed"], views["tokens"], views["token_logprobs"],
            views["verdict_status"], views["error_row"],
        )  # fmt: skip
        capture = Capture(
            views["status"], views["failed_row"], views["counts"], views["row_start"], views["offsets"],
            views["token_ids"], views["logprobs"], progress,
        )  # fmt: skip
        return verdict, capture

"""A round's results on their way to the host, two rounds at a time."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any, Protocol

import numpy as np

import gpu


@dataclass(frozen=True)
class Results:
    """What a round committed, on the host. Tokens, masks and log-probabilities are arrays of their own; the rest may be
    views that are good until the second next round of the same shape.

    capture: None where the round captured nothing. top_ids, top_values: int32 and float32 [B * W, K], or None.
    """

    verdict: gpu.Verdict
    capture: gpu.Capture | None
    top_ids: np.ndarray | None
    top_values: np.ndarray | None


class Outbox(Protocol):
    """Where a round writes, and from where the host reads.

    records, top: memory for the kernels' `out`, None where they make their own.
    """

    records: tuple[gpu.Verdict, gpu.Capture] | None
    top: tuple[Any, Any] | None

    def keep(self, verdict: gpu.Verdict, capture: gpu.Capture | None, top: tuple[Any, Any] | None) -> None:
        """What the kernels returned, inside the round."""

    def send(self, place: int) -> None:
        """Queue the way to the host, to one of two places, after the round."""

    def receive(self, place: int) -> Results:
        """Wait for what was sent to this place."""


class DeviceOutbox:
    """On CUDA: a `gpu.RoundBuffer` whose copies overlap the next round."""

    def __init__(self, batch: int, width: int, room: int, top: int, masks: bool):
        self._buffer = gpu.RoundBuffer(batch, width, room if masks else 1, top=top, relayed=True)
        self._masks, self._top = masks, top
        self.records: tuple[gpu.Verdict, gpu.Capture] | None = self._buffer.out
        self.top: tuple[Any, Any] | None = self._buffer.top if top else None

    def keep(self, verdict: gpu.Verdict, capture: gpu.Capture | None, top: tuple[Any, Any] | None) -> None:
        """Nothing: the kernels wrote to the buffer."""

    def send(self, place: int) -> None:
        """See `Outbox`."""
        self._buffer.send(place)

    def receive(self, place: int) -> Results:
        """See `Outbox`."""
        verdict, capture = self._buffer.receive(place)
        ids, values = self._buffer.receive_top(place) if self._top else (None, None)
        return Results(
            replace(verdict, tokens=verdict.tokens.copy(), logprobs=verdict.logprobs.copy()),
            replace(capture, token_ids=capture.token_ids.copy(), logprobs=capture.logprobs.copy())
            if self._masks
            else None,
            ids,
            values,
        )


class HostOutbox:
    """On the CPU: the records themselves."""

    records: tuple[gpu.Verdict, gpu.Capture] | None = None
    top: tuple[Any, Any] | None = None

    def __init__(self) -> None:
        self._kept: Results | None = None
        self._sent: list[Results | None] = [None, None]

    def keep(self, verdict: gpu.Verdict, capture: gpu.Capture | None, top: tuple[Any, Any] | None) -> None:
        """See `Outbox`."""
        ids, values = top or (None, None)
        self._kept = Results(verdict, capture, ids, values)

    def send(self, place: int) -> None:
        """See `Outbox`."""
        self._sent[place], self._kept = self._kept, None

    def receive(self, place: int) -> Results:
        """See `Outbox`."""
        results, self._sent[place] = self._sent[place], None
        assert results is not None
        return results

"""The tokens of every slot's request on the device, for proposers that look things up in them."""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np
import torch

from pipeline.arrays import send
from pipeline.batch.request import Request


class Histories:
    """Prompt and output of S slots of up to L tokens; token i of a request is at its position, i.

    Rounds append what they commit (`gpu.append_tokens`); of a slot whose newest token is at `start`, the first
    ``start + 1`` are its own.
    """

    def __init__(self, num_slots: int, max_length: int, device: torch.device):
        self._tokens = torch.zeros(num_slots, max_length, dtype=torch.int32, device=device)

    def of(self, batch: int) -> torch.Tensor:
        """int32 [batch, L], contiguous."""
        return self._tokens[:batch]

    def write(self, requests: Mapping[int, Request | None]) -> None:
        """Put the tokens of these slots' requests in their places, behind what is queued."""
        for slot, request in requests.items():
            if request is not None:
                tokens = np.concatenate([request.prompt.token_ids, np.array(request.token_ids, np.int32)])
                self._tokens[slot, : len(tokens)].copy_(send(tokens.astype(np.int32), self._tokens.device))

    def move(self, source: int, target: int) -> None:
        """Copy a slot to another as it is on the device."""
        self._tokens[target].copy_(self._tokens[source])

"""What the rows of a round may be, from the host while the round's target runs."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import torch

import gpu
from model_loaders.drafts.proposal import ProposalLaw
from pipeline.arrays import array_of, send


class Restriction:
    """The memory of a round in pieces, for B slots of W rows over V tokens: what lies between the pieces, and masks.

    Attributes:
        logits: [B, W, V], of the target's dtype.
        law: Of the last drafts that were drawn; None before any.
    """

    def __init__(self, batch: int, width: int, vocabulary: int, dtype: torch.dtype, device: torch.device):
        self.logits = torch.empty(batch, width, vocabulary, dtype=dtype, device=device)
        self.law: ProposalLaw | None = None
        self._allowed = torch.zeros(batch * width, -(-vocabulary // 32), dtype=torch.int32, device=device)
        self._rows = torch.full((batch, width), -1, dtype=torch.int32, device=device)
        on_cuda = device.type == "cuda"
        self._drafts = torch.zeros(batch, width - 1, dtype=torch.int32, pin_memory=on_cuda)
        self._num_drafts = torch.zeros(batch, dtype=torch.int32, pin_memory=on_cuda)
        self._fetched = torch.cuda.Event() if on_cuda else None

    def keep_logits(self, logits: torch.Tensor) -> None:
        """Inside a piece: for the next one."""
        self.logits.copy_(logits)

    def keep_law(self, law: ProposalLaw | None) -> None:
        """Inside a piece: for a later one."""
        if law is None:
            return
        if self.law is None:  # the first time, which no graph holds
            ids = None if law.token_ids is None else law.token_ids.clone()
            self.law = replace(law, logits=law.logits.clone(), token_ids=ids)
            return
        self.law.logits.copy_(law.logits)
        if self.law.token_ids is not None and law.token_ids is not None:
            self.law.token_ids.copy_(law.token_ids)

    def fetch(self, drafts: torch.Tensor, num_drafts: torch.Tensor) -> None:
        """Queue the way of the drafts int32 [B, W - 1] and their numbers int32 [B] to the host."""
        self._drafts.copy_(drafts, non_blocking=True)
        self._num_drafts.copy_(num_drafts, non_blocking=True)
        if self._fetched is not None:
            self._fetched.record(torch.cuda.current_stream(drafts.device))

    def drafts(self) -> tuple[np.ndarray, np.ndarray]:
        """What was fetched; waits for that, and for nothing behind it."""
        if self._fetched is not None:
            self._fetched.synchronize()
        return self._drafts.numpy(), self._num_drafts.numpy()

    def put(self, allowed: np.ndarray, rows: np.ndarray) -> None:
        """Queue the way of masks int32 [N, ceil(V / 32)] and of which one is a row's, int32 [B, W], to the device."""
        self._allowed[: len(allowed)].copy_(send(allowed, self._allowed.device))
        self._rows.copy_(send(rows, self._rows.device))

    def restrict(self, logits: Any) -> None:
        """Inside a piece: restrict logits [B, W, V] in place."""
        gpu.restrict_logits(logits, array_of(self._allowed), array_of(self._rows))

"""Penalties, biases and the ban on early endings, on the device, each verify row on its own prefix.

The order and the rounding are those of `gpu.adjust_logits` and `pipeline.stages.adjust`; the history is kept densely, a
count a token, because it grows on the device before the host has read what was committed.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np
import torch

from pipeline.engine.arrays import send
from pipeline.request import Request

_REPETITION, _FREQUENCY, _PRESENCE = range(3)


class Adjusting:
    """The histories and biases of S slots over V tokens: 10 bytes a slot and token.

    A slot that nobody adjusts is neutral.
    """

    def __init__(self, num_slots: int, vocabulary: int, device: torch.device):
        self.device, self.vocabulary = device, vocabulary
        self._counts = torch.zeros(num_slots, vocabulary, dtype=torch.int32, device=device)
        self._in_prompt = torch.zeros(num_slots, vocabulary, dtype=torch.bool, device=device)
        self._bias = torch.zeros(num_slots, vocabulary, dtype=torch.float32, device=device)
        self._endings = torch.zeros(num_slots, vocabulary, dtype=torch.bool, device=device)
        self._penalties = torch.zeros(3, num_slots, dtype=torch.float32, device=device)
        self._penalties[_REPETITION] = 1.0
        self._min_new = torch.zeros(num_slots, dtype=torch.int64, device=device)
        self._used: set[int] = set()

    def write(self, requests: Mapping[int, Request | None]) -> None:
        """Put the requests of these slots in their places, behind what is queued."""
        for slot, request in requests.items():
            if request is not None and (request.params.adjusts or request.params.min_new_tokens):
                self._write(slot, request)
            elif slot in self._used:
                self._neutral(slot)

    def move(self, source: int, target: int) -> None:
        """Copy a slot to another as it is on the device."""
        self._used |= {target} if source in self._used else set()
        for tensor in (self._counts, self._in_prompt, self._bias, self._endings, self._min_new):
            tensor[target].copy_(tensor[source])
        self._penalties[:, target].copy_(self._penalties[:, source])

    def apply(self, logits: torch.Tensor, drafts: torch.Tensor, generated: torch.Tensor) -> torch.Tensor:
        """The adjusted logits float32 [B, W, V] of logits [B, W, V], drafts int64 [B, W - 1], generated int64 [B]."""
        batch, width = logits.shape[:2]
        x = logits.float()
        counts = self._counts[:batch, None]
        if width > 1:
            before = torch.zeros(logits.shape, dtype=torch.int32, device=self.device)
            before[:, 1:].scatter_(2, drafts.unsqueeze(2), 1)
            counts = counts + before.cumsum(1, dtype=torch.int32)
        repetition, frequency, presence = (self._penalties[i, :batch, None, None] for i in range(3))
        written = counts > 0
        seen = written | self._in_prompt[:batch, None]
        penalised = torch.where(x > 0, x / repetition, x * repetition)
        x = torch.where(seen & (repetition != 1), penalised, x)
        x = torch.where(written, x - frequency * counts.float() - presence, x)
        x = x + self._bias[:batch, None]
        row = generated[:, None] + torch.arange(width, device=self.device)
        early = row < self._min_new[:batch, None]
        return x.masked_fill(self._endings[:batch, None] & early[..., None], -torch.inf)

    def count(self, tokens: torch.Tensor, num_committed: torch.Tensor, live: torch.Tensor) -> None:
        """Take in tokens int32 [B, W] of which num_committed int32 [B] were committed, of the live slots, bool [B]."""
        batch, width = tokens.shape
        kept = (torch.arange(width, device=self.device) < num_committed[:, None]) & live[:, None]
        ids = tokens.long().clamp(min=0)
        self._counts[:batch].scatter_add_(1, ids, kept.int())

    def _neutral(self, slot: int) -> None:
        self._used.discard(slot)
        for tensor in (self._counts, self._in_prompt, self._bias, self._endings, self._min_new):
            tensor[slot].zero_()
        self._penalties[:, slot].zero_()
        self._penalties[_REPETITION, slot].fill_(1.0)

    def _write(self, slot: int, request: Request) -> None:
        self._used.add(slot)
        params = request.params
        in_prompt, endings = np.zeros(self.vocabulary, np.bool_), np.zeros(self.vocabulary, np.bool_)
        in_prompt[request.prompt.token_ids] = True
        endings[list(request.scanner.ending_ids)] = True
        counts = np.bincount(np.array(request.token_ids, np.int64), minlength=self.vocabulary).astype(np.int32)
        bias = np.zeros(self.vocabulary, np.float32)
        for token, value in (params.logit_bias or {}).items():
            bias[token] = value
        penalties = [params.repetition_penalty, params.frequency_penalty, params.presence_penalty]
        values: list[tuple[torch.Tensor, Any]] = [
            (self._counts[slot], counts),
            (self._in_prompt[slot], in_prompt),
            (self._bias[slot], bias),
            (self._endings[slot], endings),
            (self._penalties[:, slot], np.array(penalties, np.float32)),
            (self._min_new[slot : slot + 1], np.array([params.min_new_tokens], np.int64)),
        ]
        for tensor, value in values:
            tensor.copy_(send(value, self.device))

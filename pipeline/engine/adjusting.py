"""The memory of slots' penalties, biases and bans, which `gpu.adjust_logits` reads and `gpu.count_committed` keeps up.

It is dense, a word and a bias a token, because it grows on the device before the host has read what was committed.
"""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np
import torch

import gpu
from pipeline.arrays import array_of, send
from pipeline.batch.request import Request

_PENALTIES = ("repetition_penalty", "frequency_penalty", "presence_penalty")
_NEUTRAL = (1.0, 0.0, 0.0)


class Adjusting:
    """The histories and biases of S slots over V tokens. A slot that nobody adjusts is neutral."""

    BYTES_A_TOKEN = 8  # of a slot: a word and a bias

    def __init__(self, num_slots: int, vocabulary: int, device: torch.device):
        self.device, self.vocabulary = device, vocabulary
        self._words = torch.zeros(num_slots, vocabulary, dtype=torch.int32, device=device)
        self._bias = torch.zeros(num_slots, vocabulary, dtype=torch.float32, device=device)
        self._penalties = torch.tensor(_NEUTRAL, dtype=torch.float32, device=device).unsqueeze(1).repeat(1, num_slots)
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
        for tensor in (self._words, self._bias, self._min_new):
            tensor[target].copy_(tensor[source])
        self._penalties[:, target].copy_(self._penalties[:, source])

    def apply(
        self, logits: torch.Tensor, drafts: torch.Tensor, num_drafts: torch.Tensor, generated: torch.Tensor
    ) -> torch.Tensor:
        """The adjusted logits, float32 [B, W, V], of the first B slots.

        Args:
            logits: [B, W, V].
            drafts: int32 [B, W - 1].
            num_drafts: int32 [B]; rows behind these drafts aren't adjusted.
            generated: int64 [B], tokens of the output.
        """
        batch = len(logits)
        adjusted = torch.empty(logits.shape, dtype=torch.float32, device=self.device)
        history = gpu.SlotHistory(
            words=array_of(self._words[:batch]),
            bias=array_of(self._bias[:batch]),
            generated=array_of(generated),
            min_new_tokens=array_of(self._min_new[:batch]),
        )
        gpu.adjust_logits(
            array_of(logits),
            array_of(drafts),
            array_of(num_drafts),
            history=history,
            **{name: array_of(row[:batch]) for name, row in zip(_PENALTIES, self._penalties, strict=True)},
            out=array_of(adjusted),
        )
        return adjusted

    def count(self, verdict: gpu.Verdict, phases: torch.Tensor, phase: int) -> None:
        """Take in what a round of this phase committed; phases int32 [B], before the slots move on."""
        batch = len(phases)
        gpu.count_committed(array_of(self._words[:batch]), verdict, array_of(phases), phase)

    def _neutral(self, slot: int) -> None:
        self._used.discard(slot)
        for tensor in (self._words, self._bias, self._min_new):
            tensor[slot].zero_()
        self._penalties[:, slot].copy_(send(np.array(_NEUTRAL, np.float32), self.device))

    def _write(self, slot: int, request: Request) -> None:
        self._used.add(slot)
        params = request.params
        words = gpu.history_words(
            self.vocabulary,
            request.prompt.token_ids,
            np.array(request.token_ids, np.int32),
            request.scanner.ending_ids,
        )
        bias = np.zeros(self.vocabulary, np.float32)
        for token, value in (params.logit_bias or {}).items():
            bias[token] = value
        penalties = np.array([getattr(params, name) for name in _PENALTIES], np.float32)
        self._words[slot].copy_(send(words, self.device))
        self._bias[slot].copy_(send(bias, self.device))
        self._penalties[:, slot].copy_(send(penalties, self.device))
        # A grammar's masks ban early endings themselves.
        self._min_new[slot].fill_(0 if request.grammar is not None else params.min_new_tokens)

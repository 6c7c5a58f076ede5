"""The batch to run through the trained model, and where its logits of every token are."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from pipeline.errors import InvalidRequest
from pipeline.results.rollout import Rollout


@dataclass(frozen=True, eq=False)
class Sequences:
    """B rollouts, prompt and output, padded on the right to the longest, L.

    ``logits = model(input_ids=s.input_ids, attention_mask=s.attention_mask).logits[s.rows, s.positions]`` are the
    logits [n, V] of the recorded tokens, in the order of `Recorded`: those of a token stand at the position before it.

    Attributes:
        input_ids: int64 [B, L].
        attention_mask: int64 [B, L], 0 on the padding.
        rows, positions: int64 [n].
    """

    input_ids: torch.Tensor
    attention_mask: torch.Tensor
    rows: torch.Tensor
    positions: torch.Tensor

    @classmethod
    def from_rollouts(cls, rollouts: Sequence[Rollout], pad_token_id: int = 0) -> Sequences:
        """Side by side in the order given.

        Raises:
            InvalidRequest: No rollouts, or one that failed, by its index.
        """
        if not rollouts:
            raise InvalidRequest("rollouts=[], expected at least one")
        for i, rollout in enumerate(rollouts):
            if not rollout.ok:
                raise InvalidRequest(
                    f"rollouts[{i}].error={rollout.error!r}, expected finished rollouts: leave those in `failed` out"
                )
        lengths = [len(rollout.prompt_token_ids) + len(rollout.token_ids) for rollout in rollouts]
        input_ids = torch.full((len(rollouts), max(lengths)), pad_token_id, dtype=torch.int64)
        attention_mask = torch.zeros_like(input_ids)
        rows, positions = [], []
        for i, (rollout, length) in enumerate(zip(rollouts, lengths, strict=True)):
            start = len(rollout.prompt_token_ids)
            input_ids[i, :start] = torch.from_numpy(rollout.prompt_token_ids)
            input_ids[i, start:length] = torch.from_numpy(rollout.token_ids)
            attention_mask[i, :length] = 1
            rows.append(torch.full((length - start,), i))
            positions.append(torch.arange(start - 1, length - 1))
        return cls(input_ids, attention_mask, torch.cat(rows), torch.cat(positions))

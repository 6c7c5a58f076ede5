"""What a draft offers to the pipeline, and how its tokens are chosen or drawn.

A drawn token needs its law: verification accepts it against the very numbers that it was drawn from. So whoever
verifies draws, from the logits that a draft hands over, and finds the law in the same logits again.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

Draw = Callable[[Tensor, int], Tensor]
"""Draws drafts k..k+w-1 of every row from logits [b, w, n]: of (logits, k), the entries, int64 [b, w].

The logits must stay as they are until their drafts are verified, drafts that are drawn one after another in one tensor
[b, D, n] of which each call gets a part.
"""


@dataclass(frozen=True)
class ProposalLaw:
    """What drafts were drawn from: the softmax of these logits under the policy of each row's request.

    logits: [b, D, n]. Where the n entries aren't the tokens themselves, one of the others says which tokens they are.
    entry_of: int32 [V], a token's entry, -1 for one that isn't proposed. token_ids: int32 [b, D, n], ascending.
    """

    logits: Tensor
    entry_of: Tensor | None = None
    token_ids: Tensor | None = None

    def dense(self, probs: Tensor, vocab_size: int) -> Tensor:
        """Probabilities [b, D, n] of the entries as those of all tokens, [b, D, vocab_size]."""
        if self.token_ids is not None:
            whole = probs.new_zeros(*probs.shape[:2], vocab_size)
            return whole.scatter_(2, self.token_ids.long(), probs)
        if self.entry_of is None:
            return probs
        return torch.where(self.entry_of >= 0, probs[..., self.entry_of.clamp(min=0).long()], 0.0)


@dataclass(frozen=True)
class Drafted:
    """The proposal of one round, on the draft's device.

    tokens: int64 [b, D], in the target's vocabulary. law: what they were drawn from; None where all were chosen.
    confidence: computes float32 [b, D], the draft's own guess that draft k is accepted if all before it are, made from
    the tokens before k and never from draft k itself; None for a draft without a confidence head.
    """

    tokens: Tensor
    law: ProposalLaw | None = None
    confidence: Callable[[], Tensor] | None = None


def pick(logits: Tensor, k: int, draw: Draw | None) -> Tensor:
    """Entries int64 [b, w] of logits [b, w, n] of drafts k..k+w-1: drawn, or the likeliest."""
    return logits.argmax(-1) if draw is None else draw(logits, k)


def pick_in_turn(
    num_drafts: int,
    anchors: Tensor,
    logits_of: Callable[[int, Tensor], Tensor],
    token_of: Callable[[int, Tensor], Tensor],
    draw: Draw | None,
) -> Tensor:
    """Draft after draft, left to right: tokens int64 [b, D].

    logits_of(k, previous int64 [b]) -> [b, 1, n]: draft k's logits after the token before it, the anchor for k = 0.
    token_of(k, index int64 [b]) -> int64 [b]: the target's token of an entry.
    """
    previous, tokens = anchors, []
    for k in range(num_drafts):
        previous = token_of(k, pick(logits_of(k, previous), k, draw).squeeze(1))
        tokens.append(previous)
    return torch.stack(tokens, 1)

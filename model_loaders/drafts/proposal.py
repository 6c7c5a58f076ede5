"""What a draft offers to the pipeline, and how its tokens are chosen or drawn.

A drawn token needs its law: verification accepts it against the very numbers that it was drawn from. So a draw is
made from integers: the softmax of ``logits / temperature`` is scaled to WEIGHT_SCALE and rounded, what lies below a
floor is left out, the token is the first whose cumulative weight exceeds ``floor(u * total)``, and the law handed on is
each weight over their total, in float32. The sums are exact, so they depend on no order, and a token depends on its
logits, its floor and its uniform only.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

WEIGHT_SCALE = 2.0**46
FILTERED_FLOOR = 0.03
"""The floor for requests whose policy filters: their targets reject most of what is less likely. Any floor keeps the
law; with this one a round yields about a twentieth more than without (demo pair; top_k 32, or 64 with top_p 0.95)."""
TILE = 64


@dataclass(frozen=True)
class ProposalLaw:
    """The laws that drafts were drawn from, n entries each; one-hot for a draft that was chosen.

    probs: float32 [b, D, n], NaN throughout for a draft whose logits were NaN, +inf or all -inf.
    token_ids: int64 [b, D, n], the entries' tokens, distinct; None where entry i is token i.
    """

    probs: Tensor
    token_ids: Tensor | None = None

    def dense(self, vocab_size: int) -> Tensor:
        """The laws over the whole vocabulary: float32 [b, D, vocab_size]."""
        if self.token_ids is None:
            return self.probs
        whole = self.probs.new_zeros(*self.probs.shape[:2], vocab_size)
        return whole.scatter_(2, self.token_ids, self.probs)


@dataclass(frozen=True)
class Drafted:
    """The proposal of one round, on the draft's device.

    tokens: int64 [b, D], in the target's vocabulary. law: what they were drawn from; None where all were chosen.
    confidence: float32 [b, D], the draft's own guess that draft k is accepted if all before it are, made from
    the tokens before k and never from draft k itself; None for a draft without a confidence head.
    """

    tokens: Tensor
    law: ProposalLaw | None = None
    confidence: Tensor | None = None


class Draws(NamedTuple):
    """How the drafts of b rows are drawn.

    temperatures: float32 [b], 0 for a row whose drafts are chosen (argmax). floors: float32 [b], 0..1: tokens less
    likely than so many times the likeliest aren't drawn. uniforms: float64 [b, D] in (0, 1), a coin a draft.
    """

    temperatures: Tensor
    floors: Tensor
    uniforms: Tensor

    def of(self, k: int) -> Draws:
        """Those of draft k alone, uniforms [b, 1]."""
        return self._replace(uniforms=self.uniforms[:, k : k + 1])

    def each(self) -> Draws:
        """Those of b * D rows of one draft, row after row, uniforms [b * D, 1]."""
        shape = self.uniforms.shape
        temperatures, floors = (x.unsqueeze(1).expand(shape).reshape(-1) for x in (self.temperatures, self.floors))
        return Draws(temperatures, floors, self.uniforms.reshape(-1, 1))


def pick(logits: Tensor, draws: Draws | None) -> tuple[Tensor, Tensor | None]:
    """One entry of each row of logits [b, n]: index int64 [b], and the law it was drawn from, float32 [b, n].

    draws: with uniforms [b, 1]. Without draws the likeliest entries are chosen, and the law is None.
    """
    best = logits.argmax(-1)
    if draws is None:
        return best, None
    temperatures, floors = draws.temperatures.unsqueeze(1), draws.floors.unsqueeze(1)
    greedy = temperatures == 0
    probs = (logits.float() / torch.where(greedy, 1.0, temperatures)).softmax(-1)
    low = probs < floors * probs.amax(-1, keepdim=True)
    weights = (probs * WEIGHT_SCALE).round_().masked_fill_(low, 0.0)
    drawn, total = _first_above(weights, draws.uniforms)
    index = torch.where(greedy, best.unsqueeze(1), drawn)
    law = weights.div_(total.float()).masked_fill_(greedy, 0.0)
    law.scatter_(1, index, torch.where(greedy, 1.0, law.gather(1, index)))
    return index.squeeze(1), law


def _first_above(weights: Tensor, uniforms: Tensor) -> tuple[Tensor, Tensor]:
    """The first entry of weights [b, n] whose cumulative sum exceeds floor(u * total), int64 [b, 1]; total [b, 1].

    weights: whole numbers in float32 whose sums, below 2^53, are exact in float64. uniforms float64 [b, 1]. The sums of
    tiles first, then one tile: a cumulative sum over all entries would cost several passes.
    """
    size = weights.shape[-1]
    tiles = F.pad(weights, (0, -size % TILE)).unflatten(-1, (-1, TILE))
    sums = tiles.sum(-1, dtype=torch.float64)
    outer = sums.cumsum(-1)
    total = outer[:, -1:]
    threshold = (uniforms * total).floor()
    # The clamps are for rows of NaN, whose index means nothing.
    tile = torch.searchsorted(outer, threshold, right=True).clamp(max=outer.shape[-1] - 1)
    before = outer.gather(1, tile) - sums.gather(1, tile)
    within = tiles.gather(1, tile.unsqueeze(-1).expand(-1, -1, TILE)).squeeze(1)
    inner = before + within.double().cumsum(-1)
    return (tile * TILE + torch.searchsorted(inner, threshold, right=True)).clamp(max=size - 1), total


def pick_in_turn(
    num_drafts: int,
    anchors: Tensor,
    logits_of: Callable[[int, Tensor], Tensor],
    token_of: Callable[[int, Tensor], Tensor],
    draws: Draws | None,
) -> tuple[Tensor, Tensor | None]:
    """Draft after draft, left to right: tokens int64 [b, D] and laws float32 [b, D, n] (None if all are chosen).

    logits_of(k, previous int64 [b]) -> [b, n]: draft k's logits after the token before it, the anchor for k = 0.
    token_of(k, index int64 [b]) -> int64 [b]: the target's token of an entry.
    """
    previous, tokens, laws = anchors, [], []
    for k in range(num_drafts):
        logits = logits_of(k, previous)
        index, law = pick(logits, None if draws is None else draws.of(k))
        previous = token_of(k, index)
        tokens.append(previous)
        if law is not None:
            laws.append(law)
    return torch.stack(tokens, 1), torch.stack(laws, 1) if laws else None

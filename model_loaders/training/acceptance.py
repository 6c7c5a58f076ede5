"""Tokens a round, counted by running the rounds: propose, verify, commit, on many prompts at once.

The verification is the exact one (every committed token has the target's law), so the texts are the target's
own and the figures are what a pipeline with the same filter would see, up to its stopping rules.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Literal

import torch
from torch import Tensor

from model_loaders.drafts.block_draft import BlockDraft

Proposal = Literal["argmax", "sample"]


@dataclass(frozen=True)
class Rounds:
    """tokens, rounds int64 [n]: committed tokens (the bonus token included) and rounds of each prompt.

    reached int64 [B]: rounds that accepted at least k drafts, k = 0..B-1.
    """

    tokens: Tensor
    rounds: Tensor
    reached: Tensor

    @property
    def tokens_per_round(self) -> float:
        return float(self.tokens.sum() / self.rounds.sum().clamp(min=1))

    @property
    def by_position(self) -> list[float]:
        """Share of rounds whose first k drafts were all accepted, k = 1..B-1."""
        return [float(x) for x in self.reached[1:] / self.reached[0].clamp(min=1)]

    def part(self, rows: slice) -> float:
        """Tokens a round over some of the prompts."""
        return float(self.tokens[rows].sum() / self.rounds[rows].sum().clamp(min=1))


@torch.inference_mode()
def count_rounds(
    target: Any,
    draft: BlockDraft,
    prompts: Sequence[Sequence[int]],
    *,
    max_new_tokens: int,
    temperature: float,
    top_k: int | None = None,
    top_p: float = 1.0,
    proposal: Proposal = "argmax",
    seed: int = 0,
    shuffle_features: bool = False,
) -> Rounds:
    """Run rounds on every prompt until it has max_new_tokens or ends.

    temperature 0: greedy. top_k, then top_p filter the target's law, as in ordinary sampling. Else proposal
    "argmax" proposes the draft's likeliest tokens and accepts each with the target's probability; "sample"
    draws them from the draft's law under the same filter and verifies them as a block, both as the pipeline does.
    shuffle_features: give each row the features of its neighbour; acceptance must collapse.
    """
    device, block, rows = target.device, 1 + draft.num_drafts, len(prompts)
    generator = torch.Generator(device).manual_seed(seed)
    longest = max(len(prompt) for prompt in prompts)
    room = longest + max_new_tokens + 2 * block
    cache, draft_cache = target.new_cache(rows, room), draft.new_cache(rows, room)
    before = target.tap_layer_ids
    target.set_taps(draft.target_layer_ids)
    eos = torch.tensor(sorted(target.eos_token_ids) or [-1], device=device)

    def mixed(features: Tensor) -> Tensor:
        return features.roll(1, dims=0) if shuffle_features else features

    def filtered(logits: Tensor) -> Tensor:
        return _filter(_law(logits, temperature), top_k, top_p)

    laws: list[Tensor] = []

    def draw(logits: Tensor, k: int) -> Tensor:
        laws.append(filtered(logits.float()))
        return _draw(laws[-1], generator)

    ids = torch.zeros(rows, longest, dtype=torch.int64)
    for row, prompt in enumerate(prompts):
        ids[row, : len(prompt)] = torch.tensor(list(prompt))
    positions = torch.arange(longest, device=device).expand(rows, -1)
    last = torch.empty(rows, target.vocab_size, device=device)
    starts = torch.tensor([len(prompt) for prompt in prompts], device=device)
    for i in range(0, rows, 16):  # a few at a time: a prefill's logits are wide
        part = list(range(i, min(i + 16, rows)))
        out = target.forward(ids[part].to(device), positions[part], cache, part)
        last[part] = out.logits[torch.arange(len(part)), starts[part] - 1].float()
        draft.extend(mixed(out.features), positions[part], draft_cache, part)
    anchors = _draw(filtered(last), generator)
    tokens = torch.zeros(rows, dtype=torch.int64, device=device)
    rounds, reached = torch.zeros_like(tokens), torch.zeros(block, dtype=torch.int64, device=device)
    running = ~(anchors.unsqueeze(1) == eos).any(1)
    sampled = temperature > 0 and proposal == "sample"
    span, limit = torch.arange(block, device=device), starts + max_new_tokens
    while bool(running.any()):
        laws.clear()
        drafted = draft.propose(anchors, starts, draft_cache, draw=draw if sampled else None)
        drafts = drafted.tokens
        positions = starts.unsqueeze(1) + span
        out = target.forward(torch.cat([anchors.unsqueeze(1), drafts], 1), positions, cache)
        p = filtered(out.logits.float())
        p_drafts = p[:, :-1].gather(2, drafts.unsqueeze(2)).squeeze(2)
        coins = torch.rand(p_drafts.shape, generator=generator, device=device)
        scale = torch.ones_like(p_drafts[:, :1])
        if drafted.law is not None:
            q = drafted.law.dense(torch.cat(laws, 1), p.shape[2])
            accepted, scale = accept_block(p, q, p_drafts / q.gather(2, drafts.unsqueeze(2)).squeeze(2), coins)
        else:
            accepted = (coins < p_drafts).long().cumprod(1).sum(1)
        # The row after the last accepted draft: the residual after a rejection, the target's law otherwise.
        final = p.gather(1, accepted.view(-1, 1, 1).expand(-1, 1, p.shape[2])).squeeze(1)
        where = accepted.clamp(max=block - 2).view(-1, 1, 1)
        if drafted.law is not None:
            off = q.gather(1, where.expand(-1, 1, q.shape[2])).squeeze(1)
        else:
            off = torch.zeros_like(final).scatter_(1, drafts.gather(1, where.squeeze(2)), 2.0)
        residual = (scale * final - off).clamp(min=0)
        rejected = (accepted < block - 1).unsqueeze(1) & (residual.sum(1, keepdim=True) > 0)
        bonus = _draw(torch.where(rejected, residual, final), generator)
        committed = torch.cat([drafts, bonus.unsqueeze(1)], 1)
        committed.scatter_(1, accepted.unsqueeze(1), bonus.unsqueeze(1))
        ends = (committed.unsqueeze(2) == eos).any(2) & (span <= accepted.unsqueeze(1))
        kept = torch.where(ends.any(1), ends.long().argmax(1) + 1, accepted + 1)
        tokens += torch.where(running, kept, 0)
        rounds += running
        reached += ((accepted.unsqueeze(1) >= span) & running.unsqueeze(1)).sum(0)
        draft.extend(mixed(out.features), positions, draft_cache)
        # Rows that have ended stand still: the caches have no room for them to go on.
        going = running & ~ends.any(1) & (starts + accepted + 1 < limit)
        anchors = torch.where(going, bonus, anchors)
        starts = torch.where(going, starts + accepted + 1, starts)
        running = going
    target.set_taps(before)
    return Rounds(tokens.cpu(), rounds.cpu(), reached.cpu())


def accept_block(p: Tensor, q: Tensor, ratios: Tensor, coins: Tensor) -> tuple[Tensor, Tensor]:
    """Drafts accepted int64 [n], and the scale [n, 1] of the row behind them: Sun et al. 2024, algorithm 2.

    p [n, B, V] and q [n, B-1, V]: the laws of target and draft. ratios [n, B-1]: p / q of each draft.
    """
    scales, bounds = [torch.ones_like(ratios[:, 0])], []
    for k in range(ratios.shape[1]):
        left = (scales[k].unsqueeze(1) * p[:, k] - q[:, k]).clamp_(min=0).sum(1)
        whole = left + (1 - scales[k])
        bounds.append(torch.where(whole > 0, left / whole, 1.0))
        scales.append((scales[k] * ratios[:, k]).clamp(max=1))
    below = coins < torch.stack([*bounds[1:], scales[-1]], 1)
    accepted = (below * torch.arange(1, below.shape[1] + 1, device=below.device)).amax(1)
    return accepted, torch.stack(scales, 1).gather(1, accepted.unsqueeze(1))


def _law(logits: Tensor, temperature: float) -> Tensor:
    """Probabilities [..., V]: softmax at the temperature, one-hot at the argmax for 0."""
    if temperature == 0:
        return torch.zeros_like(logits).scatter_(-1, logits.argmax(-1, keepdim=True), 1.0)
    return (logits / temperature).softmax(-1)


def _filter(law: Tensor, top_k: int | None, top_p: float) -> Tensor:
    """The law [..., V] on its top_k tokens, then on the fewest of those that hold top_p of what is left."""
    if top_k is None and top_p >= 1:
        return law
    ordered, order = law.sort(dim=-1, descending=True, stable=True)
    if top_k is not None:
        ordered[..., top_k:] = 0
        ordered = ordered / ordered.sum(-1, keepdim=True)
    ordered = torch.where(ordered.cumsum(-1) - ordered < top_p, ordered, 0.0)
    return torch.zeros_like(law).scatter_(-1, order, ordered / ordered.sum(-1, keepdim=True))


def _draw(weights: Tensor, generator: torch.Generator) -> Tensor:
    """A sample of each row of weights [..., V] (not normalised): the largest of w / Exp(1)."""
    noise = torch.empty_like(weights).exponential_(generator=generator).clamp_(min=1e-20)
    return (weights / noise).argmax(-1)

"""One training step of a DFlash draft: random anchors, the block mask, the loss (arXiv 2602.06036, section
4).

Each anchor's block sees the context strictly before the anchor and itself, never another block, so all blocks
of a text train in one forward. The loss is cross-entropy on the target's own tokens, draft k of a block
weighted exp(-(k-1)/gamma): an early mistake costs all that follows.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.func import functional_call

from model_loaders.drafts.backbone import Backbone
from model_loaders.training.dataset import Batch


@dataclass(frozen=True)
class StepStats:
    """Sums over one batch. Divide by ``counts`` for means.

    loss: scalar, the weighted mean. hits float32 [B-1]: drafts whose argmax is the text's token, by position.
    mass float32 [B-1]: the target's probability of the draft's argmax (0 where it wasn't computed).
    counts float32 [B-1]: drafts inside their text.
    """

    loss: Tensor
    hits: Tensor
    mass: Tensor
    counts: Tensor


def draw_anchors(batch: Batch, count: int, generator: torch.Generator) -> tuple[Tensor, Tensor]:
    """Distinct random anchors int64 [b, count], sorted, and which are real (bool): short texts have fewer.

    An anchor is an answer's token that isn't its last, as in decoding, where the first anchor is the first
    token sampled from the prompt.
    """
    at = torch.arange(batch.tokens.shape[1], device=batch.tokens.device)
    allowed = (at >= batch.answer_starts[:, None]) & (at < batch.lengths[:, None] - 1)
    keys = torch.rand(batch.tokens.shape, generator=generator, device=batch.tokens.device)
    chosen = torch.where(allowed, keys, -1.0).topk(min(count, at.shape[0]), dim=1)
    anchors, order = chosen.indices.sort(dim=1)
    return anchors, (chosen.values >= 0).gather(1, order)


def block_hidden(
    module: Backbone,
    x: Tensor,
    features: Tensor,
    anchors: Tensor,
    parameters: dict[str, Tensor] | None = None,
) -> Tensor:
    """Hidden states [b, A, B, d] of blocks x [b, A, B, d] at anchors [b, A], given features [b, L, m*d].

    parameters: used in the module's place (a copy of lower precision); gradients flow to them.
    """
    b, count, block, d = x.shape
    positions = anchors.unsqueeze(-1) + torch.arange(block, device=x.device)
    step = _Blocks(module)
    named = {f"module.{name}": tensor for name, tensor in (parameters or {}).items()}
    args = (x.reshape(b, count * block, d), features, positions)
    return functional_call(step, named, args).view(b, count, block, d)


class _Blocks(torch.nn.Module):
    """The forward of all blocks of a batch as one module, so that functional_call can swap its parameters."""

    def __init__(self, module: Backbone):
        super().__init__()
        self.module = module

    def forward(self, x: Tensor, features: Tensor, positions: Tensor) -> Tensor:
        at = torch.arange(features.shape[1], device=x.device).expand(features.shape[0], -1)
        context = self.module.context_keys_values(features, at)

        def attend_to(layer: int, keys: Tensor, values: Tensor) -> tuple[Tensor, Tensor]:
            return torch.cat([context[layer][0], keys], 2), torch.cat([context[layer][1], values], 2)

        return self.module(x, positions.flatten(1), attend_to, self._masks(positions, features.shape[1]))

    def _masks(self, positions: Tensor, length: int) -> list[Tensor]:
        """Each layer's boolean mask [b, 1, A*B, L + A*B] for block positions [b, A, B]."""
        config, (b, count, block) = self.module.config, positions.shape
        query = positions.flatten(1).unsqueeze(-1)
        start = positions[..., :1].expand(-1, -1, block).flatten(1).unsqueeze(-1)
        key = torch.arange(length, device=positions.device)
        own = torch.arange(count * block, device=positions.device) // block
        same = (own.unsqueeze(1) == own).expand(b, -1, -1)
        made: dict[tuple[bool, int | None], Tensor] = {}
        masks = []
        for layer in range(config.num_layers):
            causal, window = kind = (config.is_causal(layer), config.window(layer))
            if kind not in made:
                context, inside = key < start, same
                distance = query - positions.flatten(1).unsqueeze(1)
                if causal:
                    inside = inside & (distance >= 0)
                if window is not None:
                    context = context & (query - key < window)
                    inside = inside & (distance.abs() < window)
                made[kind] = torch.cat([context, inside], -1).unsqueeze(1)
            masks.append(made[kind])
        return masks


def block_loss(
    hidden: Tensor,
    head: Callable[[Tensor], Tensor],
    batch: Batch,
    anchors: Tensor,
    real: Tensor,
    *,
    gamma: float,
    soft: float = 0.0,
    target_hidden: Tensor | None = None,
    backward: bool = False,
    rows_at_once: int = 8192,
) -> StepStats:
    """The loss of blocks' hidden states [b, A, B, d] under the target's head; with backward, their gradients.

    soft: the share of the cross-entropy that is taken against the target's whole distribution instead of its
    one token; it, and ``mass``, need target_hidden [b, L, d], the states that enter the head.
    The vocabulary is wide, so the logits are made, and their gradients used up, rows_at_once at a time.
    """
    block = hidden.shape[2]
    step = torch.arange(1, block, device=hidden.device)
    at = anchors.unsqueeze(-1) + step  # [b, A, B-1]
    inside = real.unsqueeze(-1) & (at < batch.lengths[:, None, None])
    at = torch.where(inside, at, 1)
    labels = batch.tokens.gather(1, at.flatten(1)).flatten()
    weights = (inside * torch.exp(-(step - 1) / gamma)).flatten()
    weights = weights / weights.sum().clamp(min=1e-6)
    leaf = hidden.detach()[:, :, 1:].reshape(-1, hidden.shape[-1]).requires_grad_(backward)
    teacher = None
    if target_hidden is not None:
        before = (at - 1).flatten(1).unsqueeze(-1).expand(-1, -1, target_hidden.shape[-1])
        teacher = target_hidden.gather(1, before).flatten(0, 1)
    losses, hits, mass = [], [], []
    for i in range(0, leaf.shape[0], rows_at_once):
        part = slice(i, i + rows_at_once)
        with torch.set_grad_enabled(backward):
            logits = head(leaf[part]).float()
            loss = F.cross_entropy(logits, labels[part], reduction="none")
            guess = logits.detach().argmax(-1)
            if teacher is not None:
                with torch.no_grad():
                    probs = head(teacher[part]).float().softmax(-1)
                    mass.append(probs.gather(1, guess.unsqueeze(1)).squeeze(1))
                if soft:
                    loss = (1 - soft) * loss + soft * F.cross_entropy(logits, probs, reduction="none")
            loss = (loss * weights[part]).sum()
            if backward:
                loss.backward()
        losses.append(loss.detach())
        hits.append(guess == labels[part])
    if backward:
        assert leaf.grad is not None
        rows = leaf.grad.view(*hidden.shape[:2], block - 1, -1)
        hidden.backward(F.pad(rows, (0, 0, 1, 0)).to(hidden.dtype))

    def by_position(x: Tensor) -> Tensor:
        return (x.view(-1, block - 1).float() * inside.flatten(0, 1)).sum(0)

    return StepStats(
        loss=torch.stack(losses).sum(),
        hits=by_position(torch.cat(hits)),
        mass=by_position(torch.cat(mass)) if mass else torch.zeros(block - 1, device=hidden.device),
        counts=inside.flatten(0, 1).float().sum(0),
    )

"""The loss of a DSpark draft: its law near the target's, and a confidence that knows how near.

Source: DeepSpec. Previous tokens are the text's own. With P_k the target's law of the token behind row k, Q_k the
draft's and c_k its confidence:

    0.1 cross_entropy(Q_k, token) + 0.9 |P_k - Q_k|_1 + bce(c_k, 1 - |P_k - Q_k|_1 / 2),    weighted exp(-k / gamma)

1 - |P - Q|_1 / 2 = sum min(P, Q) is the share of drawn drafts that verification keeps. The bce's target is detached.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.func import functional_call

from model_loaders.drafts.dspark import DSparkConfig, DSparkModule
from model_loaders.training.blocks import StepStats
from model_loaders.training.dataset import Batch

CROSS_ENTROPY, DISTANCE, CONFIDENCE = 0.1, 0.9, 1.0
_MARKOV, _CONFIDENCE = "markov_head.", "confidence_head.proj."


def dspark_loss(
    module: DSparkModule,
    config: DSparkConfig,
    weights: dict[str, Tensor],
    hidden: Tensor,
    head: Callable[[Tensor], Tensor],
    batch: Batch,
    anchors: Tensor,
    real: Tensor,
    target_hidden: Tensor,
    *,
    gamma: float,
    backward: bool = False,
    rows_at_once: int = 8192,
) -> StepStats:
    """The loss of blocks' hidden states [b, A, B, d] under a head; with backward, the gradients of all weights.

    weights: the module's parameters by name, or copies of them. target_hidden [b, L, d]: the states that enter the
    head. The vocabulary is wide, so logits are made, and their gradients used up, rows_at_once at a time.
    """
    block = hidden.shape[2]
    step = torch.arange(block, device=hidden.device)
    at = anchors.unsqueeze(-1) + step  # the token before draft k, int64 [b, A, B]
    inside = real.unsqueeze(-1) & (at + 1 < batch.lengths[:, None, None])
    at = torch.where(inside, at, 0)
    previous = batch.tokens.gather(1, at.flatten(1)).view_as(at)
    labels = batch.tokens.gather(1, at.flatten(1) + 1).flatten()
    scale = (inside * torch.exp(-step / gamma)).flatten()
    scale = scale / scale.sum().clamp(min=1e-6)
    teacher = target_hidden.gather(1, at.flatten(1).unsqueeze(-1).expand(-1, -1, hidden.shape[-1])).flatten(0, 1)
    with torch.set_grad_enabled(backward):
        outputs = [part.flatten(0, 2) for part in _before_heads(module, config, weights, hidden, previous)]
    leaves = [part.detach().requires_grad_(backward) for part in outputs]
    losses, hits, mass = [], [], []
    for i in range(0, len(labels), rows_at_once):
        rows = slice(i, i + rows_at_once)
        with torch.set_grad_enabled(backward):
            logits, confidence = _heads(config, weights, head, [leaf[rows] for leaf in leaves])
            with torch.no_grad():
                wanted = head(teacher[rows]).float().softmax(-1)
            distance = (logits.softmax(-1) - wanted).abs().sum(-1)
            loss = CROSS_ENTROPY * F.cross_entropy(logits, labels[rows], reduction="none") + DISTANCE * distance
            if confidence is not None:
                kept = 1 - 0.5 * distance.detach()
                loss = loss + CONFIDENCE * F.binary_cross_entropy_with_logits(confidence, kept, reduction="none")
            loss = (loss * scale[rows]).sum()
            if backward:
                loss.backward()
        guess = logits.detach().argmax(-1)
        losses.append(loss.detach())
        hits.append(guess == labels[rows])
        mass.append(wanted.gather(1, guess.unsqueeze(1)).squeeze(1))
    if backward:
        used = [(out, leaf.grad) for out, leaf in zip(outputs, leaves, strict=True) if leaf.grad is not None]
        torch.autograd.backward([out for out, _ in used], [grad for _, grad in used])

    def by_position(parts: list[Tensor]) -> Tensor:
        return (torch.cat(parts).view(-1, block).float() * inside.flatten(0, 1)).sum(0)

    return StepStats(
        loss=torch.stack(losses).sum(),
        hits=by_position(hits),
        mass=by_position(mass),
        counts=inside.flatten(0, 1).float().sum(0),
    )


def _before_heads(
    module: DSparkModule, config: DSparkConfig, weights: dict[str, Tensor], hidden: Tensor, previous: Tensor
) -> list[Tensor]:
    """Hidden states [b, A, B, d] and, with a Markov head, embeddings and latents of the tokens before [b, A, B, r]."""
    if module.markov_head is None:
        return [hidden]
    named = {name.removeprefix(_MARKOV): tensor for name, tensor in weights.items() if name.startswith(_MARKOV)}
    embedded = F.embedding(previous, named["markov_w1.weight"])
    state, latents = embedded.new_zeros(*embedded.shape[:2], config.markov_rank), []
    for k in range(hidden.shape[2]):
        latent, state = functional_call(module.markov_head, named, (embedded[:, :, k], hidden[:, :, k], state))
        latents.append(latent)
    return [hidden, embedded, torch.stack(latents, 2)]


def _heads(
    config: DSparkConfig, weights: dict[str, Tensor], head: Callable[[Tensor], Tensor], rows: list[Tensor]
) -> tuple[Tensor, Tensor | None]:
    """Logits float32 [n, V] and confidence logits float32 [n] of rows of `_before_heads`."""
    logits, features = head(rows[0]).float(), rows[0]
    if len(rows) > 1:
        logits = logits + F.linear(rows[2], weights[f"{_MARKOV}markov_w2.weight"]).float()
        if config.confidence_with_markov:
            features = torch.cat((rows[0], rows[1]), -1)
    if not config.confidence_head:
        return logits, None
    confidence = F.linear(features, weights[f"{_CONFIDENCE}weight"], weights[f"{_CONFIDENCE}bias"])
    return logits, confidence.squeeze(-1).float()

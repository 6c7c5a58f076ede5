"""The loss of drafts against the laws that wrote the texts, and its gradient.

With P the law of a text's token given all before it (the target's softmax at the text's temperature, one-hot at the
token of a greedy text), Q the draft's softmax at the same temperature (at 1 for greedy texts) and c its confidence:

    cross_entropy * -sum P log Q  +  distance * |P - Q|_1  +  bce(c, 1 - |P - Q|_1 / 2),

draft k weighted exp(-(k-1) / gamma): an early mistake costs all drafts behind it.

DFlash (arXiv 2602.06036, section 4) takes the cross-entropy with the text's token, whose mean over texts is this one,
with more noise. DSpark (DeepSpec) has 0.1 and 0.9: 1 - |P - Q|_1 / 2 = sum min(P, Q) is the share of drawn drafts that
verification keeps. The bce's target is detached.

The vocabulary is wide, so the gradient of the first two terms is stated rather than recorded:

    d/dz = (cross_entropy * (Q - P) + distance * Q * (s - sum Q s)) / temperature,    s = sign(Q - P)
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from model_loaders.training.dataset import Batch

ROWS_AT_ONCE = 8192
Heads = Callable[[list[Tensor]], tuple[Tensor | None, ...]]
"""Rows of the outputs -> what `Made` holds, or as many of its parts as there are."""


@dataclass(frozen=True)
class LossWeights:
    """cross_entropy, distance: of the two terms. gamma: how slowly a draft's weight falls with its place. unary: of a
    selector's draft, the share of the loss that its logits without the selector have."""

    cross_entropy: float = 1.0
    distance: float = 0.0
    gamma: float = 4.0
    unary: float = 0.5


@dataclass(frozen=True)
class StepStats:
    """Sums over one batch. Divide by ``counts`` for means.

    loss: scalar, the weighted mean. hits float32 [K]: drafts whose argmax is the text's token, by position.
    mass float32 [K]: the probability of the draft's argmax in the text's law. overlap float32 [K]: sum min(P, Q), the
    share of drawn drafts that verification keeps. counts float32 [K]: drafts inside their text.
    """

    loss: Tensor
    hits: Tensor
    mass: Tensor
    overlap: Tensor
    counts: Tensor


class Against(NamedTuple):
    """What n drafts are held against: states that enter the target's head [n, d], tokens int64 [n], temperatures and
    weights float32 [n]."""

    states: Tensor
    tokens: Tensor
    temperatures: Tensor
    weights: Tensor

    def rows(self, part: slice) -> Against:
        return Against(*(tensor[part] for tensor in self))


class Made(NamedTuple):
    """What the heads make of n drafts: logits [n, V] and, where a method has them, confidences' logits float32 [n], and
    candidates int64 [n, K] with what a selector adds to their logits, float32 [n, K]."""

    logits: Tensor
    confidence: Tensor | None = None
    candidates: Tensor | None = None
    added: Tensor | None = None


class Compared(NamedTuple):
    """Of n drafts: the first two terms of the loss unweighted, |P - Q|_1, the argmax int64, its probability under P,
    and the weighted terms' gradient [n, V] in the logits' dtype, or by the candidates' scores float32 [n, K]."""

    losses: Tensor
    distances: Tensor
    guesses: Tensor
    mass: Tensor
    gradient: Tensor


def compare(logits: Tensor, target_logits: Tensor, against: Against, weights: LossWeights) -> Compared:
    """Drafts' logits [n, V] beside the target's, float32 inside."""
    sampled = against.temperatures > 0
    inverse = torch.where(sampled, 1 / torch.where(sampled, against.temperatures, 1.0), 1.0).unsqueeze(1)
    scaled = logits.float() * inverse
    logs = scaled.log_softmax(-1)
    law = logs.exp()
    one_hot = torch.arange(logits.shape[1], device=logits.device) == against.tokens.unsqueeze(1)
    wanted = torch.where(sampled.unsqueeze(1), (target_logits.float() * inverse).softmax(-1), one_hot.float())
    difference = law - wanted
    distances = difference.abs().sum(-1)
    sign = difference.sign()
    gradient = weights.cross_entropy * difference
    gradient = gradient + weights.distance * law * (sign - (law * sign).sum(-1, keepdim=True))
    gradient = gradient * (inverse * against.weights.unsqueeze(1))
    losses = weights.cross_entropy * -(wanted * logs).sum(-1) + weights.distance * distances
    guesses = scaled.argmax(-1)
    mass = wanted.gather(1, guesses.unsqueeze(1)).squeeze(1)
    return Compared(losses, distances, guesses, mass, gradient.to(logits.dtype))


@functools.cache
def compiled_compare() -> Callable[..., Compared]:
    """The same as one or two fused kernels: a third of the memory traffic. Compiles for seconds at first use."""
    return torch.compile(compare, dynamic=False)


def batch_loss(
    outputs: Sequence[Tensor],
    heads: Heads,
    target_head: Callable[[Tensor], Tensor],
    target_hidden: Tensor,
    batch: Batch,
    anchors: Tensor,
    real: Tensor,
    num_drafts: int,
    weights: LossWeights,
    *,
    backward: bool = False,
    comparing: Callable[..., Compared] = compare,
    choosing: Callable[..., Compared] | None = None,
    rows_at_once: int = ROWS_AT_ONCE,
) -> StepStats:
    """The loss of all drafts of a batch; with backward, the gradients of what made the outputs and of the heads.

    outputs: tensors [b, A, K, ...] from which heads makes logits and confidences. target_hidden [b, L, d]: the states
    that enter target_head. anchors int64 [b, A]: draft k is held against the token k behind them; real bool [b, A].
    comparing: `compare` or the compiled one; choosing: the same of `dflash2.compare_candidates`, for heads that make
    candidates. Logits are made, and their gradients used up, rows_at_once at a time.
    """
    against, inside = _against(target_hidden, batch, anchors, real, num_drafts, weights.gamma)
    flat = [out.flatten(0, 2) for out in outputs]
    leaves = [out.detach().requires_grad_(backward and out.requires_grad) for out in flat]
    pieces = -(-len(against.tokens) // rows_at_once)
    size = -(-len(against.tokens) // pieces)
    found: list[tuple[Tensor, ...]] = []
    for i in range(0, len(against.tokens), size):
        part = slice(i, i + size)
        with torch.set_grad_enabled(backward):
            made = Made(*heads([leaf[part] for leaf in leaves]))  # type: ignore[arg-type]
        with torch.no_grad():
            rows = against.rows(part)
            compared, loss, roots = _terms(made, target_head(rows.states), rows, weights, comparing, choosing)
        if made.confidence is not None:
            kept = 1 - 0.5 * compared.distances
            with torch.set_grad_enabled(backward):
                sure = F.binary_cross_entropy_with_logits(made.confidence, kept, weight=rows.weights, reduction="sum")
            loss = loss + sure.detach()
            roots.append((sure, None))
        if backward:
            roots = [root for root in roots if root[0].requires_grad]
            torch.autograd.backward([root for root, _ in roots], [gradient for _, gradient in roots])
        found.append((loss, compared.guesses == rows.tokens, compared.mass, 1 - 0.5 * compared.distances))
    if backward:
        used = [(out, leaf.grad) for out, leaf in zip(flat, leaves, strict=True) if leaf.grad is not None]
        torch.autograd.backward([out for out, _ in used], [gradient for _, gradient in used])

    def by_position(parts: Sequence[Tensor]) -> Tensor:
        return (torch.cat(list(parts)).view(-1, num_drafts).float() * inside.flatten(0, 1)).sum(0)

    losses, hits, mass, overlap = zip(*found, strict=True)
    return StepStats(
        loss=torch.stack(losses).sum(),
        hits=by_position(hits),
        mass=by_position(mass),
        overlap=by_position(overlap),
        counts=inside.flatten(0, 1).float().sum(0),
    )


def _terms(
    made: Made,
    target_logits: Tensor,
    rows: Against,
    weights: LossWeights,
    comparing: Callable[..., Compared],
    choosing: Callable[..., Compared] | None,
) -> tuple[Compared, Tensor, list[tuple[Tensor, Any]]]:
    """The proposal's law compared, the first two terms of the loss, and the gradients by what the heads made."""
    logits = made.logits.detach()
    if made.candidates is None:
        compared = comparing(logits, target_logits, rows, weights)
        return compared, (compared.losses * rows.weights).sum(), [(made.logits, compared.gradient)]
    assert choosing is not None
    assert made.added is not None
    unary = rows._replace(weights=rows.weights * weights.unary)
    chosen = rows._replace(weights=rows.weights * (1 - weights.unary))
    compared = choosing(logits, target_logits, made.candidates, made.added.detach(), chosen, weights)
    loss, roots = (compared.losses * chosen.weights).sum(), [(made.added, compared.gradient)]
    gradient = None
    if weights.unary:
        alone = comparing(logits, target_logits, unary, weights)
        loss, gradient = loss + (alone.losses * unary.weights).sum(), alone.gradient
    if made.logits.requires_grad:
        gradient = torch.zeros_like(logits) if gradient is None else gradient
        gradient.scatter_add_(1, made.candidates, compared.gradient.to(gradient.dtype))
        roots.append((made.logits, gradient))
    return compared, loss, roots


def _against(
    target_hidden: Tensor, batch: Batch, anchors: Tensor, real: Tensor, num_drafts: int, gamma: float
) -> tuple[Against, Tensor]:
    """What every draft is held against, and which lie inside their text, bool [b, A, K]."""
    step = torch.arange(num_drafts, device=anchors.device)
    before = anchors.unsqueeze(-1) + step  # the token before the draft, [b, A, K]
    inside = real.unsqueeze(-1) & (before + 1 < batch.lengths[:, None, None])
    at = torch.where(inside, before, 0).flatten(1)
    weights = (inside * torch.exp(-step / gamma)).flatten()
    states = target_hidden.gather(1, at.unsqueeze(-1).expand(-1, -1, target_hidden.shape[-1])).flatten(0, 1)
    temperatures = batch.temperatures.unsqueeze(1).expand_as(at).flatten()
    tokens = batch.tokens.gather(1, at + 1).flatten()
    return Against(states, tokens, temperatures, weights / weights.sum().clamp(min=1e-6)), inside

"""The score-centered loss of recorded tokens."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Literal

import numpy as np
import torch

from pipeline.centering.heads import Head, support_head, top_head
from pipeline.centering.tail import vocabulary_entries
from pipeline.centering.weights import Weights, as_weights
from pipeline.errors import InvalidRequest
from pipeline.replay.arguments import check_count, check_logits, per_token
from pipeline.replay.arrays import tensor_of
from pipeline.replay.entries import Csr, entries_of
from pipeline.replay.recorded import Recorded

TAIL_FLOOR = 1e-6
"""What a tail's mass is at least taken for."""


@dataclass(frozen=True)
class Metrics:
    """Means over the tokens.

    Attributes:
        rollout_head_mass: The rollout's probability of the heads; 1 for complete supports.
        trainer_head_mass: The trainer's.
        clip_share: The share of tokens whose own ratio f clips (TIS) or masks (MIS).
        in_head_share: The share of tokens that are in their own head.
    """

    rollout_head_mass: float
    trainer_head_mass: float
    clip_share: float
    in_head_share: float


@dataclass(frozen=True, eq=False)
class CenteredLoss:
    """Of n tokens. float64 for float64 logits, otherwise float32; on the logits' device.

    Attributes:
        loss: [n], a token's; differentiable. Take the mean, or weigh it, and go backward.
        logprobs: [n], the trainer's of the taken tokens; without a gradient.
        log_ratio: [n], trainer minus rollout; unbounded, without a gradient.
        metrics: See Metrics.
    """

    loss: torch.Tensor
    logprobs: torch.Tensor
    log_ratio: torch.Tensor
    metrics: Metrics


def score_centered_loss(
    logits: torch.Tensor,
    recorded: Recorded,
    advantages: Any,
    *,
    weights: Weights | Literal["none", "tis", "mis"] = "tis",
    head: Literal["auto", "support", "top"] = "auto",
    max_support: int | None = None,
) -> CenteredLoss:
    """The loss of `pipeline.centering`, token by token.

    Over complete supports both policies have all their mass on the head: rho is 1, and the centering is exact. Over the
    top K of an unfiltered policy the tail is modelled by its mass.

    Args:
        logits: The trainer's, [n, V], float32, bfloat16, float16 or float64, after what the rollout's parameters change
            before the temperature. On the CPU, or on CUDA with CuPy.
        recorded: The tokens' record; `Recorded.from_rollouts`.
        advantages: A number, or [n]: one a token (`Recorded.per_token`). Detached.
        weights: f: "none", "tis" (clip 2), "mis" (0.5 to 5), or TIS(...), MIS(...), Unweighted().
        head: "support": the complete supports; "top": the top K; "auto": supports where they were recorded with their
            log-probabilities.
        max_support: Refuse supports of more tokens; None: any size.

    Raises:
        InvalidRequest: A record that trainers must refuse, by row; a wrong shape, dtype or option.
    """
    check_logits(logits)
    check_count(logits, len(recorded))
    weights = as_weights(weights)
    chosen = _head(recorded, head, logits.shape[1], max_support)
    advantages = per_token("advantages", advantages, len(recorded))

    def put(array: np.ndarray, dtype: Any = np.float64) -> torch.Tensor:
        return tensor_of(array, dtype, logits.device)

    csr, in_head = Csr.of(chosen.entries, logits.device), put(chosen.in_head, np.bool_)
    if chosen.complete:
        entries = entries_of(logits, csr, put(recorded.temperature))
        tail = entries.new_zeros(len(recorded))
        rho = torch.ones_like(tail)
    else:
        entries, tail = vocabulary_entries(logits, csr, chosen.entries.offsets, in_head, put(recorded.temperature))
        rho = put(1 - chosen.mass).clamp(min=TAIL_FLOOR) / tail.detach().clamp(min=TAIL_FLOOR)
    logprobs = entries.index_select(0, put(chosen.taken, np.int64))
    held = entries.detach()
    log_ratio = logprobs.detach() - put(recorded.logprobs)
    centers = weights.of_entries(held, put(chosen.entries.logprobs)).masked_fill(~in_head, 0.0)
    # What has a factor of 0 adds nothing, also where the trainer's log-probability is -inf.
    of_tokens = weights.of_tokens(log_ratio)
    taken = of_tokens * logprobs.masked_fill(of_tokens == 0, 0.0)
    drift = csr.sum_rows(centers * entries.masked_fill(centers == 0, 0.0))
    probs = held.exp().masked_fill(~in_head, 0.0)
    loss = -put(advantages) * (taken - drift + weights.of_tail(rho) * _center(held, probs, tail, csr))
    metrics = _metrics(chosen, csr.sum_rows(probs), weights.changed(log_ratio))
    dtype = torch.float64 if logits.dtype == torch.float64 else torch.float32
    return CenteredLoss(loss.to(dtype), logprobs.detach().to(dtype), log_ratio.to(dtype), metrics)


def _head(recorded: Recorded, head: str, vocab_size: int, max_support: int | None) -> Head:
    if head == "auto":
        head = "support" if recorded.mask is not None and recorded.mask.mode == "support" else "top"
    if head == "support":
        return support_head(recorded, vocab_size, max_support)
    if head == "top":
        return top_head(recorded, vocab_size)
    raise InvalidRequest(f'head={head!r}, expected "auto", "support" or "top"')


def _center(entries: torch.Tensor, probs: torch.Tensor, tail: torch.Tensor, csr: Csr) -> torch.Tensor:
    """The sum over the head of sg[trainer_v] * log trainer_v, [n].

    Its gradient, the sum of trainer_v * grad log trainer_v = grad trainer_v, is that of the head's mass, or minus that
    of the tail's. Taken there, nothing cancels, however large a factor it gets; over a complete support it is 0.
    """
    value = csr.sum_rows(probs * entries.masked_fill(probs == 0, 0.0))
    return value - (tail - tail.detach())


def _metrics(head: Head, masses: torch.Tensor, changed: torch.Tensor) -> Metrics:
    trainer, clipped = torch.stack([masses.mean(), changed.double().mean()]).tolist()  # one wait for the device
    return Metrics(
        rollout_head_mass=float(head.mass.mean()),
        trainer_head_mass=trainer,
        clip_share=clipped,
        in_head_share=float(head.in_head[head.taken].mean()),
    )

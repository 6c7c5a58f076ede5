"""Importance ratios of the trainer's policy over the rollout's, bounded before they are exponentiated."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from pipeline.errors import InvalidRequest


@dataclass(frozen=True, eq=False)
class ImportanceRatios:
    """Of n tokens, in the dtype of the trainer's log-probabilities.

    Attributes:
        log_ratio: [n], trainer minus rollout; unbounded.
        ratio: [n], its exponential within the bounds; where bounded, without a gradient.
        bounded: bool [n], where the log-ratio was outside the bounds.
    """

    log_ratio: torch.Tensor
    ratio: torch.Tensor
    bounded: torch.Tensor


def importance_ratios(
    logprobs: torch.Tensor, recorded: Any, *, low: float = 0.0, high: float = 1e4
) -> ImportanceRatios:
    """exp(trainer - rollout) for every token, clamped to [low, high] as a logarithm: nothing can overflow.

    Args:
        logprobs: The trainer's, [n], for one from `support_logprobs`.
        recorded: The rollout's, [n]: `Rollout.logprobs`, array or tensor.
        low, high: Bounds of the ratio, 0 <= low < high; a truncated importance weight has ``high=2``.

    Raises:
        InvalidRequest: Different shapes, or bounds out of order.
    """
    if not (0 <= low < high < math.inf):
        raise InvalidRequest(f"low={low!r}, high={high!r}, expected 0 <= low < high, and high finite")
    held = recorded.detach() if isinstance(recorded, torch.Tensor) else torch.from_numpy(np.array(recorded))
    if held.shape != logprobs.shape:
        raise InvalidRequest(f"recorded: shape {list(held.shape)}, expected {list(logprobs.shape)}, as logprobs")
    log_ratio = logprobs - held.to(logprobs.device, logprobs.dtype)
    least, most = -math.inf if low == 0 else math.log(low), math.log(high)
    bounded = (log_ratio < least) | (log_ratio > most)
    return ImportanceRatios(log_ratio, log_ratio.clamp(least, most).exp(), bounded)

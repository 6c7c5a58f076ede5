"""Importance-weight functions f of the ratio r = trainer / rollout.

Each gives three things, none by exponentiating an unbounded number: f(r) of a token from log r, rollout * f(r) of a
head's entries from the two log-probabilities, and rho * f(1 / rho) of the tail's ratio rho.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Literal, Protocol

import torch

from pipeline.errors import InvalidRequest
from pipeline.replay.arguments import positive_number


class Weights(Protocol):
    """An importance-weight function; all tensors float64, without gradients."""

    def of_tokens(self, log_ratio: torch.Tensor) -> torch.Tensor:
        """f(exp(log_ratio))."""

    def of_entries(self, trainer_logprobs: torch.Tensor, rollout_logprobs: torch.Tensor) -> torch.Tensor:
        """rollout * f(trainer / rollout), for log-probabilities of at most 0."""

    def of_tail(self, rho: torch.Tensor) -> torch.Tensor:
        """rho * f(1 / rho), for a finite rho above 0."""

    def changed(self, log_ratio: torch.Tensor) -> torch.Tensor:
        """Where f(r) isn't r, bool."""


@dataclass(frozen=True)
class Unweighted:
    """f(r) = 1."""

    def of_tokens(self, log_ratio: torch.Tensor) -> torch.Tensor:
        """1."""
        return torch.ones_like(log_ratio)

    def of_entries(self, trainer_logprobs: torch.Tensor, rollout_logprobs: torch.Tensor) -> torch.Tensor:
        """rollout."""
        return rollout_logprobs.exp()

    def of_tail(self, rho: torch.Tensor) -> torch.Tensor:
        """rho."""
        return rho

    def changed(self, log_ratio: torch.Tensor) -> torch.Tensor:
        """Nowhere: no weight is clipped."""
        return torch.zeros_like(log_ratio, dtype=torch.bool)


@dataclass(frozen=True)
class TIS:
    """Truncated importance sampling: f(r) = min(r, clip).

    Raises:
        InvalidRequest: `clip` isn't a finite number above 0.
    """

    clip: float = 2.0

    def __post_init__(self) -> None:
        positive_number("clip", self.clip)

    def of_tokens(self, log_ratio: torch.Tensor) -> torch.Tensor:
        """exp(min(log r, log clip))."""
        return log_ratio.clamp(max=math.log(self.clip)).exp()

    def of_entries(self, trainer_logprobs: torch.Tensor, rollout_logprobs: torch.Tensor) -> torch.Tensor:
        """min(trainer, clip * rollout)."""
        return torch.minimum(trainer_logprobs.exp(), self.clip * rollout_logprobs.exp())

    def of_tail(self, rho: torch.Tensor) -> torch.Tensor:
        """min(1, clip * rho)."""
        return (self.clip * rho).clamp(max=1.0)

    def changed(self, log_ratio: torch.Tensor) -> torch.Tensor:
        """Where r is above the clip."""
        return log_ratio > math.log(self.clip)


@dataclass(frozen=True)
class MIS:
    """Masked importance sampling: f(r) = r inside [low, high], 0 outside.

    Raises:
        InvalidRequest: Bounds that aren't finite numbers above 0, in order.
    """

    low: float = 0.5
    high: float = 5.0

    def __post_init__(self) -> None:
        if positive_number("low", self.low) >= positive_number("high", self.high):
            raise InvalidRequest(f"low={self.low}, high={self.high}, expected low below high")

    def of_tokens(self, log_ratio: torch.Tensor) -> torch.Tensor:
        """exp(log r) where it is inside, 0 elsewhere."""
        return torch.where(self.changed(log_ratio), 0.0, log_ratio.clamp(max=math.log(self.high)).exp())

    def of_entries(self, trainer_logprobs: torch.Tensor, rollout_logprobs: torch.Tensor) -> torch.Tensor:
        """trainer where the ratio is inside, 0 elsewhere."""
        return torch.where(self.changed(trainer_logprobs - rollout_logprobs), 0.0, trainer_logprobs.exp())

    def of_tail(self, rho: torch.Tensor) -> torch.Tensor:
        """1 where rho is in [1 / high, 1 / low], 0 elsewhere."""
        return ((rho >= 1 / self.high) & (rho <= 1 / self.low)).to(rho.dtype)

    def changed(self, log_ratio: torch.Tensor) -> torch.Tensor:
        """Where r is outside the bounds."""
        return (log_ratio < math.log(self.low)) | (log_ratio > math.log(self.high))


def as_weights(weights: Weights | Literal["none", "tis", "mis"]) -> Weights:
    """The function itself, or the one of that name with its default bounds.

    Raises:
        InvalidRequest: An unknown name.
    """
    named: dict[str, Weights] = {"none": Unweighted(), "tis": TIS(), "mis": MIS()}
    if isinstance(weights, str):
        if weights not in named:
            raise InvalidRequest(
                f'weights={weights!r}, expected "none", "tis", "mis", Unweighted(), TIS(...), MIS(...)'
            )
        return named[weights]
    return weights

"""Penalties and bias, in place, each row on its own prefix."""

from gpu.adjust.adjust import adjust_logits
from gpu.adjust.record import History, LogitBias

__all__ = ["History", "LogitBias", "adjust_logits"]

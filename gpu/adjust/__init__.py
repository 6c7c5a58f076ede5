"""Penalties, bias and restriction to allowed tokens, in place, each row on its own prefix."""

from gpu.adjust.adjust import adjust_logits
from gpu.adjust.record import History, LogitBias
from gpu.adjust.restrict import restrict_logits

__all__ = ["History", "LogitBias", "adjust_logits", "restrict_logits"]

"""Penalties, bias and restriction to allowed tokens, each row on its own prefix; counting what was committed."""

from gpu.adjust.adjust import adjust_logits
from gpu.adjust.count import count_committed
from gpu.adjust.record import History, LogitBias, SlotHistory
from gpu.adjust.restrict import restrict_logits
from gpu.adjust.words import history_words

__all__ = [
    "History",
    "LogitBias",
    "SlotHistory",
    "adjust_logits",
    "count_committed",
    "history_words",
    "restrict_logits",
]

"""The k most probable tokens of a row's policy."""

from gpu.top_tokens.limit import MOST_ON_DEVICE
from gpu.top_tokens.top import top_logprobs

__all__ = ["MOST_ON_DEVICE", "top_logprobs"]

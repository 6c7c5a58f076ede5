"""The k most probable tokens of a row's policy."""

from gpu.top_tokens.top import top_logprobs

__all__ = ["top_logprobs"]

"""Where the requests of a batch stand, and the tokens that they have, moved on by what a round committed."""

from gpu.progress.advance import advance
from gpu.progress.append import append_tokens
from gpu.progress.record import DECODING, FIRST, IDLE, Progress

__all__ = ["DECODING", "FIRST", "IDLE", "Progress", "advance", "append_tokens"]

"""Where an output ends: EOS, stop tokens and stop strings, token by token."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from tokenizers.decoders import DecodeStream

from pipeline.policy.params import SamplingParams
from pipeline.results.rollout import FinishReason


class StopScanner:
    """Scans committed tokens in order and says at which one the output ends.

    Stop strings are looked for in the decoded stream, so one may span tokens, start inside an accepted block, and
    end in the middle of a token: the token that completes it is the last, and the text is cut before it.

    Args:
        params: The request's stops and limits.
        eos_token_ids: The model's own ends of sequence.
        tokenizer: transformers' fast tokenizer; needed for stop strings only.
    """

    def __init__(self, params: SamplingParams, eos_token_ids: frozenset[int], tokenizer: Any) -> None:
        self.ending_ids = frozenset(params.stop_token_ids) | (
            frozenset() if params.ignore_eos else frozenset(eos_token_ids)
        )
        self._stop_ids = frozenset(params.stop_token_ids)
        self._min_new_tokens = params.min_new_tokens
        self._stops: Sequence[str] = params.stop
        self._backend: Any = tokenizer.backend_tokenizer if self._stops else None
        self.restart(())

    def restart(self, tokens: Sequence[int]) -> None:
        """Begin anew and go through these tokens, none of which ends the output."""
        self._count = 0
        self._text = ""
        self._cut = False
        self._stream = DecodeStream(skip_special_tokens=True)
        for token in tokens:
            self.push(token)

    def push(self, token: int) -> FinishReason | None:
        """The next committed token; "eos" or "stop" if the output ends with it."""
        self._count += 1
        if token in self._stop_ids:
            return "stop"
        if token in self.ending_ids:
            return "eos"
        if self._stops and self._completes_stop(token):
            return "stop"
        return None

    def scan(self, tokens: Sequence[int]) -> tuple[int, FinishReason | None]:
        """The next committed tokens, up to one that ends the output: how many the output takes, and how it ends."""
        if not self._stops and self.ending_ids.isdisjoint(tokens):
            self._count += len(tokens)
            return len(tokens), None
        for i, token in enumerate(tokens):
            reason = self.push(token)
            if reason:
                return i + 1, reason
        return len(tokens), None

    @property
    def cut_text(self) -> str | None:
        """The text before the stop string that ended the output; None while none did."""
        return self._text if self._cut else None

    def _completes_stop(self, token: int) -> bool:
        piece = self._stream.step(self._backend, token)
        if piece is None:
            return False
        seen = len(self._text)
        self._text += piece
        if self._count < self._min_new_tokens:
            return False
        # From where a match must end in this piece: one that was complete before min_new_tokens stays passed over.
        found = [self._text.find(stop, max(0, seen - len(stop) + 1)) for stop in self._stops]
        found = [at for at in found if at >= 0]
        if not found:
            return False
        self._text = self._text[: min(found)]
        self._cut = True
        return True

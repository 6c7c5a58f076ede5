"""Prompts as users write them, to token ids."""

from __future__ import annotations

import operator
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from pipeline.errors import InvalidRequest, short

Prompted = str | Sequence[Mapping[str, Any]] | Sequence[int] | np.ndarray
"""A string (encoded as it is), a list of chat messages (rendered by the tokenizer's template), or token ids."""


def token_ids_of(prompt: Prompted, target: Any) -> np.ndarray:
    """The prompt's token ids, int32 [n].

    Raises:
        InvalidRequest: Not a prompt, no tokenizer for text, or a tokenizer that failed on it.
    """
    if isinstance(prompt, str):
        return _tokenized(prompt, target.encode, target)
    listed = isinstance(prompt, Sequence) or (isinstance(prompt, np.ndarray) and prompt.ndim == 1)
    if listed and not isinstance(prompt, bytes):
        parts: list[Any] = list(prompt)
        if parts and all(isinstance(message, Mapping) for message in parts):
            if not all("role" in message for message in parts):
                raise InvalidRequest(f"prompt={short(prompt)}, expected a role in every chat message")
            return _tokenized(prompt, target.render_chat, target)
        ids = [_token_id(token) for token in parts]
        if None not in ids:
            return np.array(ids, dtype=np.int32)
    raise InvalidRequest(f"prompt={short(prompt)}, expected a string, a list of chat messages or a list of token ids")


def _tokenized(prompt: Any, tokenize: Any, target: Any) -> np.ndarray:
    if target.tokenizer is None:
        raise InvalidRequest(f"prompt={short(prompt)}, expected token ids: the target has no tokenizer")
    try:
        return np.array(tokenize(prompt), dtype=np.int32)
    except Exception as error:
        raise InvalidRequest(f"prompt={short(prompt)}, expected one that the tokenizer takes: {error}") from error


def _token_id(token: Any) -> int | None:
    """The id as an int; None if it isn't one."""
    if isinstance(token, (bool, np.bool_)):
        return None
    try:
        found = operator.index(token)
    except (TypeError, ValueError, OverflowError, RuntimeError):
        return None
    if not -(2**31) <= found < 2**31:
        raise InvalidRequest(f"prompt token={found}, expected a token id")
    return found

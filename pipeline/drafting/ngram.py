"""Prompt lookup: drafts from what followed the last tokens before, for models without a drafter."""

from __future__ import annotations

import operator
from typing import Any

import torch

import gpu
from pipeline.arrays import array_of
from pipeline.drafting.proposer import Contexts, Proposed, Proposer
from pipeline.errors import InvalidRequest


class NgramProposer(Proposer):
    """Proposes what followed the longest earlier occurrence of a request's last tokens (`gpu.prompt_lookup`).

    Good where the output repeats its input or itself: code edits, extraction, summaries, structured text.

    Args:
        num_drafts: Drafts a round, at least 1.
        max_ngram: The longest run of tokens that is looked for.
        min_ngram: Shorter matches give no drafts.

    Raises:
        InvalidRequest: A value out of range.
    """

    method = "ngram"
    # Drafts are chosen by the tokens alone.
    mask_contract = True
    captured = True

    def __init__(self, num_drafts: int = 7, *, max_ngram: int = 4, min_ngram: int = 2) -> None:
        self.num_drafts = _at_least("num_drafts", num_drafts, 1)
        self.min_ngram = _at_least("min_ngram", min_ngram, 1)
        self.max_ngram = _at_least("max_ngram", max_ngram, self.min_ngram)

    @property
    def name(self) -> str:
        """With its numbers."""
        return f"ngram(num_drafts={self.num_drafts}, max_ngram={self.max_ngram}, min_ngram={self.min_ngram})"

    def propose(self, contexts: Contexts) -> Proposed:
        """Drafts behind each request's last token."""
        drafts, counts = gpu.prompt_lookup(
            contexts.token_ids,
            contexts.lengths,
            self.num_drafts,
            max_ngram=self.max_ngram,
            min_ngram=self.min_ngram,
        )
        return Proposed(drafts, counts)

    def propose_captured(self, token_ids: torch.Tensor, lengths: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """See `Proposer`."""
        drafts = token_ids.new_empty(len(lengths), self.num_drafts)
        counts = torch.empty_like(lengths)
        gpu.prompt_lookup(
            array_of(token_ids),
            array_of(lengths),
            self.num_drafts,
            max_ngram=self.max_ngram,
            min_ngram=self.min_ngram,
            out=(array_of(drafts), array_of(counts)),
        )
        return drafts, counts


def _at_least(name: str, value: Any, least: int) -> int:
    try:
        found = operator.index(value)
    except TypeError:
        found = None
    if found is None or isinstance(value, bool) or found < least:
        raise InvalidRequest(f"{name}={value!r}, expected an integer of at least {least}")
    return found

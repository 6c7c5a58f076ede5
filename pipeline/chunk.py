"""Committed tokens side by side with the record of each."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from pipeline.audit_record import AuditRecord


@dataclass(frozen=True)
class Chunk:
    """Consecutive tokens of one request; every array has a row a token, so a cut cuts them all.

    Attributes:
        token_ids: int32 [n].
        logprobs: float32 [n], each under the policy it was drawn from.
        mask_sizes: int64 [n], the size of each support; None without a mask request.
        mask_ids: int32 [sum of sizes], the supports one after another; `mask_logprobs` float32 beside them.
        top_ids, top_values: int32 and float32 [n, K]; None unless asked for.
        audit: How each token was decided; None unless asked for.
    """

    token_ids: np.ndarray
    logprobs: np.ndarray
    mask_sizes: np.ndarray | None = None
    mask_ids: np.ndarray | None = None
    mask_logprobs: np.ndarray | None = None
    top_ids: np.ndarray | None = None
    top_values: np.ndarray | None = None
    audit: AuditRecord | None = None

    def __len__(self) -> int:
        return len(self.token_ids)

    def cut(self, length: int) -> Chunk:
        """The first `length` tokens with their records."""
        if length == len(self):
            return self
        entries = None if self.mask_sizes is None else int(self.mask_sizes[:length].sum())
        return Chunk(
            token_ids=self.token_ids[:length],
            logprobs=self.logprobs[:length],
            mask_sizes=None if self.mask_sizes is None else self.mask_sizes[:length],
            mask_ids=None if self.mask_ids is None else self.mask_ids[:entries],
            mask_logprobs=None if self.mask_logprobs is None else self.mask_logprobs[:entries],
            top_ids=None if self.top_ids is None else self.top_ids[:length],
            top_values=None if self.top_values is None else self.top_values[:length],
            audit=None if self.audit is None else self.audit.cut(length),
        )


def join(chunks: Sequence[Chunk], *, masks: bool, top: int, audit: bool = False) -> Chunk:
    """One chunk of all; without any, an empty one of the asked shape."""
    empty = Chunk(
        token_ids=np.empty(0, np.int32),
        logprobs=np.empty(0, np.float32),
        mask_sizes=np.empty(0, np.int64) if masks else None,
        mask_ids=np.empty(0, np.int32) if masks else None,
        mask_logprobs=np.empty(0, np.float32) if masks else None,
        top_ids=np.empty((0, top), np.int32) if top else None,
        top_values=np.empty((0, top), np.float32) if top else None,
    )
    parts = [empty, *chunks]

    def joined(name: str) -> np.ndarray | None:
        first = getattr(empty, name)
        return None if first is None else np.concatenate([getattr(part, name) for part in parts], dtype=first.dtype)

    token_ids, logprobs = joined("token_ids"), joined("logprobs")
    assert token_ids is not None
    assert logprobs is not None
    return Chunk(
        token_ids,
        logprobs,
        joined("mask_sizes"),
        joined("mask_ids"),
        joined("mask_logprobs"),
        joined("top_ids"),
        joined("top_values"),
        AuditRecord.join([chunk.audit for chunk in chunks if chunk.audit is not None]) if audit else None,
    )

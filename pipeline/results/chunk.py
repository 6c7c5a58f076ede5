"""Committed tokens side by side with the record of each."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np

from pipeline.results.audit_record import AuditRecord


@dataclass(slots=True)
class Chunk:
    """Consecutive tokens of one request; every array has a row a token, so a cut cuts them all. All are C-contiguous.

    Never written to once it is made, though not frozen: a round makes one for every request, and freezing a dataclass
    makes it several times as slow to make.

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
        if length == len(self.token_ids):
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


class Records:
    """The tokens of one request with their records, growing chunk by chunk.

    Every array is copied behind those before it at once, while it is in the processor's cache, and so keeps nothing of
    its round alive. The copies are bytearrays: they take in a small array in a fraction of the time that NumPy needs,
    and `whole` hands out arrays in their memory, so that the end of a request copies nothing: at the end of a batch
    nothing else is under way.
    """

    def __init__(self) -> None:
        self._num_tokens = 0
        self._columns = {name: bytearray() for name in _ARRAYS}
        self._like: dict[str, np.ndarray] = {}  # no rows of each array that the chunks have: its dtype and shape
        self._audits: list[tuple[int, AuditRecord]] = []  # each with the tokens before it

    def append(self, chunk: Chunk) -> None:
        """Take in a chunk; all chunks of a request have the same arrays, each of one dtype."""
        if not self._like:
            self._like = _like(chunk)
        columns = self._columns
        columns["token_ids"].extend(chunk.token_ids)
        columns["logprobs"].extend(chunk.logprobs)
        if chunk.mask_sizes is not None and chunk.mask_ids is not None and chunk.mask_logprobs is not None:
            columns["mask_sizes"].extend(chunk.mask_sizes)
            columns["mask_ids"].extend(chunk.mask_ids)
            columns["mask_logprobs"].extend(chunk.mask_logprobs)
        if chunk.top_ids is not None and chunk.top_values is not None:
            columns["top_ids"].extend(chunk.top_ids)
            columns["top_values"].extend(chunk.top_values)
        if chunk.audit is not None:
            self._audits.append((self._num_tokens, chunk.audit))
        self._num_tokens += len(chunk.token_ids)

    def cut(self, num_tokens: int) -> None:
        """Forget all tokens behind the first num_tokens, the ends of a chunk, and what of a chunk failed to fit."""
        kept = Chunk(**self._arrays()).cut(num_tokens) if self._like else None
        # New ones: whoever was handed arrays in the memory of the old ones keeps them as they are.
        self._columns = {name: bytearray() for name in _ARRAYS}
        for name in self._like:
            self._columns[name].extend(getattr(kept, name))
        self._audits = [(before, audit) for before, audit in self._audits if before < num_tokens]
        self._num_tokens = num_tokens

    def whole(self, *, masks: bool, top: int, audit: bool = False) -> Chunk:
        """One chunk of all; without any, an empty one of the asked shape. Nothing can be appended while it is alive."""
        arrays: dict[str, Any] = {
            "token_ids": np.empty(0, np.int32),
            "logprobs": np.empty(0, np.float32),
            "mask_sizes": np.empty(0, np.int64) if masks else None,
            "mask_ids": np.empty(0, np.int32) if masks else None,
            "mask_logprobs": np.empty(0, np.float32) if masks else None,
            "top_ids": np.empty((0, top), np.int32) if top else None,
            "top_values": np.empty((0, top), np.float32) if top else None,
        }
        arrays |= self._arrays()
        audits = AuditRecord.join([record for _, record in self._audits]) if audit else None
        return Chunk(**arrays, audit=audits)

    def _arrays(self) -> dict[str, Any]:
        """What the columns hold."""
        return {
            name: np.frombuffer(self._columns[name], like.dtype).reshape(-1, *like.shape[1:])
            for name, like in self._like.items()
        }


_ARRAYS = ("token_ids", "logprobs", "mask_sizes", "mask_ids", "mask_logprobs", "top_ids", "top_values")


def _like(chunk: Chunk) -> dict[str, np.ndarray]:
    """No rows of each array that a chunk has."""
    arrays = {name: getattr(chunk, name) for name in _ARRAYS}
    return {name: np.empty_like(array[:0]) for name, array in arrays.items() if array is not None}

"""Committed tokens side by side with the record of each."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from pipeline.audit_record import AuditRecord

MOST_CHUNKS = 32
"""Chunks that a request keeps as they came; each may keep its whole round's arrays alive."""

MOST_ENTRIES = 1 << 14
"""Mask entries that it keeps so."""


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


class Records:
    """The tokens of one request with their records, growing chunk by chunk.

    Chunks are kept as they come, MOST_CHUNKS or MOST_ENTRIES at most, and then copied behind one another, all at once:
    a copy of a few tokens takes as long as one of hundreds. Requests that start together do so in different rounds. The
    arrays grow by a quarter as they fill, and `whole` hands out what is used of them, so that the end of a request
    copies next to nothing: at the end of a batch nothing else is under way.
    """

    _first_copies = itertools.cycle(range(1, MOST_CHUNKS + 1))

    def __init__(self) -> None:
        self._columns: dict[str, _Growing] = {}
        self._audits: list[tuple[int, AuditRecord]] = []  # each with the tokens before it
        self._chunks: list[Chunk] = []
        self._num_tokens = 0
        self._entries = 0  # of the chunks' masks
        self._room = next(self._first_copies)

    def append(self, chunk: Chunk) -> None:
        """Take in a chunk, whose arrays nobody may write to; all chunks of a request have the same arrays."""
        if chunk.audit is not None:
            self._audits.append((self._num_tokens, chunk.audit))
        self._chunks.append(chunk)
        self._num_tokens += len(chunk)
        if chunk.mask_ids is not None:
            self._entries += len(chunk.mask_ids)
        if len(self._chunks) >= self._room or self._entries > MOST_ENTRIES:
            self._copy()
            self._room = MOST_CHUNKS

    def cut(self, num_tokens: int) -> None:
        """Forget all tokens behind the first num_tokens, the ends of a chunk."""
        if num_tokens == self._num_tokens:
            return
        self._copy()
        sizes = self._columns.get("mask_sizes")
        entries = 0 if sizes is None else int(sizes.values[:num_tokens].sum())
        for name, column in self._columns.items():
            column.used = entries if name in _ENTRIES else num_tokens
        self._audits = [(before, audit) for before, audit in self._audits if before < num_tokens]
        self._num_tokens = num_tokens

    def _copy(self) -> None:
        """Put the chunks' arrays behind those before them."""
        if not self._chunks:
            return
        for name in _ARRAYS:
            first = getattr(self._chunks[0], name)
            if first is not None:
                if name not in self._columns:
                    self._columns[name] = _Growing(first)
                self._columns[name].extend([getattr(chunk, name) for chunk in self._chunks])
        self._chunks.clear()
        self._entries = 0

    def whole(self, *, masks: bool, top: int, audit: bool = False) -> Chunk:
        """One chunk of all, good until these records are changed; without any, an empty one of the asked shape."""
        self._copy()
        arrays: dict[str, Any] = {
            "token_ids": np.empty(0, np.int32),
            "logprobs": np.empty(0, np.float32),
            "mask_sizes": np.empty(0, np.int64) if masks else None,
            "mask_ids": np.empty(0, np.int32) if masks else None,
            "mask_logprobs": np.empty(0, np.float32) if masks else None,
            "top_ids": np.empty((0, top), np.int32) if top else None,
            "top_values": np.empty((0, top), np.float32) if top else None,
        }
        arrays |= {name: column.whole() for name, column in self._columns.items()}
        audits = AuditRecord.join([record for _, record in self._audits]) if audit else None
        return Chunk(**arrays, audit=audits)


_ENTRIES = ("mask_ids", "mask_logprobs")
_ARRAYS = ("token_ids", "logprobs", "mask_sizes", *_ENTRIES, "top_ids", "top_values")


class _Growing:
    """An array that grows along its first axis."""

    def __init__(self, like: np.ndarray) -> None:
        self._room = np.empty((64, *like.shape[1:]), like.dtype)
        self.used = 0

    @property
    def values(self) -> np.ndarray:
        return self._room[: self.used]

    def whole(self) -> np.ndarray:
        """The values; a copy where more memory than a third of theirs would be kept beside them."""
        return self.values if 4 * self.used >= 3 * len(self._room) else self.values.copy()

    def extend(self, parts: Sequence[np.ndarray]) -> None:
        needed = self.used + sum(map(len, parts))
        if needed > len(self._room):
            room = np.empty((max(needed, len(self._room) * 5 // 4), *self._room.shape[1:]), self._room.dtype)
            room[: self.used] = self.values
            self._room = room
        np.concatenate(parts, out=self._room[self.used : needed])
        self.used = needed

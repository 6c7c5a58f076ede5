"""Where every slot stands and how it samples, in device memory that never moves."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np
import torch

import gpu
from pipeline.arrays import array_of, send_all
from pipeline.batch.request import Request

_ANCHOR, _START, _GENERATED, _REMAINING, _SEED = range(5)
_PHASE, _NUM_DRAFTS = range(2)
_LONGS, _INTS, _POLICY = 5, 2, 4
_HEAD = 2 * _LONGS + _INTS  # words of a slot before its policies


@dataclass(frozen=True)
class Slot:
    """What the host writes into one slot; the defaults are those of an empty one."""

    phase: int = gpu.IDLE
    anchor: int = 0
    start: int = 0
    generated: int = 0
    remaining: int = 0
    seed: int = 0
    num_drafts: int = 0
    temperature: float = 0.0
    top_k: int = 0
    top_p: float = 1.0
    min_p: float = 0.0
    wanted: bool = False

    @classmethod
    def of(cls, request: Request, phase: int, max_length: int, vocabulary: int, num_drafts: int) -> Slot:
        """A request where it stands. While it waits for its prompt its start is behind that: what rounds write there
        meanwhile is overwritten by its first block. The round of its first token moves it there from the last place."""
        params, remaining = request.params, request.remaining(max_length)
        begun = request.num_generated > 0
        length = len(request.prompt.token_ids)
        return cls(
            phase=phase,
            anchor=request.anchor if begun else 0,
            start=request.cached if begun else length - 1 if phase == gpu.FIRST else length,
            generated=request.num_generated,
            remaining=remaining,
            seed=request.seed,
            num_drafts=max(min(num_drafts, remaining - 1), 0) if begun else 0,
            temperature=params.temperature,
            top_k=min(params.top_k or 0, vocabulary),
            top_p=params.top_p,
            min_p=params.min_p,
            wanted=params.keeps_supports,
        )


class Slots:
    """The slots' state; rounds move it on, the host writes whole slots between rounds.

    A field of the first slots is one piece of memory, as kernels take it. All fields but one lie in one tensor, so that
    one kernel writes whole slots: launches are what a change of slots costs the host.

    Args:
        num_slots: S.
        width: Rows a block. A slot's policy is stored for each, for each draft, and once.
        device: Of the target.
    """

    def __init__(self, num_slots: int, width: int, device: torch.device):
        self.num_slots, self.width, self.device = num_slots, width, device
        repeats = sorted({1, max(width - 1, 1), width})
        kinds = [(_LONGS, 2), (_INTS, 1), *((_POLICY, rows) for rows in repeats)]  # fields, words of each
        sizes = [fields * words * num_slots for fields, words in kinds]
        self._words = torch.zeros(sum(sizes), dtype=torch.int32, device=device)
        longs, ints, *policies = self._words.split(sizes)
        self._longs = longs.view(torch.int64).view(_LONGS, num_slots)
        self._ints = ints.view(_INTS, num_slots)
        # Temperature, top_k, top_p and min_p: their bits.
        self._policies = {
            rows: bits.view(_POLICY, num_slots, rows) for rows, bits in zip(repeats, policies, strict=True)
        }
        for bits in self._policies.values():
            bits[2].view(torch.float32).fill_(1.0)
        self._wanted = torch.zeros(num_slots, dtype=torch.bool, device=device)
        # Where a slot's words are, [S, words a slot], and which policy word each of the last is.
        parts = np.split(np.arange(sum(sizes)), np.cumsum(sizes)[:-1])
        by_slot = [
            part.reshape(fields, num_slots, words).swapaxes(0, 1).reshape(num_slots, -1)
            for part, (fields, words) in zip(parts, kinds, strict=True)
        ]
        self._places = np.concatenate(by_slot, 1)
        self._repeated = np.concatenate([np.repeat(np.arange(_POLICY), rows) for rows in repeats])

    def write(self, slots: Mapping[int, Slot]) -> None:
        """Put these in their places, behind what is queued."""
        if not slots:
            return
        rows, at = list(slots.values()), np.array(list(slots), np.int64)
        words = np.empty((len(rows), self._places.shape[1]), np.int32)
        longs = np.array([[row.anchor, row.start, row.generated, row.remaining, 0] for row in rows], np.int64)
        longs[:, _SEED] = np.array([row.seed for row in rows], np.uint64).view(np.int64)
        policies = np.array([[row.temperature, 0, row.top_p, row.min_p] for row in rows], np.float32).view(np.int32)
        policies[:, 1] = [row.top_k for row in rows]
        words[:, : 2 * _LONGS] = longs.view(np.int32)
        words[:, 2 * _LONGS : _HEAD] = [[row.phase, row.num_drafts] for row in rows]
        words[:, _HEAD:] = policies[:, self._repeated]
        wanted = np.array([row.wanted for row in rows], np.bool_)
        sent = send_all((self._places[at].ravel(), words.ravel(), at, wanted), self.device)
        self._words.index_copy_(0, *sent[:2])
        self._wanted.index_copy_(0, *sent[2:])

    def move(self, source: int, target: int) -> None:
        """Copy a slot to another as it is on the device, which may be ahead of what the host has read."""
        there, here = send_all((self._places[source], self._places[target]), self.device)
        self._words.index_copy_(0, here, self._words[there])
        self._wanted[target].copy_(self._wanted[source])

    def anchors(self, batch: int) -> torch.Tensor:
        """int64 [batch]."""
        return self._longs[_ANCHOR, :batch]

    def starts(self, batch: int) -> torch.Tensor:
        """int64 [batch]."""
        return self._longs[_START, :batch]

    def generated(self, batch: int) -> torch.Tensor:
        """int64 [batch]."""
        return self._longs[_GENERATED, :batch]

    def seeds(self, batch: int) -> torch.Tensor:
        """The bits of uint64 as int64 [batch]."""
        return self._longs[_SEED, :batch]

    def phases(self, batch: int) -> torch.Tensor:
        """int32 [batch]."""
        return self._ints[_PHASE, :batch]

    def num_drafts(self, batch: int) -> torch.Tensor:
        """int32 [batch]."""
        return self._ints[_NUM_DRAFTS, :batch]

    def wanted(self, batch: int) -> torch.Tensor:
        """bool [batch]: whose supports are recorded."""
        return self._wanted[:batch]

    def policy(self, batch: int, rows: int) -> list[torch.Tensor]:
        """temperature, top_k, top_p, min_p of every row, [batch * rows] each; rows: 1, width - 1 or width a slot."""
        columns = [column[:batch].reshape(-1) for column in self._policies[rows]]
        return [column if i == 1 else column.view(torch.float32) for i, column in enumerate(columns)]

    def progress(self, batch: int) -> gpu.Progress:
        """What `gpu.advance` moves on, of the first slots."""
        return gpu.Progress(
            phase=array_of(self.phases(batch)),
            anchor=array_of(self.anchors(batch)),
            start=array_of(self.starts(batch)),
            generated=array_of(self.generated(batch)),
            remaining=array_of(self._longs[_REMAINING, :batch]),
            num_drafts=array_of(self.num_drafts(batch)),
        )

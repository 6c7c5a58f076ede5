"""Where every slot stands and how it samples, in device memory that never moves."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np
import torch

import gpu
from pipeline.arrays import array_of, send
from pipeline.request import Request

_ANCHOR, _START, _GENERATED, _REMAINING, _SEED = range(5)
_PHASE, _NUM_DRAFTS = range(2)


class _Policies:
    """The slots' policies, for so many rows a slot; of the first slots they are one piece of memory."""

    def __init__(self, num_slots: int, rows: int, device: torch.device):
        self.rows = rows
        self.columns = [
            torch.zeros(num_slots, rows, dtype=dtype, device=device)
            for dtype in (torch.float32, torch.int32, torch.float32, torch.float32)
        ]
        self.columns[2].fill_(1.0)  # top_p

    def write(self, at: torch.Tensor, reals: torch.Tensor, top_k: torch.Tensor) -> None:
        """Put temperature, top_p and min_p, float32 [3, n], and top_k int32 [n] into n slots."""
        for column, values in zip(self.columns, (reals[0], top_k, reals[1], reals[2]), strict=True):
            column.index_copy_(0, at, values.unsqueeze(1).expand(-1, self.rows))

    def of(self, batch: int) -> list[torch.Tensor]:
        """temperature, top_k, top_p, min_p, [batch * rows] each."""
        return [column[:batch].reshape(-1) for column in self.columns]


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
        """A request where it stands. Before its first token the start is its prompt's last position: what a round
        writes there meanwhile is overwritten by the prompt's last chunk, or by the request's first block."""
        params, remaining = request.params, request.remaining(max_length)
        begun = request.num_generated > 0
        return cls(
            phase=phase,
            anchor=request.anchor if begun else 0,
            start=request.cached if begun else len(request.prompt.token_ids) - 1,
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
    """The slots' state, a column a slot; rounds move it on, the host writes whole slots between rounds.

    Args:
        num_slots: S.
        width: Rows a block. A slot's policy is stored for each, for each draft, and once.
        device: Of the target.
    """

    def __init__(self, num_slots: int, width: int, device: torch.device):
        self.num_slots, self.width, self.device = num_slots, width, device
        self._longs = torch.zeros(5, num_slots, dtype=torch.int64, device=device)
        self._ints = torch.zeros(2, num_slots, dtype=torch.int32, device=device)
        self._policies = {rows: _Policies(num_slots, rows, device) for rows in {1, max(width - 1, 1), width}}
        self._wanted = torch.zeros(num_slots, dtype=torch.bool, device=device)

    def write(self, slots: Mapping[int, Slot]) -> None:
        """Put these in their places, behind what is queued."""
        if not slots:
            return
        rows = list(slots.values())
        at = send(np.array(list(slots), np.int64), self.device)
        seeds = np.array([row.seed for row in rows], np.uint64).view(np.int64)
        longs = np.array([[row.anchor, row.start, row.generated, row.remaining, 0] for row in rows], np.int64).T
        longs[_SEED] = seeds
        self._longs.index_copy_(1, at, send(longs, self.device))
        ints = np.array([[row.phase, row.num_drafts] for row in rows], np.int32).T
        self._ints.index_copy_(1, at, send(ints, self.device))
        reals = np.array([[row.temperature, row.top_p, row.min_p] for row in rows], np.float32).T
        top_k = np.array([row.top_k for row in rows], np.int32)
        policies = send(reals, self.device), send(top_k, self.device)
        for stored in self._policies.values():
            stored.write(at, *policies)
        wanted = np.array([row.wanted for row in rows], np.bool_)
        self._wanted.index_copy_(0, at, send(wanted, self.device))

    def move(self, source: int, target: int) -> None:
        """Copy a slot to another as it is on the device, which may be ahead of what the host has read."""
        for tensor, dim in (
            (self._longs, 1),
            (self._ints, 1),
            (self._wanted, 0),
            *((column, 0) for stored in self._policies.values() for column in stored.columns),
        ):
            tensor.select(dim, target).copy_(tensor.select(dim, source))

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
        return self._policies[rows].of(batch)

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

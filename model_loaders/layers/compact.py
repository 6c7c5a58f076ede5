"""Forwards that leave rows of a block out: the others run as one sequence, and only attention tells them apart."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass

import torch


@dataclass(frozen=True)
class Compact:
    """Which rows of a [b, w] block a model's forward runs, all others left out: kept int64 [n], ascending, row-major.

    The model sees one sequence of n rows. Only attention cares which row belongs to whom, so it alone spreads its
    queries over the block, where a row is computed as if all were there.
    """

    kept: torch.Tensor
    batch: int
    width: int

    @classmethod
    def of(cls, lengths: Sequence[int], width: int, device: torch.device) -> Compact | None:
        """The first `lengths[b]`, 0 to `width`, of each row's tokens; None where those are all."""
        if min(lengths) == width:
            return None
        kept = [row * width + i for row, length in enumerate(lengths) for i in range(length)]
        return cls(torch.tensor(kept, device=device), len(lengths), width)

    def take(self, block: torch.Tensor) -> torch.Tensor:
        """[b, w, ...] -> [1, n, ...]."""
        return block.reshape(1, self.batch * self.width, *block.shape[2:])[:, self.kept]

    def spread(self, rows: torch.Tensor, fill: float) -> torch.Tensor:
        """[1, n, ...] -> [b, w, ...], `fill` in the rows left out."""
        block = rows.new_full((self.batch * self.width, *rows.shape[2:]), fill)
        block[self.kept] = rows[0]
        return block.reshape(self.batch, self.width, *rows.shape[2:])


# Not every architecture hands unknown arguments down to its attention, so this one goes beside them.
_RUNNING: ContextVar[Compact | None] = ContextVar("compact", default=None)


@contextmanager
def compact_rows(compact: Compact | None) -> Iterator[None]:
    """Attention within spreads queries [1, heads, n, d] over their block; None changes nothing."""
    token = _RUNNING.set(compact)
    try:
        yield
    finally:
        _RUNNING.reset(token)


def running_compact() -> Compact | None:
    """What the innermost `compact_rows` was given."""
    return _RUNNING.get()

"""A row copied out of a cache, to be put into another slot or another cache."""

from __future__ import annotations

from dataclasses import dataclass

import torch


@dataclass(frozen=True)
class RowSnapshot:
    """The first `length` entries of one row, copied out of the cache.

    keys, values: for each layer [kv_heads, length, head_dim], the cache's dtype and device.
    """

    length: int
    keys: tuple[torch.Tensor, ...]
    values: tuple[torch.Tensor, ...]

    def memory_bytes(self) -> int:
        """Bytes held by the copied keys and values."""
        return sum(t.numel() * t.element_size() for t in (*self.keys, *self.values))

"""What a layer computes between its matrix products, for whoever has kernels for it."""

from __future__ import annotations

from typing import Protocol

from torch import Tensor


class Operators(Protocol):
    """Kernels in place of torch's, of which each takes several. They work on torch's current stream."""

    def gated(self, rows: Tensor) -> Tensor:
        """silu(gates) * ups of rows [..., 2 * m], the gates first: [..., m]. rows are contiguous."""

    def turned(
        self,
        heads: Tensor,
        angles: tuple[Tensor, Tensor],
        index: Tensor,
        keys: Tensor,
        values: Tensor,
        by_rows: bool,
    ) -> Tensor:
        """Rotary embedding, and what is kept of it to where it is kept.

        Args:
            heads: [b, w, h + 2 * k, d], contiguous: a layer's queries, its k heads of keys, its values.
            angles: Cosines and sines [b, w, d], in the dtype of heads.
            index: int64 [b, k, w], rows of keys and values.
            keys, values: [n, d], contiguous.
            by_rows: Have the queries in memory row by row, not head by head.

        Returns queries [b, h, w, d].
        """

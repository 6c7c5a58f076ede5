"""A model's layers on `gpu`'s kernels, where it runs on CUDA: a round of a small model is mostly launches."""

from __future__ import annotations

from typing import Any

from torch import Tensor

import gpu
from model_loaders.drafts import BlockDraft
from pipeline.arrays import array_of, torchs_stream


class KernelOperators:
    """`model_loaders.layers.operators.Operators` by `gpu.swiglu` and `gpu.turn_heads`."""

    def gated(self, rows: Tensor) -> Tensor:
        """One kernel instead of two."""
        out = rows.new_empty(*rows.shape[:-1], rows.shape[-1] // 2)
        with torchs_stream(rows.device):
            gpu.swiglu(array_of(rows.flatten(0, -2)), array_of(out.flatten(0, -2)))
        return out

    def turned(
        self,
        heads: Tensor,
        angles: tuple[Tensor, Tensor],
        index: Tensor,
        keys: Tensor,
        values: Tensor,
        by_rows: bool,
    ) -> Tensor:
        """One kernel instead of three."""
        batch, width, count, size = heads.shape
        count -= 2 * index.shape[1]
        queries = heads.new_empty((batch, width, count, size) if by_rows else (batch, count, width, size))
        queries = queries.transpose(1, 2) if by_rows else queries
        cosines, sines = (values.contiguous() for values in angles)
        arrays = heads.flatten(2), cosines, sines, index, queries, keys, values
        with torchs_stream(heads.device):
            gpu.turn_heads(*map(array_of, arrays))
        return queries


def use_kernels(target: Any, draft: Any) -> None:
    """Have a pipeline's models run their layers on kernels, on CUDA."""
    if target.device.type == "cuda":
        operators = KernelOperators()
        target.use_operators(operators)
        if isinstance(draft, BlockDraft):
            draft.module.use_operators(operators)

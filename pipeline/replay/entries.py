"""The kernels of gpu.replay as operations of torch's, on the tensors' own device."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch
from torch.autograd.function import once_differentiable

from gpu import row_sums, support_log_softmax, support_log_softmax_backward
from pipeline.arrays import array_of, torchs_stream
from pipeline.replay.arrays import tensor_of, zeros
from pipeline.results.rollout import SamplingMask


@dataclass(frozen=True, eq=False)
class Csr:
    """Which tokens each of n rows has, on one device.

    Attributes:
        token_ids: int32 [nnz].
        offsets: int64 [n + 1].
        sizes: int64 [n].
    """

    token_ids: torch.Tensor
    offsets: torch.Tensor
    sizes: torch.Tensor

    @classmethod
    def of(cls, mask: SamplingMask, device: torch.device) -> Csr:
        """Of a checked mask."""
        return cls(
            tensor_of(mask.token_ids, np.int32, device),
            tensor_of(mask.offsets, np.int64, device),
            tensor_of(mask.sizes, np.int64, device),
        )

    def sum_rows(self, values: torch.Tensor) -> torch.Tensor:
        """The sums of the rows of float64 [nnz], [n]; differentiable, and the same whenever it is asked for."""
        return _RowSums.apply(values, self.offsets, self.sizes)

    def spread(self, values: torch.Tensor) -> torch.Tensor:
        """A row's value for each of its entries, [nnz] of [n]; differentiable."""
        return _spread(values, self.sizes, len(self.token_ids))


def entries_of(logits: torch.Tensor, supports: Csr, temperature: torch.Tensor) -> torch.Tensor:
    """The log-probability of every entry over its row's support, float64 [nnz]; differentiable.

    Args:
        logits: [n, V], checked.
        supports: Ids below V, each once in a row.
        temperature: float64 [n]; of a row with one token from 0, otherwise from 1e-5.
    """
    return _SupportLogSoftmax.apply(logits, supports.token_ids, supports.offsets, temperature)


class _SupportLogSoftmax(torch.autograd.Function):
    """Keeps the entries for the backward pass, not the logits."""

    @staticmethod
    def forward(ctx, logits, *supports):
        ctx.like, ctx.supports = (logits.shape, logits.dtype, logits.device), supports
        entries = logits.new_empty(len(supports[0]), dtype=torch.float64)
        if len(entries):
            with torchs_stream(logits.device):
                support_log_softmax(
                    array_of(_adjacent(logits.detach())), *map(array_of, supports), out=array_of(entries)
                )
        ctx.save_for_backward(entries)
        return entries

    @staticmethod
    @once_differentiable
    def backward(ctx, grad_entries):
        (entries,) = ctx.saved_tensors
        shape, dtype, device = ctx.like
        grad = zeros(shape, dtype, device)
        if len(entries):
            each = entries, grad_entries.contiguous(), *ctx.supports, grad
            with torchs_stream(grad.device):
                support_log_softmax_backward(*map(array_of, each))
        return grad, None, None, None


class _RowSums(torch.autograd.Function):
    @staticmethod
    def forward(ctx, values, offsets, sizes):
        ctx.save_for_backward(sizes)
        ctx.num_entries = len(values)
        sums = values.new_zeros(len(sizes))
        if len(values):
            with torchs_stream(values.device):
                row_sums(array_of(values.detach().contiguous()), array_of(offsets), out=array_of(sums))
        return sums

    @staticmethod
    def backward(ctx, grad_sums):
        (sizes,) = ctx.saved_tensors
        return _spread(grad_sums, sizes, ctx.num_entries), None, None


def _spread(values: torch.Tensor, sizes: torch.Tensor, num_entries: int) -> torch.Tensor:
    return values.repeat_interleave(sizes, output_size=num_entries)  # told the size, it needn't wait for the device


def _adjacent(logits: torch.Tensor) -> torch.Tensor:
    """Logits whose rows are tokens side by side: themselves, or a copy where they aren't."""
    return logits.contiguous() if logits.shape[1] > 1 and logits.stride(1) != 1 else logits

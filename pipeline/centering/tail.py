"""Log-probabilities of chosen tokens over the whole vocabulary, and the mass outside the head.

Row by row, a block of rows at a time: beyond the logits' gradient no tensor is larger than a block.
"""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
import torch
from torch.autograd.function import once_differentiable

from pipeline.replay.entries import Csr

BLOCK_ELEMENTS = 1 << 22
"""Logits that are looked at together, in float64: 32 MB."""


def vocabulary_entries(
    logits: torch.Tensor, csr: Csr, offsets: np.ndarray, in_head: torch.Tensor, temperature: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """Log-probabilities of the entries over the whole vocabulary, and each row's mass outside its head.

    z_v / T - logsumexp over the vocabulary of z / T, in float64. The mass outside, m, is summed over the tokens
    outside, not taken as 1 - the head's: it is right to the last digits however small. Its gradient by z_u is
    -m prob_u / T for a token of the head and (1 - m) prob_u / T for one outside.

    Args:
        logits: [n, V], on any device; its gradient is dense, as this policy's is.
        csr: The entries of n rows, each id once in a row.
        offsets: `csr.offsets` on the host.
        in_head: bool [nnz], which entries are of the head.
        temperature: float64 [n], above 0.

    Returns:
        Entries float64 [nnz] and mass float64 [n], both differentiable.
    """
    rows = csr.spread(torch.arange(len(logits), device=logits.device))
    return _VocabularyLogSoftmax.apply(logits, csr, rows, offsets, in_head, temperature)


class _VocabularyLogSoftmax(torch.autograd.Function):
    @staticmethod
    def forward(ctx, logits, csr, rows, offsets, in_head, temperature):
        token_ids = csr.token_ids.long()
        entries = torch.empty(len(token_ids), dtype=torch.float64, device=logits.device)
        maximum, log_total, tail = (entries.new_empty(len(logits)) for _ in range(3))
        for block, inside in _blocks(logits, offsets):
            at = rows[inside] - block.start, token_ids[inside]
            scores = logits[block].to(torch.float64, copy=True)
            maximum[block] = scores.amax(1)
            scores.sub_(maximum[block, None]).div_(temperature[block, None])
            chosen = scores[at]
            weights = scores.exp_()
            total = weights.sum(1)
            weights[at] = weights[at].masked_fill(in_head[inside], 0.0)
            tail[block] = weights.sum(1) / total
            log_total[block] = total.log()
            entries[inside] = chosen - log_total[block][at[0]]
        ctx.save_for_backward(logits, in_head, temperature, maximum, log_total, entries, tail)
        ctx.csr, ctx.rows, ctx.token_ids, ctx.offsets = csr, rows, token_ids, offsets
        return entries, tail

    @staticmethod
    @once_differentiable
    def backward(ctx, grad_entries, grad_tail):
        logits, in_head, temperature, maximum, log_total, entries, tail = ctx.saved_tensors
        grad_logits = torch.empty_like(logits, memory_format=torch.contiguous_format)
        sums = ctx.csr.sum_rows(grad_entries)
        outside = grad_tail * (1 - tail) - sums
        inside_head = -grad_tail * tail - sums
        per_prob = torch.where(in_head, ctx.csr.spread(inside_head), ctx.csr.spread(outside))
        at_entries = (grad_entries + entries.exp() * per_prob) / ctx.csr.spread(temperature)
        for block, inside in _blocks(logits, ctx.offsets):
            grad = logits[block].to(torch.float64, copy=True)
            grad.sub_(maximum[block, None]).div_(temperature[block, None])
            grad.sub_(log_total[block, None]).exp_().mul_((outside[block] / temperature[block])[:, None])
            grad[ctx.rows[inside] - block.start, ctx.token_ids[inside]] = at_entries[inside]
            grad_logits[block] = grad
        return grad_logits, None, None, None, None, None


def _blocks(logits: torch.Tensor, offsets: np.ndarray) -> Iterator[tuple[slice, slice]]:
    """Blocks of rows, and where their entries are."""
    num_rows, vocabulary = logits.shape
    step = max(1, BLOCK_ELEMENTS // vocabulary)
    for first in range(0, num_rows, step):
        last = min(first + step, num_rows)
        yield slice(first, last), slice(int(offsets[first]), int(offsets[last]))

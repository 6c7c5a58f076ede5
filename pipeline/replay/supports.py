"""Log-probabilities and entropy over the recorded supports, from a trainer's logits; differentiable in torch."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch.autograd.function import once_differentiable

from gpu import GREEDY_TEMPERATURE, support_log_softmax, support_log_softmax_backward
from pipeline.errors import InvalidRequest
from pipeline.mask_checks import check_supports, join_masks, positions_of, rows_of
from pipeline.replay.arguments import check_logits, temperatures
from pipeline.rollout import SamplingMask


@dataclass(frozen=True, eq=False)
class Replayed:
    """What `replay` gives, n tokens. float64 for float64 logits, otherwise float32; on the logits' device.

    Attributes:
        logprobs: [n], the log-probability of every taken token over its recorded support.
        entropy: [n], in nats, of the policy on the support.
    """

    logprobs: torch.Tensor
    entropy: torch.Tensor


def support_logprobs(
    logits: torch.Tensor,
    mask: SamplingMask | Sequence[SamplingMask],
    temperature: Any = 1.0,
    *,
    token_ids: Any,
    max_support: int | None = None,
) -> torch.Tensor:
    """Log-probabilities of the taken tokens over the recorded supports, [n].

    z_y / T - logsumexp over v in S of z_v / T, computed in float64, whatever the logits' dtype. The gradient by the
    logits is the only dense tensor that is allocated; it is zero outside the supports.

    Args:
        logits: The trainer's, [n, V], float32, bfloat16, float16 or float64, after what the rollout's parameters
            change before the temperature (penalties, bias, processors). On CUDA they are copied to the host and the
            gradient back.
        mask: The recorded supports: one mask of n rows, or several (a rollout each) that have n rows together.
        temperature: The rollout's: a number, or one a token. Below 1e-5 a token is greedy: 0, without a gradient.
        token_ids: The taken tokens, integers [n] (`Rollout.token_ids`, side by side where there are several).
        max_support: Refuse supports of more tokens; None: any size.

    Returns:
        float64 [n] for float64 logits, otherwise float32.

    Raises:
        InvalidRequest: A mask that trainers must refuse (see pipeline.mask_checks), by row; a wrong shape or dtype.
    """
    return replay(logits, mask, temperature, token_ids=token_ids, max_support=max_support).logprobs


def support_entropy(
    logits: torch.Tensor,
    mask: SamplingMask | Sequence[SamplingMask],
    temperature: Any = 1.0,
    *,
    max_support: int | None = None,
) -> torch.Tensor:
    """The entropy of every token's policy on its recorded support, [n], in nats; differentiable.

    Arguments, dtype and errors as in support_logprobs.
    """
    mask = join_masks(mask)
    check_supports(mask, logits.shape[-1] if isinstance(logits, torch.Tensor) else None, max_support)
    return _result(_entropy(support_entries(logits, mask, temperature), mask), logits)


def replay(
    logits: torch.Tensor,
    mask: SamplingMask | Sequence[SamplingMask],
    temperature: Any = 1.0,
    *,
    token_ids: Any,
    max_support: int | None = None,
) -> Replayed:
    """Log-probabilities and entropy in one pass, with one gradient; arguments and errors as in support_logprobs."""
    mask = join_masks(mask)
    check_supports(mask, logits.shape[-1] if isinstance(logits, torch.Tensor) else None, max_support)
    taken = positions_of(as_ids(token_ids), mask)
    entries = support_entries(logits, mask, temperature)
    logprobs = entries[torch.from_numpy(taken).to(entries.device)]
    return Replayed(_result(logprobs, logits), _result(_entropy(entries, mask), logits))


def support_entries(logits: torch.Tensor, mask: SamplingMask, temperature: Any) -> torch.Tensor:
    """The log-probability of every entry of a checked mask, float64 [nnz]; differentiable.

    Raises:
        InvalidRequest: Logits of a wrong shape or dtype; a greedy token with more than one token in its support.
    """
    check_logits(logits, len(mask))
    temperature = temperatures(temperature, len(mask))
    wrong = np.flatnonzero((temperature < GREEDY_TEMPERATURE) & (mask.sizes != 1))
    if len(wrong):
        row = wrong[0]
        raise InvalidRequest(
            f"temperature[{row}]={temperature[row]}, expected at least 1e-5: mask[{row}] has {mask.sizes[row]} tokens, "
            "a greedy one has one"
        )
    offsets = mask.offsets.astype(np.int64, copy=False)
    return _SupportLogSoftmax.apply(logits, mask.token_ids.astype(np.int32, copy=False), offsets, temperature)


def as_ids(token_ids: Any) -> np.ndarray:
    """Token ids on the host, whatever holds them."""
    return token_ids.detach().cpu().numpy() if isinstance(token_ids, torch.Tensor) else np.asarray(token_ids)


def sum_rows(entries: torch.Tensor, offsets: np.ndarray) -> torch.Tensor:
    """The sums of the rows of CSR entries, [n]; differentiable."""
    rows = torch.from_numpy(rows_of(offsets)).to(entries.device)
    return entries.new_zeros(len(offsets) - 1).index_add(0, rows, entries)


class _SupportLogSoftmax(torch.autograd.Function):
    """gpu.replay's kernels as an operation of torch's. Keeps the entries for the backward pass, not the logits."""

    @staticmethod
    def forward(ctx, logits, token_ids, offsets, temperature):
        ctx.supports = token_ids, offsets, temperature
        ctx.like = logits.shape, logits.dtype, logits.device
        entries = torch.from_numpy(support_log_softmax(_host_array(logits), *ctx.supports)).to(logits.device)
        ctx.save_for_backward(entries)
        return entries

    @staticmethod
    @once_differentiable
    def backward(ctx, grad_entries):
        (entries,) = ctx.saved_tensors
        shape, dtype, device = ctx.like
        # NumPy's zeros are the system's own pages, touched only where something is written; torch would write them all.
        grad = np.zeros(shape, _HOST_DTYPES[dtype])
        token_ids, offsets, temperature = ctx.supports
        grad_entries = grad_entries.cpu().numpy()
        support_log_softmax_backward(entries.cpu().numpy(), grad_entries, token_ids, offsets, temperature, grad)
        grad_logits = torch.from_numpy(grad)
        return (grad_logits.view(dtype) if dtype == torch.bfloat16 else grad_logits).to(device), None, None, None


_HOST_DTYPES = {
    torch.float32: np.float32,
    torch.float64: np.float64,
    torch.float16: np.float16,
    torch.bfloat16: np.uint16,  # its bits
}


def _host_array(logits: torch.Tensor) -> np.ndarray:
    """The logits' memory as NumPy; a copy only from a device, or where the tokens of a row aren't adjacent."""
    logits = logits.detach().cpu()
    if logits.shape[1] > 1 and logits.stride(1) != 1:
        logits = logits.contiguous()
    return (logits.view(torch.uint16) if logits.dtype == torch.bfloat16 else logits).numpy()


def _entropy(entries: torch.Tensor, mask: SamplingMask) -> torch.Tensor:
    probs = entries.exp()
    # A token of probability 0 adds nothing; its -inf must not meet that 0.
    return -sum_rows(probs * entries.masked_fill(probs == 0, 0.0), mask.offsets)


def _result(values: torch.Tensor, logits: torch.Tensor) -> torch.Tensor:
    return values if logits.dtype == torch.float64 else values.float()

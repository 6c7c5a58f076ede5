"""Log-probabilities and entropy over the recorded supports, from a trainer's logits; differentiable in torch."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from gpu import GREEDY_TEMPERATURE
from pipeline.errors import InvalidRequest
from pipeline.replay.arguments import check_count, check_logits, temperatures
from pipeline.replay.arrays import tensor_of
from pipeline.replay.entries import Csr, entries_of
from pipeline.results.mask_checks import check_supports, join_masks, positions_of
from pipeline.results.rollout import SamplingMask


@dataclass(frozen=True, eq=False)
class Replayed:
    """What `replay` gives, n tokens. float64 for float64 logits, otherwise float32; on the logits' device.

    Attributes:
        logprobs: [n], the log-probability of every taken token over its recorded support.
        entropy: [n], in nats, of the policy on the support.
    """

    logprobs: torch.Tensor
    entropy: torch.Tensor


@dataclass(frozen=True, eq=False)
class Supports:
    """The recorded supports of n tokens, checked, on the trainer's device: ready for logits as they come.

    What replay does on the host (checks, copies to the device) is done here, once for all passes over the same tokens
    and before their logits are there. On CUDA the methods wait for nothing.

    Attributes:
        csr: The supports.
        temperature: float64 [n].
        taken: int64 [n], where the taken tokens stand among the entries; None where they weren't given.
        vocab_size: The vocabulary that the ids were checked against; logits have at least as many tokens.
    """

    csr: Csr
    temperature: torch.Tensor
    taken: torch.Tensor | None
    vocab_size: int

    @classmethod
    def of(
        cls,
        mask: SamplingMask | Sequence[SamplingMask],
        temperature: Any = 1.0,
        *,
        vocab_size: int,
        token_ids: Any = None,
        max_support: int | None = None,
        device: torch.device | str = "cpu",
    ) -> Supports:
        """Of one mask, or of several (a rollout each) side by side.

        Args:
            mask: The recorded supports.
            temperature: The rollout's: a number, or one a token. Below 1e-5 a token is greedy.
            vocab_size: What ids must be below.
            token_ids: The taken tokens, integers [n] (`Rollout.token_ids`, side by side where there are several).
            max_support: Refuse supports of more tokens; None: any size.
            device: Where the logits will be.

        Raises:
            InvalidRequest: A mask that trainers must refuse (see results/mask_checks.py), by row; a greedy token with
                more than one token in its support; a wrong shape or dtype.
        """
        mask, device = join_masks(mask), torch.device(device)
        check_supports(mask, vocab_size, max_support)
        taken = None if token_ids is None else positions_of(_as_ids(token_ids), mask)
        temperature = temperatures(temperature, len(mask))
        wrong = np.flatnonzero((temperature < GREEDY_TEMPERATURE) & (mask.sizes != 1))
        if len(wrong):
            row = wrong[0]
            raise InvalidRequest(
                f"temperature[{row}]={temperature[row]}, expected at least 1e-5: mask[{row}] has {mask.sizes[row]} "
                "tokens, a greedy one has one"
            )
        return cls(
            Csr.of(mask, device),
            tensor_of(temperature, np.float64, device),
            None if taken is None else tensor_of(taken, np.int64, device),
            vocab_size,
        )

    def replay(self, logits: torch.Tensor) -> Replayed:
        """Log-probabilities and entropy in one pass, with one gradient.

        Raises:
            InvalidRequest: Logits of a wrong shape, dtype or device; no `token_ids` at the start.
        """
        entries = self._entries(logits)
        return Replayed(self._logprobs(entries, logits), self._entropy(entries, logits))

    def logprobs(self, logits: torch.Tensor) -> torch.Tensor:
        """`replay`'s log-probabilities alone."""
        return self._logprobs(self._entries(logits), logits)

    def entropy(self, logits: torch.Tensor) -> torch.Tensor:
        """`replay`'s entropy alone; needs no `token_ids`."""
        return self._entropy(self._entries(logits), logits)

    def _entries(self, logits: torch.Tensor) -> torch.Tensor:
        check_logits(logits)
        check_count(logits, len(self.temperature))
        if logits.shape[1] < self.vocab_size:
            raise InvalidRequest(
                f"logits vocabulary={logits.shape[1]}, expected at least vocab_size={self.vocab_size}, which the "
                "supports were checked against"
            )
        if logits.device != self.temperature.device:
            raise InvalidRequest(f"logits on {logits.device}, expected {self.temperature.device}, as the supports")
        return entries_of(logits, self.csr, self.temperature)

    def _logprobs(self, entries: torch.Tensor, logits: torch.Tensor) -> torch.Tensor:
        if self.taken is None:
            raise InvalidRequest("token_ids=None, expected the taken tokens: give them to Supports.of")
        return _result(entries.index_select(0, self.taken), logits)

    def _entropy(self, entries: torch.Tensor, logits: torch.Tensor) -> torch.Tensor:
        probs = entries.exp()
        # A token of probability 0 adds nothing; its -inf must not meet that 0.
        return _result(-self.csr.sum_rows(probs * entries.masked_fill(probs == 0, 0.0)), logits)


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
    logits is the only dense tensor that is allocated; it is zero outside the supports. CUDA tensors stay on their
    device; the mask is checked and copied there with every call, `Supports` does that once.

    Args:
        logits: The trainer's, [n, V], float32, bfloat16, float16 or float64, after what the rollout's parameters
            change before the temperature (penalties, bias, processors). On the CPU, or on CUDA with CuPy.
        mask: The recorded supports: one mask of n rows, or several (a rollout each) that have n rows together.
        temperature: The rollout's: a number, or one a token. Below 1e-5 a token is greedy: 0, without a gradient.
        token_ids: The taken tokens, integers [n] (`Rollout.token_ids`, side by side where there are several).
        max_support: Refuse supports of more tokens; None: any size.

    Returns:
        float64 [n] for float64 logits, otherwise float32.

    Raises:
        InvalidRequest: A mask that trainers must refuse (see results/mask_checks.py), by row; a wrong shape or dtype.
    """
    return _supports(logits, mask, temperature, token_ids, max_support).logprobs(logits)


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
    return _supports(logits, mask, temperature, None, max_support).entropy(logits)


def replay(
    logits: torch.Tensor,
    mask: SamplingMask | Sequence[SamplingMask],
    temperature: Any = 1.0,
    *,
    token_ids: Any,
    max_support: int | None = None,
) -> Replayed:
    """Log-probabilities and entropy in one pass, with one gradient; arguments and errors as in support_logprobs."""
    return _supports(logits, mask, temperature, token_ids, max_support).replay(logits)


def _supports(logits: Any, mask: Any, temperature: Any, token_ids: Any, max_support: int | None) -> Supports:
    check_logits(logits)
    return Supports.of(
        mask,
        temperature,
        vocab_size=logits.shape[1],
        token_ids=token_ids,
        max_support=max_support,
        device=logits.device,
    )


def _as_ids(token_ids: Any) -> np.ndarray:
    """Token ids on the host, whatever holds them."""
    return token_ids.detach().cpu().numpy() if isinstance(token_ids, torch.Tensor) else np.asarray(token_ids)


def _result(values: torch.Tensor, logits: torch.Tensor) -> torch.Tensor:
    return values if logits.dtype == torch.float64 else values.float()

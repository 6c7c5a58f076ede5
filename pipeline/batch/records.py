"""The records that the stages hand on. B: requests of a block; W: its verify rows a request; V: the vocabulary.

Row i of a block is the target's policy after the anchor and i drafts: it tests draft i, or, where the request has no
draft left, gives the bonus token. A prefill's block has one row and no drafts.

On CUDA the laws, logits and supports of a block stay on the device, where the stages read them (held.py); as fields of
a record they are NumPy arrays, copied for whoever looks, and the rest is on the host anyway.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

import numpy as np
import torch

import gpu
from pipeline.batch.held import read_on_host
from pipeline.batch.request import Request
from pipeline.results.audit_record import AuditRecord
from pipeline.results.chunk import Chunk
from pipeline.results.rollout import Rollout


@dataclass(frozen=True)
class Admitted:
    """Set by admit: the requests that got a slot this round."""

    requests: list[Request]


@read_on_host("draft_probs")
@dataclass(frozen=True)
class Proposal:
    """Set by draft (by prefill: without drafts).

    Attributes:
        requests: B requests, in slot order.
        draft_tokens: int32 [B, W - 1].
        num_drafts: int32 [B], at most W - 1: what its limits, and the rule for lengths, leave a request.
        draft_probs: float32 [B, W - 1, V], the law that each draft was drawn from (one-hot for a chosen one); None
            where all drafts were chosen. A model's are held as a `gpu.LogitsLaw`, and written out for who looks.
    """

    requests: list[Request]
    draft_tokens: np.ndarray
    num_drafts: np.ndarray
    draft_probs: np.ndarray | gpu.LogitsLaw | None = None


@dataclass(frozen=True)
class Block:
    """Set by prefill or forward: logits [B, W, V] as the model gave them, on its device.

    Rows past a request's num_drafts mean nothing; where the forward left them out, they are NaN.
    """

    proposal: Proposal
    logits: torch.Tensor


@read_on_host("logits")
@dataclass(frozen=True)
class Adjusted:
    """Set by adjust: the logits that are sampled from, [B, W, V].

    float32 where any request adjusts its own; otherwise the model's dtype (bfloat16 as uint16 bits).

    Attributes:
        failures: Why row i of request b has no policy, by (b, i): its logits are NaN. It ends the request only if
            the verification gets there.
    """

    proposal: Proposal
    logits: np.ndarray
    failures: Mapping[tuple[int, int], str] = field(default_factory=dict)


@read_on_host("support")
@dataclass(frozen=True)
class Verified:
    """Set by verify: every row's policy (`gpu.Support`, rows in order b * W + i) and what was committed from it."""

    adjusted: Adjusted
    support: gpu.Support
    verdict: gpu.Verdict

    @property
    def proposal(self) -> Proposal:
        """The drafts that were tested."""
        return self.adjusted.proposal

    @property
    def logits(self) -> np.ndarray:
        """What was sampled from, [B, W, V]."""
        return self.adjusted.logits


@dataclass(frozen=True)
class Captured:
    """Set by capture.

    Attributes:
        verified: What it was captured from.
        capture: The supports of committed rows of the requests that record them, for a mask or an audit; None if no
            request of the block does.
        top_ids, top_values: int32 and float32 [N, K]: the largest log-probabilities of committed rows of the
            requests that asked; None if none did. `top_start`, int64 [B + 1]: request b's rows.
        audits: The record of each request's captured rows, None for one that didn't ask; None if none did.
    """

    verified: Verified
    capture: gpu.Capture | None
    top_ids: np.ndarray | None
    top_values: np.ndarray | None
    top_start: np.ndarray | None
    audits: list[AuditRecord | None] | None = None


@dataclass(frozen=True)
class Committed:
    """Set by commit: the requests' positions in cache and stream have moved on by `num_committed` (int32 [B])."""

    captured: Captured
    num_committed: np.ndarray


@dataclass(frozen=True)
class Packed:
    """Set by pack: the committed rows of every request, on the host.

    Attributes:
        requests: B requests.
        chunks: One for each: the rows before one that failed.
        failures: For each, why the row after its chunk failed, or None. It ends the request unless the output ends
            within the chunk.
        num_accepted: int32 [B], drafts accepted.
    """

    requests: list[Request]
    chunks: list[Chunk]
    failures: list[str | None]
    num_accepted: np.ndarray


@dataclass(frozen=True)
class Finished:
    """Set by finish: the rollouts of the requests that ended, whose slots are free now."""

    ended: list[tuple[Request, Rollout]]


@dataclass(frozen=True)
class Settled:
    """What became of one block, stage by stage."""

    block: Block
    adjusted: Adjusted
    verified: Verified
    captured: Captured
    committed: Committed
    packed: Packed
    finished: Finished


@dataclass(frozen=True)
class Delivered:
    """What became of a round that the engine launched in an earlier step: only what the host needs of it."""

    packed: Packed
    finished: Finished


@dataclass(frozen=True)
class Round:
    """What `SpeculativePipeline.step` returns.

    Attributes:
        admitted: Who got a slot.
        prefill: The block of the first tokens; None if nobody was admitted.
        decode: The block of the round; None if nothing was left to decode.
        delivered: With an engine: what came back of rounds launched before, oldest first. prefill and decode are None
            then, for a round's logits and supports stay on the device.
        taken_out: What ended before the round: cancelled, or at fault in rounds that failed.
    """

    admitted: Admitted
    prefill: Settled | None
    decode: Settled | None
    delivered: Sequence[Delivered] = ()
    taken_out: Sequence[tuple[Request, Rollout]] = ()

    @property
    def _parts(self) -> list[Settled | Delivered]:
        return [*self.delivered, *(part for part in (self.prefill, self.decode) if part is not None)]

    @property
    def ended(self) -> list[tuple[Request, Rollout]]:
        """The requests that ended in this round, with what they ended as."""
        return [*self.taken_out, *(pair for part in self._parts for pair in part.finished.ended)]

    @property
    def rollouts(self) -> list[Rollout]:
        """What ended in this round."""
        return [rollout for _, rollout in self.ended]

    @property
    def num_tokens(self) -> int:
        """Tokens committed in this round."""
        return sum(len(chunk.token_ids) for part in self._parts for chunk in part.packed.chunks)

"""What a request ends as: its tokens and the record of how each was drawn."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Literal

import numpy as np

from pipeline.errors import short
from pipeline.results.audit_record import AuditRecord

FinishReason = Literal["eos", "stop", "length", "time", "cancelled", "abort"]


@dataclass(frozen=True, eq=False)
class SamplingMask:
    """The support of every committed token's policy, in CSR form: row i is the support that token i was drawn from.

    Attributes:
        token_ids: int32 [nnz], ascending within a row.
        offsets: int64 [n + 1]; row i is ``token_ids[offsets[i]:offsets[i + 1]]``.
        logprobs: float32. In "support" mode [nnz]: the log-probability of every kept token. In "selected" mode [n]:
            that of the committed token.
        mode: "support" or "selected".
    """

    token_ids: np.ndarray
    offsets: np.ndarray
    logprobs: np.ndarray
    mode: Literal["selected", "support"]

    def __len__(self) -> int:
        return len(self.offsets) - 1

    def __getitem__(self, row: int) -> np.ndarray:
        """The support of one token, int32."""
        if not -len(self) <= row < len(self):
            raise IndexError(f"row={row}, expected one of {len(self)} rows")
        row %= len(self)
        return self.token_ids[self.offsets[row] : self.offsets[row + 1]]

    def __iter__(self) -> Iterator[np.ndarray]:
        return (self[row] for row in range(len(self)))

    @property
    def sizes(self) -> np.ndarray:
        """int64 [n]: the number of tokens in every support."""
        return np.diff(self.offsets)

    def row_logprobs(self, row: int) -> np.ndarray:
        """float32: the log-probabilities beside ``self[row]``; "support" mode only."""
        if self.mode != "support":
            raise ValueError(f'mode={self.mode!r}, expected "support": ask for sampling_logprobs="support"')
        row = range(len(self))[row]
        return self.logprobs[self.offsets[row] : self.offsets[row + 1]]


@dataclass(frozen=True, eq=False)
class TopLogprobs:
    """The largest log-probabilities of every committed token's policy.

    Attributes:
        ids: int32 [n, K], most probable first, ties by id; -1 where the support is smaller than K.
        values: float32 [n, K]; -inf there.
    """

    ids: np.ndarray
    values: np.ndarray


@dataclass(frozen=True, eq=False)
class Rollout:
    """One finished sample.

    Attributes:
        prompt_token_ids: int32.
        token_ids: int32 [n], the EOS or stop token included.
        text: The decoded output, cut before a stop string; "" without a tokenizer.
        finish_reason: "eos", "stop" (a stop string or stop token), "length", "time" (its `max_time` was over),
            "cancelled" (by `SpeculativePipeline.cancel`), or "abort": then `error` says why, and no token is handed
            out.
        logprobs: float32 [n], each token's log-probability under the policy it was drawn from; or None.
        sampling_mask: The supports, if they were asked for.
        top_logprobs: The largest log-probabilities, if they were asked for.
        num_rounds: Verification rounds, the one on the prefill's logits included.
        num_accepted: int32 [num_rounds], the drafts accepted in every round (before the cut at the end).
        seed: The seed this sample was drawn with; None if it never started.
        prompt_index: Which prompt of the call; `sample_index`: which of its `n` samples.
        error: None, or why the request was refused or aborted.
        prompt_id: The caller's own name for the prompt: the command line's, from its prompts file.
        audit: With ``record="audit"``, what `pipeline.audit` derives the tokens from again.
    """

    prompt_token_ids: np.ndarray
    token_ids: np.ndarray
    text: str
    finish_reason: FinishReason
    logprobs: np.ndarray | None
    sampling_mask: SamplingMask | None
    top_logprobs: TopLogprobs | None
    num_rounds: int
    num_accepted: np.ndarray
    seed: int | None
    prompt_index: int
    sample_index: int
    params_index: int
    error: str | None = None
    prompt_id: str | None = None
    audit: AuditRecord | None = None

    @classmethod
    def refused(cls, reason: str, prompt_index: int, samples: int, params_index: int) -> list[Rollout]:
        """The rollouts, one a sample, of a request that never started."""
        return [
            cls(
                prompt_token_ids=np.empty(0, np.int32),
                token_ids=np.empty(0, np.int32),
                text="",
                finish_reason="abort",
                logprobs=None,
                sampling_mask=None,
                top_logprobs=None,
                num_rounds=0,
                num_accepted=np.empty(0, np.int32),
                seed=None,
                prompt_index=prompt_index,
                sample_index=i,
                params_index=params_index,
                error=reason,
            )
            for i in range(samples)
        ]

    def __repr__(self) -> str:
        """A line for a reader; the arrays are many and long."""
        name = "" if self.prompt_id is None else f" ({short(self.prompt_id, 40)})"
        said = short(self.text, 40) if self.error is None else f"error={short(self.error)}"
        return (
            f"<Rollout of prompt {self.prompt_index}{name}, sample {self.sample_index}: "
            f"{len(self.prompt_token_ids)} prompt tokens, {len(self.token_ids)} tokens, {self.finish_reason}, {said}>"
        )

    @property
    def ok(self) -> bool:
        """Whether the request ran to its end."""
        return self.error is None

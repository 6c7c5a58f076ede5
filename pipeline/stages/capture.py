"""Stage 7: the records of committed rows, from the numbers that verified them."""

from __future__ import annotations

import numpy as np

import gpu
from pipeline.recording import record_rows
from pipeline.records import Captured, Verified
from pipeline.state import State


class Capture:
    """Supports, top log-probabilities and audit records for the requests that asked; nothing for anybody else."""

    def __call__(self, state: State, verified: Verified) -> Captured:
        requests = verified.proposal.requests
        wanted = np.array([request.params.keeps_supports for request in requests])
        capture = None
        if wanted.any():
            capture = gpu.capture_masks(
                verified.logits, verified.support, verified.verdict, wanted, state.options.max_support
            )
        audits = None
        if capture is not None and any(request.params.record == "audit" for request in requests):
            audits = [
                record_rows(verified, capture, b) if request.params.record == "audit" else None
                for b, request in enumerate(requests)
            ]
        return Captured(verified, capture, *self._top(verified), audits)

    @staticmethod
    def _top(verified: Verified) -> tuple[np.ndarray | None, np.ndarray | None, np.ndarray | None]:
        most = [request.params.top_logprobs for request in verified.proposal.requests]
        if not any(most):
            return None, None, None
        counts = np.where(most, verified.verdict.num_committed, 0)
        start = np.concatenate([[0], np.cumsum(counts)]).astype(np.int64)
        width, vocabulary = verified.logits.shape[1:]
        rows = np.concatenate([b * width + np.arange(count) for b, count in enumerate(counts)])
        flat = verified.logits.reshape(-1, vocabulary)
        ids, values = gpu.top_logprobs(flat, verified.support, max(most), rows.astype(np.int64))
        return ids, values, start

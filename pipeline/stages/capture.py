"""Stage 7: the records of committed rows, from the numbers that verified them."""

from __future__ import annotations

import numpy as np

import gpu
from pipeline.batch.held import held
from pipeline.batch.recording import record_rows
from pipeline.batch.records import Captured, Verified
from pipeline.batch.state import State


class Capture:
    """Supports, top log-probabilities and audit records for the requests that asked; nothing for anybody else.

    Made where the supports are, and brought to the host as large as they turn out.
    """

    def __call__(self, state: State, verified: Verified) -> Captured:
        requests = verified.proposal.requests
        wanted = np.array([request.params.keeps_supports for request in requests])
        capture = None
        if wanted.any():
            support = held(verified, "support")
            capture = gpu.to_host(
                gpu.capture_masks(
                    gpu.beside(support.status, held(verified.adjusted, "logits")),
                    support,
                    gpu.beside(support.status, verified.verdict),
                    gpu.beside(support.status, wanted),
                    state.options.max_support,
                )
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
        support = held(verified, "support")
        if max(most) > gpu.MOST_TOP_ON_DEVICE:
            support = gpu.to_host(support)
        logits = gpu.beside(support.status, held(verified.adjusted, "logits"))
        width = logits.shape[1]
        rows = np.concatenate([b * width + np.arange(count) for b, count in enumerate(counts)]).astype(np.int64)
        ids, values = gpu.top_logprobs(logits, support, max(most), gpu.beside(support.status, rows))
        return gpu.to_host(ids), gpu.to_host(values), start

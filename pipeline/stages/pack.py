"""Stage 9: the committed rows of every request, side by side with their records."""

from __future__ import annotations

import numpy as np

import gpu
from pipeline.chunk import Chunk
from pipeline.records import Captured, Committed, Packed
from pipeline.request import Request
from pipeline.state import State


class Pack:
    """Takes the block's arrays apart by request, and finds the row at which a request fails, if one does."""

    def __call__(self, state: State, committed: Committed) -> Packed:
        captured = committed.captured
        requests = captured.verified.proposal.requests
        chunks, failures = [], []
        for b, request in enumerate(requests):
            length, failure = self._reached(state, captured, b, request)
            chunks.append(self._chunk(captured, b, length, request))
            failures.append(failure)
        return Packed(requests, chunks, failures, captured.verified.verdict.num_accepted)

    @staticmethod
    def _chunk(captured: Captured, b: int, length: int, request: Request) -> Chunk:
        # Copies: a request must not keep its neighbours' part of the block alive.
        verdict, capture = captured.verified.verdict, captured.capture
        mask_sizes = mask_ids = mask_logprobs = top_ids = top_values = None
        if capture is not None and request.params.return_sampling_mask:
            first = capture.row_start[b]
            offsets = capture.offsets[first : first + length + 1]
            mask_sizes = np.diff(offsets)
            mask_ids = capture.token_ids[offsets[0] : offsets[-1]].copy()
            mask_logprobs = capture.logprobs[offsets[0] : offsets[-1]].copy()
        audit = None if captured.audits is None else captured.audits[b]
        most = request.params.top_logprobs
        if most:
            assert captured.top_start is not None
            assert captured.top_ids is not None
            assert captured.top_values is not None
            rows = slice(captured.top_start[b], captured.top_start[b] + length)
            top_ids, top_values = captured.top_ids[rows, :most].copy(), captured.top_values[rows, :most].copy()
        return Chunk(
            verdict.tokens[b, :length].copy(),
            verdict.logprobs[b, :length].copy(),
            mask_sizes,
            mask_ids,
            mask_logprobs,
            top_ids,
            top_values,
            None if audit is None else audit.cut(length),
        )

    @staticmethod
    def _reached(state: State, captured: Captured, b: int, request: Request) -> tuple[int, str | None]:
        """How many rows of the request are good, and why the next one isn't."""
        verdict, capture = captured.verified.verdict, captured.capture
        if request.error:
            return 0, request.error
        if capture is not None and capture.status[b] == gpu.OVERFLOW:
            row = int(capture.failed_row[b])
            return row, (
                f"OVERFLOW: support={capture.counts[b, row]}, expected at most "
                f"max_support={state.options.max_support}; lower top_k or top_p, or build the pipeline with a "
                "larger max_support"
            )
        if verdict.status[b] == gpu.INVALID:
            row = int(verdict.error_row[b])
            return row, captured.verified.adjusted.failures.get((b, row)) or (
                f"INVALID: the policy of output token {request.num_generated + row} has NaN, +inf or no finite "
                "logit, or its draft has no probability under its own law; check the weights, the processors and "
                "the draft"
            )
        return int(verdict.num_committed[b]), None

"""Stage 9: the committed rows of every request, side by side with their records."""

from __future__ import annotations

import numpy as np

import gpu
from pipeline.chunk import Chunk
from pipeline.records import Captured, Committed, Packed
from pipeline.request import Request
from pipeline.state import State

EMPTY = Chunk(np.empty(0, np.int32), np.empty(0, np.float32))


class Pack:
    """Takes the block's arrays apart by request and turns statuses into reasons."""

    def __call__(self, state: State, committed: Committed) -> Packed:
        captured = committed.captured
        requests = captured.verified.proposal.requests
        chunks = []
        for b, (request, count) in enumerate(zip(requests, committed.num_committed, strict=True)):
            self._explain(state, captured, b, request)
            chunks.append(EMPTY if request.error else self._chunk(captured, b, int(count), request))
        return Packed(requests, chunks, captured.verified.verdict.num_accepted)

    @staticmethod
    def _chunk(captured: Captured, b: int, count: int, request: Request) -> Chunk:
        verdict, capture = captured.verified.verdict, captured.capture
        mask_sizes = mask_ids = mask_logprobs = top_ids = top_values = None
        if capture is not None and request.params.return_sampling_mask:
            offsets = capture.offsets[capture.row_start[b] : capture.row_start[b + 1] + 1]
            mask_sizes = np.diff(offsets)
            mask_ids = capture.token_ids[offsets[0] : offsets[-1]]
            mask_logprobs = capture.logprobs[offsets[0] : offsets[-1]]
        most = request.params.top_logprobs
        if most:
            assert captured.top_start is not None
            assert captured.top_ids is not None
            assert captured.top_values is not None
            rows = slice(captured.top_start[b], captured.top_start[b + 1])
            top_ids, top_values = captured.top_ids[rows, :most], captured.top_values[rows, :most]
        return Chunk(
            verdict.tokens[b, :count],
            verdict.logprobs[b, :count],
            mask_sizes,
            mask_ids,
            mask_logprobs,
            top_ids,
            top_values,
        )

    @staticmethod
    def _explain(state: State, captured: Captured, b: int, request: Request) -> None:
        verdict, capture = captured.verified.verdict, captured.capture
        if verdict.status[b] == gpu.INVALID:
            token = request.num_generated + int(verdict.error_row[b])
            request.fail(
                f"INVALID: the policy of output token {token} has NaN, +inf or no finite logit, or its draft has "
                "no probability under its own law; check the weights, the processors and the draft"
            )
        elif capture is not None and request.params.return_sampling_mask and capture.status[b] == gpu.OVERFLOW:
            request.fail(
                f"OVERFLOW: support={capture.counts[b].max()}, expected at most "
                f"max_support={state.options.max_support}; lower top_k or top_p, or build the pipeline with a "
                "larger max_support"
            )

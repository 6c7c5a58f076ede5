"""Stage 9: the committed rows of every request, side by side with their records."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

import numpy as np

import gpu
from pipeline.batch.records import Committed, Packed
from pipeline.batch.request import Request
from pipeline.batch.state import State
from pipeline.results.audit_record import AuditRecord
from pipeline.results.chunk import Chunk


@dataclass(frozen=True)
class BlockRows:
    """What a block's rows came to, on the host; the fields as in `pipeline.batch.records.Captured` and `Adjusted`."""

    verdict: gpu.Verdict
    capture: gpu.Capture | None
    top_ids: np.ndarray | None = None
    top_values: np.ndarray | None = None
    top_start: np.ndarray | None = None
    audits: Sequence[AuditRecord | None] | None = None
    failures: Mapping[tuple[int, int], str] | None = None


class Pack:
    """Takes the block's arrays apart by request, and finds the row at which a request fails, if one does."""

    def __call__(self, state: State, committed: Committed) -> Packed:
        captured = committed.captured
        rows = BlockRows(
            verdict=captured.verified.verdict,
            capture=captured.capture,
            top_ids=captured.top_ids,
            top_values=captured.top_values,
            top_start=captured.top_start,
            audits=captured.audits,
            failures=captured.verified.adjusted.failures,
        )
        return pack_rows(rows, enumerate(captured.verified.proposal.requests), state.options.max_support)


class _Masks:
    """A capture taken apart; what is looked up for each request is taken out of the arrays once for all."""

    def __init__(self, capture: gpu.Capture):
        self._ids, self._logprobs = map(np.ascontiguousarray, (capture.token_ids, capture.logprobs))
        self._starts, self._offsets = capture.row_start.tolist(), capture.offsets.tolist()
        self._sizes = capture.offsets[1:] - capture.offsets[:-1]

    def of(self, b: int, length: int) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        """Sizes, ids and log-probabilities of a request's first rows."""
        first = self._starts[b]
        entries = slice(self._offsets[first], self._offsets[first + length])
        return self._sizes[first : first + length], self._ids[entries], self._logprobs[entries]


def pack_rows(rows: BlockRows, requests: Iterable[tuple[int, Request]], max_support: int) -> Packed:
    """The rows of these requests, each with its index in the block: mostly views of its arrays."""
    requests = list(requests)
    tokens, logprobs = map(np.ascontiguousarray, (rows.verdict.tokens, rows.verdict.logprobs))
    lengths, failing = rows.verdict.num_committed.tolist(), _failing(rows)
    masks = None if rows.capture is None else _Masks(rows.capture)
    chunks: list[Chunk] = []
    failures: list[str | None] = []
    for b, request in requests:
        params, length, failure = request.params, lengths[b], None
        if failing[b] or request.error:
            length, failure = _failed(rows, b, request, max_support)
        sizes = ids = entries = top_ids = top_values = None
        if masks is not None and params.return_sampling_mask:
            sizes, ids, entries = masks.of(b, length)
        if params.top_logprobs:
            top_ids, top_values = _top(rows, b, length, params.top_logprobs)
        audit = None if rows.audits is None else rows.audits[b]
        if audit is not None:
            audit = audit.cut(length)
        chunks.append(Chunk(tokens[b, :length], logprobs[b, :length], sizes, ids, entries, top_ids, top_values, audit))
        failures.append(failure)
    accepted = rows.verdict.num_accepted[[b for b, _ in requests]]
    return Packed([request for _, request in requests], chunks, failures, accepted)


def _top(rows: BlockRows, b: int, length: int, most: int) -> tuple[np.ndarray, np.ndarray]:
    assert rows.top_start is not None
    assert rows.top_ids is not None
    assert rows.top_values is not None
    own = slice(rows.top_start[b], rows.top_start[b] + length)
    # Copies: contiguous, and the block's memory is used again.
    return rows.top_ids[own, :most].copy(), rows.top_values[own, :most].copy()


def _failing(rows: BlockRows) -> list[bool]:
    """Which requests of the block have a row that failed."""
    failing = rows.verdict.status == gpu.INVALID
    if rows.capture is not None:
        failing = failing | (rows.capture.status == gpu.OVERFLOW)
    return failing.tolist()


def _failed(rows: BlockRows, b: int, request: Request, max_support: int) -> tuple[int, str]:
    """How many rows of a request that failed, or had failed before, are good, and why the next one isn't."""
    verdict, capture = rows.verdict, rows.capture
    if request.error:
        return 0, request.error
    if capture is not None and capture.status[b] == gpu.OVERFLOW:
        row = int(capture.failed_row[b])
        return row, (
            f"OVERFLOW: support={capture.counts[b, row]}, expected at most max_support={max_support}; lower top_k or "
            "top_p, or build the pipeline with a larger max_support"
        )
    row = int(verdict.error_row[b])
    return row, (rows.failures or {}).get((b, row)) or (
        f"INVALID: the policy of output token {request.num_generated + row} has NaN, +inf or no finite "
        "logit, or its draft has no probability under its own law; check the weights, the processors and "
        "the draft"
    )

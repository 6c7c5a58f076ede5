"""The audit record of a block's rows, from the arrays that the verification read and wrote."""

from __future__ import annotations

import numpy as np

import gpu
from pipeline.batch.held import held, on_host
from pipeline.batch.records import Verified
from pipeline.results.audit_record import AuditRecord


def record_rows(verified: Verified, capture: gpu.Capture, b: int) -> AuditRecord:
    """The record of request b's captured rows; copies, which keep nothing of the block alive.

    Of a block on a device only these rows are copied.

    Raises:
        ValueError: A verify stage put in the library's place stored fewer entries than the captured support.
    """
    proposal, support, verdict = verified.proposal, held(verified, "support"), verified.verdict
    request, width = proposal.requests[b], verdict.tokens.shape[1]
    first, last = capture.row_start[b], capture.row_start[b + 1]
    offsets = capture.offsets[first : last + 1]
    sizes = np.diff(offsets)
    if sizes.size and sizes.max() > support.capacity:
        raise ValueError(
            f"support capacity={support.capacity}, expected at least {sizes.max()}: an audit reads the weights "
            "that the verify stage stored, so let it store max_support entries"
        )
    token_ids = capture.token_ids[offsets[0] : offsets[-1]].copy()
    index = np.arange(last - first)
    block_rows = slice(b * width, b * width + index.size)
    stored, totals = gpu.to_host(support.weights[block_rows]), gpu.to_host(support.total[block_rows])
    tested = index < proposal.num_drafts[b]
    drafts = np.full(index.size, -1, np.int32)
    drafts[tested] = proposal.draft_tokens[b, index[tested]]
    draft_probs = np.where(tested, 1.0, np.nan).astype(np.float32)
    laws: list[np.ndarray] = [np.empty(0, np.float32)] * index.size
    if held(proposal, "draft_probs") is not None:
        drawn_from = on_host(held(proposal, "draft_probs")[b : b + 1])[0]
        supports = np.split(token_ids, np.cumsum(sizes)[:-1])
        for i in index[tested]:
            draft_probs[i], laws[i] = drawn_from[i, drafts[i]], drawn_from[i, supports[i]]
    bounds = np.empty(0)
    if verdict.bounds is not None and index.size:
        bounds = verdict.bounds[b, 1:]
        bounds = bounds[~np.isnan(bounds)]
    weights = [row[:size].astype(np.int64) for row, size in zip(stored, sizes, strict=True)]
    return AuditRecord(
        rounds=np.full(index.size, len(request.num_accepted), np.int32),
        rows=index.astype(np.int32),
        positions=request.num_generated + index.astype(np.int64),
        draft_tokens=drafts,
        draft_probs=draft_probs,
        accepted=index < verdict.num_accepted[b],
        totals=totals.astype(np.int64),
        offsets=offsets - offsets[0],
        token_ids=token_ids,
        weights=np.concatenate([np.empty(0, np.int64), *weights]),
        proposal_offsets=np.concatenate([[0], np.cumsum([law.size for law in laws])]).astype(np.int64),
        proposal_probs=np.concatenate([np.empty(0, np.float32), *laws]).astype(np.float32),
        bound_offsets=np.where(np.arange(index.size + 1) > 0, bounds.size, 0),
        bounds=bounds,
    )

"""Stage 8: the requests move on by what was committed."""

from __future__ import annotations

from pipeline.batch.records import Captured, Committed
from pipeline.batch.state import State


class Commit:
    """The cache now holds the old anchor and the accepted drafts; what was rejected will be overwritten.

    A prefill's block has no anchor: its prompt is in the cache already.
    """

    def __call__(self, state: State, captured: Captured) -> Committed:
        verdict = captured.verified.verdict
        for request, committed in zip(captured.verified.proposal.requests, verdict.num_committed, strict=True):
            if request.num_generated:
                request.cached += int(committed)
        return Committed(captured, verdict.num_committed)

"""Which parts of a round a batch uses, and which requests the engine leaves to the eager rounds."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, replace
from typing import Any

import gpu
from pipeline.batch.request import Request
from pipeline.batch.state import State
from pipeline.drafting.proposer import Proposer
from pipeline.engine.buckets import top_bucket
from pipeline.policy.params import SamplingParams
from pipeline.policy.policies import weighed_whole
from pipeline.stages.draft import draws_drafts


@dataclass(frozen=True)
class Features:
    """What a round does beside drafting and verifying; another set of them is another graph.

    Attributes:
        masks: Supports are captured.
        top: So many of the largest log-probabilities a row; 0: none.
        adjusts: Logits are changed before sampling.
        draws: Drafts of sampled requests are drawn, not chosen.
        whole_rows: Rows of some slot have to be weighed whole: `gpu.run_round` is faster if it knows.
        restricts: Rows have masks that the host makes while the round runs.
        threshold_single, threshold_acc: Acceptance thresholds.
    """

    masks: bool = False
    top: int = 0
    adjusts: bool = False
    draws: bool = False
    whole_rows: bool = False
    restricts: bool = False
    threshold_single: float = 1.0
    threshold_acc: float = 1.0

    @classmethod
    def of(cls, state: State, requests: Iterable[Request], batch: int) -> Features:
        """The parts that these requests need, in a round over slots 0..batch-1."""
        requests = list(requests)
        params = _distinct(requests)
        others = _distinct(r for r in state.running if r.slot < batch)
        order, vocabulary = state.options.filter_order, state.target.vocab_size
        draws = not isinstance(state.draft, Proposer | None) and draws_drafts(state)
        adjusts = any(p.adjusts for p in params)
        if not adjusts and any(p.min_new_tokens for p in params):
            # A grammar's masks ban early endings themselves.
            adjusts = any(r.grammar is None and r.num_generated < r.params.min_new_tokens for r in requests)
        return cls(
            masks=any(p.keeps_supports for p in params),
            top=top_bucket(max((p.top_logprobs for p in params), default=0)),
            adjusts=adjusts,
            draws=draws and not all(p.greedy for p in params),
            whole_rows=any(weighed_whole(p, vocabulary, order) for p in others),
            restricts=any(r.grammar is not None for r in requests),
            threshold_single=state.threshold_single,
            threshold_acc=state.threshold_acc,
        )

    def first(self) -> Features:
        """The same for a round of first tokens, which has no drafts."""
        return replace(self, draws=False)


def _distinct(requests: Iterable[Request]) -> list[SamplingParams]:
    """The parameters of requests, of which a call's mostly share one object: this is asked every round."""
    return list({id(request.params): request.params for request in requests}.values())


def why_eager(state: State, requests: Iterable[Request]) -> str | None:
    """Why a batch of these requests runs in eager rounds, or None: what only the host can do between rounds."""
    if state.options.draft_lengths is not None:
        return f"draft_lengths={state.options.draft_lengths!r} looks at every round's confidences on the host"
    if state.draft is not None and not getattr(state.draft, "captured", False):
        return f"the draft method {state.draft.method!r} doesn't say that it can be captured"
    for request in requests:
        reason = _why_host(request.params)
        if reason is not None:
            return reason
    return None


def _why_host(params: Any) -> str | None:
    if params.logits_processors:
        return "logits_processors are Python"
    if params.record is not None:
        return f"record={params.record!r} keeps the weights of every round"
    if params.top_logprobs > gpu.MOST_TOP_ON_DEVICE:
        return f"top_logprobs={params.top_logprobs} is more than {gpu.MOST_TOP_ON_DEVICE}"
    return None

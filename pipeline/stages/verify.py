"""Stage 6: every row's policy, the accepted drafts, and the token that follows them."""

from __future__ import annotations

import numpy as np

import gpu
from pipeline.batch.held import held
from pipeline.batch.records import Adjusted, Verified
from pipeline.batch.request import Request
from pipeline.batch.state import State
from pipeline.policy.policies import row_policies, weighed_whole

WORKING_SUPPORT = 1024
"""Support entries kept a row where nobody records supports; wider rows are walked again by the draw."""


class Verify:
    """Selects each row's support, tests the drafts with the request's coins, and draws the replacement or bonus.

    Where the logits are; the verdict comes to the host.

    Attributes:
        preserves_law: Committed tokens follow the target's policy. A stage put in this one's place must say so
            itself, or mask requests are refused.
    """

    preserves_law = True

    def __call__(self, state: State, adjusted: Adjusted) -> Verified:
        proposal, logits = adjusted.proposal, held(adjusted, "logits")
        requests = proposal.requests
        batch, width, vocabulary = logits.shape
        recorded = any(request.params.keeps_supports for request in requests)

        params = [request.params for request in requests]
        support = gpu.select_support(
            logits.reshape(batch * width, vocabulary),
            *row_policies(params, width, vocabulary, logits),
            filter_order=state.options.filter_order,
            capacity=min(vocabulary, state.options.max_support if recorded else WORKING_SUPPORT),
            whole_rows=any(weighed_whole(p, vocabulary, state.options.filter_order) for p in params),
        )
        laws = held(proposal, "draft_probs")
        single, acc = state.threshold_single, state.threshold_acc
        purpose = gpu.accept_purpose(laws, threshold_single=single, threshold_acc=acc)
        verdict = gpu.verify_chain(
            logits,
            support,
            gpu.beside(logits, proposal.draft_tokens),
            gpu.beside(logits, proposal.num_drafts),
            gpu.beside(logits, self._coins(requests, width, purpose)),
            gpu.beside(logits, self._coins(requests, width, gpu.DRAW)),
            draft_probs=None if laws is None else gpu.beside(logits, laws),
            threshold_single=single,
            threshold_acc=acc,
        )
        return Verified(adjusted, support, gpu.to_host(verdict))

    @staticmethod
    def _coins(requests: list[Request], width: int, purpose: int) -> np.ndarray:
        seeds = np.array([request.seed for request in requests], dtype=np.uint64)
        positions = np.array([request.num_generated for request in requests], dtype=np.int64)
        return gpu.uniforms(seeds, positions, width, purpose)

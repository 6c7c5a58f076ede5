"""Stage 2: the prompts of admitted requests, once a prompt."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from pipeline.records import Admitted, Block, Proposal
from pipeline.request import Request
from pipeline.state import State


@dataclass(frozen=True)
class Prefix:
    """A prompt's prefill, kept while samples of it wait for a slot."""

    logits: torch.Tensor
    target_row: Any
    draft_row: Any


class Prefill:
    """Runs each prompt alone and at its exact length, so that a request's numbers don't depend on its company.

    The first sample of a prompt computes; the others copy its cache rows. All draw their first token from the same
    logits.
    """

    def __call__(self, state: State, admitted: Admitted) -> Block:
        logits = torch.cat([self._prefix(state, request) for request in admitted.requests])
        proposal = Proposal(
            requests=admitted.requests,
            draft_tokens=np.empty((len(admitted.requests), 0), dtype=np.int32),
            num_drafts=np.zeros(len(admitted.requests), dtype=np.int32),
        )
        return Block(proposal, logits)

    def _prefix(self, state: State, request: Request) -> torch.Tensor:
        prompt = request.prompt
        length = len(prompt.token_ids)
        others = len(prompt.unstarted) > (request.sample_index in prompt.unstarted)
        if prompt.prefix is None:
            logits = self._compute(state, request)
            if others:
                prompt.prefix = Prefix(
                    logits=logits,
                    target_row=state.target_cache.snapshot(request.slot, length),
                    draft_row=None if state.draft is None else state.draft_cache.snapshot(request.slot, length),
                )
        else:
            logits = prompt.prefix.logits
            state.target_cache.restore(request.slot, prompt.prefix.target_row)
            if state.draft is not None:
                state.draft_cache.restore(request.slot, prompt.prefix.draft_row)
            if not others:
                prompt.prefix = None
        prompt.unstarted.discard(request.sample_index)
        request.cached = length
        return logits

    @staticmethod
    def _compute(state: State, request: Request) -> torch.Tensor:
        target, slots = state.target, [request.slot]
        state.tap()
        ids = torch.as_tensor(request.prompt.token_ids.astype(np.int64), device=target.device)[None]
        positions = torch.arange(ids.shape[1], device=target.device)[None]
        chunk = state.options.prefill_chunk
        for start in range(0, ids.shape[1], chunk):
            end = min(start + chunk, ids.shape[1])
            output = target.forward(
                ids[:, start:end],
                positions[:, start:end],
                state.target_cache,
                slots=slots,
                last_only=True,
                kv_length=end,
            )
            if state.draft is not None:
                state.draft.extend(
                    output.features, positions[:, start:end], state.draft_cache, slots=slots, kv_length=end
                )
        return output.logits

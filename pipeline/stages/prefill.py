"""Stage 2: the prompts of admitted requests, once a prompt."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from pipeline.batch.records import Admitted, Block, Proposal
from pipeline.batch.request import Request
from pipeline.batch.state import State


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
        left, start = request.prompt.prefix, 0
        logits = None if left is None else share_prefix(state, request, left)
        while logits is None:
            start, logits = run_chunk(state, request, start)
        return logits


def share_prefix(state: State, request: Request, left: Prefix) -> torch.Tensor:
    """Copy what a sibling left to the request's slot; its logits [1, 1, V]. The last sibling's is forgotten."""
    state.target_cache.restore(request.slot, left.target_row)
    if state.draft is not None:
        state.draft_cache.restore(request.slot, left.draft_row)
    if not _others(request):
        request.prompt.prefix = None
    _passed(request)
    return left.logits


def run_chunk(state: State, request: Request, start: int) -> tuple[int, torch.Tensor | None]:
    """Run the prompt's chunk at `start`; where the next one starts, and behind the last the logits [1, 1, V]."""
    target, slots = state.target, [request.slot]
    token_ids = request.prompt.token_ids
    end = min(start + state.options.prefill_chunk, len(token_ids))
    state.tap()
    ids = torch.from_numpy(token_ids[start:end].astype(np.int64))
    if target.device.type == "cuda":
        ids = ids.pin_memory()  # or the host would wait for all that is queued
    positions = torch.arange(start, end, device=target.device)[None]
    ids = ids.to(target.device, non_blocking=True)[None]
    output = target.forward(ids, positions, state.target_cache, slots=slots, last_only=True, kv_length=end)
    if state.draft is not None:
        state.draft.extend(output.features, positions, state.draft_cache, slots=slots, kv_length=end)
    if end < len(token_ids):
        return end, None
    end_prompt(state, request, output.logits)
    return end, output.logits


def end_prompt(state: State, request: Request, logits: torch.Tensor) -> None:
    """The request's prompt is through the models, with these logits [1, 1, V]: keep what its siblings need."""
    if _others(request):
        length = len(request.prompt.token_ids)
        request.prompt.prefix = Prefix(
            logits=logits.clone(),
            target_row=state.target_cache.snapshot(request.slot, length),
            draft_row=None if state.draft is None else state.draft_cache.snapshot(request.slot, length),
        )
    _passed(request)


def _others(request: Request) -> bool:
    """Whether siblings wait for the prompt's prefill."""
    unstarted = request.prompt.unstarted
    return len(unstarted) > (request.sample_index in unstarted)


def _passed(request: Request) -> None:
    request.prompt.unstarted.discard(request.sample_index)
    request.cached = len(request.prompt.token_ids)

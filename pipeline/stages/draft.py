"""Stage 3: the drafts of a block."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch

import gpu
from pipeline.records import Proposal
from pipeline.request import Request
from pipeline.state import State


class Draft:
    """The draft's tokens after every anchor: its argmax, or drawn from its law with coins of the request's own.

    Either way they are proposed without seeing the verification's coins. Greedy requests always get the argmax; whether
    sampled ones get draws is the option `proposal`, by default the method's own way.

    A request whose limits leave room for fewer tokens than a block gets fewer drafts; that cap doesn't look at the
    drafts, so the law stays exact. The option `draft_lengths` caps by the draft's confidences; see `pipeline.lengths`.
    """

    def __call__(self, state: State) -> Proposal:
        requests = state.running
        if state.draft is None:
            empty = np.empty((len(requests), 0), dtype=np.int32)
            return Proposal(requests, empty, np.zeros(len(requests), dtype=np.int32))
        device = state.target.device
        anchors = torch.tensor([request.anchor for request in requests], device=device)
        starts = torch.tensor([request.cached for request in requests], device=device)
        drafted = state.draft.propose(
            anchors,
            starts,
            state.draft_cache,
            kv_length=max(request.cached for request in requests) + state.block_size,
            **self._draws(state, requests),
        )
        most = state.block_size - 1
        room = np.array([min(most, r.remaining(state.options.max_length) - 1) for r in requests], dtype=np.int32)
        rule = state.options.draft_lengths
        if rule is not None:
            room = rule(drafted.confidence.cpu().numpy(), room)
        law = drafted.law
        return Proposal(
            requests,
            draft_tokens=drafted.tokens.to(device="cpu", dtype=torch.int32).numpy(),
            num_drafts=room,
            draft_probs=None if law is None else law.probs.cpu().numpy(),
            draft_ids=None if law is None or law.token_ids is None else law.token_ids.cpu().numpy(),
        )

    @staticmethod
    def _draws(state: State, requests: list[Request]) -> dict[str, Any]:
        """Temperatures and coins of the requests whose drafts are drawn; nothing where none are."""
        wanted = state.options.proposal
        if wanted == "argmax" or (wanted == "auto" and not getattr(state.draft, "draws_by_default", False)):
            return {}
        if all(request.params.greedy for request in requests):
            return {}
        device, num_drafts = state.target.device, state.block_size - 1
        temperatures = [0.0 if request.params.greedy else request.params.temperature for request in requests]
        # A coin for each draft of each round: one that drew an unverified draft before may have swayed, through a
        # schedule, how long the neighbours' blocks were, and through them how long this one is.
        uniforms = gpu.uniforms(
            np.array([request.seed for request in requests], dtype=np.uint64),
            np.array([request.num_generated * num_drafts for request in requests], dtype=np.int64),
            num_drafts,
            gpu.PROPOSAL,
        )
        return {
            "temperatures": torch.tensor(temperatures, dtype=torch.float32, device=device),
            "uniforms": torch.from_numpy(uniforms).to(device),
        }

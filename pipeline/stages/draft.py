"""Stage 3: the drafts of a block."""

from __future__ import annotations

import numpy as np
import torch

from pipeline.records import Proposal
from pipeline.state import State


class Draft:
    """The draft's argmax after every anchor: chosen without seeing the verification's coins, so its law is one-hot.

    A request whose limits leave room for fewer tokens than a block gets fewer drafts; that cap doesn't look at the
    drafts, so the law stays exact.
    """

    def __call__(self, state: State) -> Proposal:
        requests = state.running
        if state.draft is None:
            empty = np.empty((len(requests), 0), dtype=np.int32)
            return Proposal(requests, empty, np.zeros(len(requests), dtype=np.int32))
        device = state.target.device
        anchors = torch.tensor([request.anchor for request in requests], device=device)
        starts = torch.tensor([request.cached for request in requests], device=device)
        logits = state.draft.propose(
            anchors,
            starts,
            state.draft_cache,
            kv_length=max(request.cached for request in requests) + state.block_size,
        )
        most = state.block_size - 1
        room = [min(most, request.remaining(state.options.max_length) - 1) for request in requests]
        return Proposal(
            requests,
            draft_tokens=logits.argmax(-1).to(device="cpu", dtype=torch.int32).numpy(),
            num_drafts=np.array(room, dtype=np.int32),
        )

"""Stage 4: the target's forward over anchor and drafts."""

from __future__ import annotations

import numpy as np
import torch

from pipeline.batch.records import Block, Proposal
from pipeline.batch.state import State
from pipeline.drafting.proposer import Proposer


class Forward:
    """Runs every request's block at its own positions and gives the draft the features of all rows.

    Where a request has fewer drafts by a rule for lengths, or because a proposer had no more, the rows past them are
    left out of the model's forward (`Target.forward`).

    Features of rejected rows do no harm: the draft's next block overwrites their entries before any row sees them.
    """

    def __call__(self, state: State, proposal: Proposal) -> Block:
        target = state.target
        anchors = np.array([[request.anchor] for request in proposal.requests], dtype=np.int64)
        ids = np.concatenate([anchors, proposal.draft_tokens], axis=1, dtype=np.int64)
        starts = np.array([[request.cached] for request in proposal.requests], dtype=np.int64)
        positions = starts + np.arange(ids.shape[1])
        on_device = torch.from_numpy(positions).to(target.device)
        ragged = state.options.draft_lengths is not None or isinstance(state.draft, Proposer)
        state.tap()
        longest = int(positions.max()) + 1
        output = target.forward(
            torch.from_numpy(ids).to(target.device),
            on_device,
            state.target_cache,
            kv_length=longest,
            lengths=(proposal.num_drafts + 1).tolist() if ragged else None,
        )
        if state.draft is not None:
            state.draft.extend(output.features, on_device, state.draft_cache, kv_length=longest)
        return Block(proposal, output.logits)

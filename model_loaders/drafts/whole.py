"""A draft with copies of what it borrows: its target's embedding and head."""

from __future__ import annotations

import torch
from torch import Tensor

from model_loaders.drafts.block_draft import BlockDraft
from model_loaders.errors import CheckpointError


@torch.no_grad()
def whole_tensors(draft: BlockDraft) -> dict[str, Tensor]:
    """The draft's tensors by name with an embedding and a head among them: its own, or the target's.

    Raises CheckpointError for a target whose head adds a bias: a draft's own has none.
    """
    config, target, tensors = draft.config, draft.target, dict(draft.module.state_dict())
    if not config.own_embeddings:
        tensors["embed_tokens.weight"] = target.embed(torch.arange(target.vocab_size, device=target.device))
    if not config.own_head:
        head = target.model.get_output_embeddings()
        if getattr(head, "bias", None) is not None:
            raise CheckpointError(
                f"draft={draft.name!r}: the head of its target {target.name} adds a bias, expected none for a draft "
                "with a head of its own; use a layout that borrows the target's"
            )
        tensors["lm_head.weight"] = head.weight
    return tensors

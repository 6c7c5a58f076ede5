"""DFlash: all drafts of a block at once, each from its own mask's logits. Source: arXiv 2602.06036."""

from __future__ import annotations

from torch import Tensor

from model_loaders.drafts.block_draft import BlockDraft
from model_loaders.drafts.proposal import Drafted, Draws, pick


class DFlashDraft(BlockDraft):
    """Drafts don't see one another: draft k is the argmax of row k's logits, or drawn from them.

    A drawn proposal is kept with probability ``sum min(target_probs, draft_probs)``, a chosen one
    with the target's probability of it: which is more depends on the pair. Where the target is sure and the draft
    isn't, drawing loses.
    """

    method = "dflash"

    def propose_after(self, hidden: Tensor, anchors: Tensor, draws: Draws | None) -> Drafted:
        """See ``BlockDraft.propose_after``."""
        logits = self.logits(hidden)
        index, law = pick(logits.flatten(0, 1), None if draws is None else draws.each())  # all at once
        tokens = self.token_of(index).view(logits.shape[:2])
        return Drafted(tokens, self.law(None if law is None else law.view(logits.shape)))

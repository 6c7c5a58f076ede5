"""DFlash: all drafts of a block at once, each from its own mask's logits. Source: arXiv 2602.06036."""

from __future__ import annotations

from torch import Tensor

from model_loaders.drafts.block_draft import BlockDraft
from model_loaders.drafts.proposal import Drafted, Draw, pick


class DFlashDraft(BlockDraft):
    """Drafts don't see one another: draft k is the argmax of row k's logits, or drawn from them.

    A drawn proposal is kept with probability ``sum min(target_probs, draft_probs)``, a chosen one
    with the target's probability of it: which is more depends on the pair. Where the target is sure and the draft
    isn't, drawing loses.
    """

    method = "dflash"

    def propose_after(self, hidden: Tensor, anchors: Tensor, draw: Draw | None) -> Drafted:
        """See ``BlockDraft.propose_after``."""
        logits = self.logits(hidden)
        tokens = self.token_of(pick(logits, 0, draw))  # all at once
        return Drafted(tokens, None if draw is None else self.law(logits))

"""DFlash: all drafts of a block at once, each from its own mask's logits. Source: arXiv 2602.06036."""

from __future__ import annotations

from torch import Tensor

from model_loaders.drafts.block_draft import BlockDraft
from model_loaders.drafts.proposal import Drafted, pick_in_turn


class DFlashDraft(BlockDraft):
    """Drafts don't see one another: draft k is the argmax of row k's logits, or drawn from them.

    Chosen by default. A drawn proposal is kept with probability ``sum min(target_probs, draft_probs)``, a chosen one
    with the target's probability of it: which is more depends on the pair. Where the target is sure and the draft
    isn't, drawing loses.
    """

    method = "dflash"
    draws_by_default = False

    def propose_after(
        self, hidden: Tensor, anchors: Tensor, temperatures: Tensor | None, uniforms: Tensor | None
    ) -> Drafted:
        """See ``BlockDraft.propose_after``."""
        logits = self.logits(hidden)
        if temperatures is None:
            return Drafted(self.token_of(logits.argmax(-1)))  # all at once
        tokens, probs = pick_in_turn(
            self.num_drafts,
            anchors,
            lambda k, previous: logits[:, k],
            lambda k, index: self.token_of(index),
            temperatures,
            uniforms,
        )
        return Drafted(tokens, self.law(probs))

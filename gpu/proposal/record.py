"""What drawing drafts leaves behind, and the laws that follow from it."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from gpu.arrays import Array
from gpu.draft_law import BY_SEARCH, BY_TABLE, BY_TOKEN
from gpu.support import Support


@dataclass(frozen=True)
class Drawn:
    """D drafts of each of B requests, filled by draw_drafts; NumPy's arrays or CuPy's, as the logits."""

    index: Array  # int64 [B, D]: the entry that was drawn, or chosen; 0 where there is no law
    maximum: Array  # float32 [B, D]: the largest logit
    cutoff: Array  # float32 [B, D]: the smallest kept logit
    scale: Array  # float32 [B, D, 2]: log2(e) / temperature as gpu/weights.py splits it; 0 for a chosen draft
    share: Array  # float64 [B, D]: the probability of a weight of 1; NaN for a sampled draft without a law
    support: Support  # of the rows of the last call: its working memory


@dataclass(frozen=True)
class LogitsLaw:
    """The laws that D drafts of each of B requests were drawn from, by the draft's own logits.

    What verify_chain takes as `draft_probs` without a probability for every token being written anywhere. A token is
    the entry of that number; or, where the draft proposes among n of V tokens, the entry that `entry_of` gives, or the
    place of the token in `token_ids`.
    """

    logits: Array  # [B, D, n]: float32, float16 or bfloat16 as logits
    drawn: Array  # int64 [B, D]; this and the next four: as in Drawn, whose `index` it is
    maximum: Array
    cutoff: Array
    scale: Array
    share: Array
    vocabulary: int  # V
    entry_of: Array | None = None  # int32 [V]: -1 for a token that isn't proposed
    token_ids: Array | None = None  # int32 [B, D, n]: ascending

    @classmethod
    def of(
        cls,
        logits: Array,
        drawn: Drawn,
        vocabulary: int | None = None,
        *,
        entry_of: Array | None = None,
        token_ids: Array | None = None,
    ) -> LogitsLaw:
        """The laws of what was drawn from these logits [B, D, n]; vocabulary: V, n if None."""
        numbers = drawn.index, drawn.maximum, drawn.cutoff, drawn.scale, drawn.share
        return cls(logits, *numbers, vocabulary or logits.shape[-1], entry_of, token_ids)

    @property
    def shape(self) -> tuple[int, int, int]:
        """(B, D, V), that of the dense laws."""
        return (*self.drawn.shape, self.vocabulary)

    def __getitem__(self, requests: slice) -> LogitsLaw:
        """The laws of some requests."""
        ids = None if self.token_ids is None else self.token_ids[requests]
        numbers = self.drawn, self.maximum, self.cutoff, self.scale, self.share
        drawn, maximum, cutoff, scale, share = (values[requests] for values in numbers)
        return LogitsLaw(
            self.logits[requests], drawn, maximum, cutoff, scale, share, self.vocabulary, self.entry_of, ids
        )  # fmt: skip

    @property
    def how(self) -> int:
        """How a token's entry is found: see gpu/draft_law.py."""
        if self.token_ids is not None:
            return BY_SEARCH
        return BY_TOKEN if self.entry_of is None else BY_TABLE

    def parts(self) -> dict[str, tuple[Array, type, tuple[int, ...]]]:
        """Its arrays beside the logits, by name: with the dtype and the shape that they must have."""
        drafts = self.logits.shape[:2]
        parts: dict[str, tuple[Array, type, tuple[int, ...]]] = {
            "drawn": (self.drawn, np.int64, drafts),
            "maximum": (self.maximum, np.float32, drafts),
            "cutoff": (self.cutoff, np.float32, drafts),
            "scale": (self.scale, np.float32, (*drafts, 2)),
            "share": (self.share, np.float64, drafts),
        }
        if self.token_ids is not None:
            parts["token_ids"] = self.token_ids, np.int32, self.logits.shape
        elif self.entry_of is not None:
            parts["entry_of"] = self.entry_of, np.int32, (self.vocabulary,)
        return parts

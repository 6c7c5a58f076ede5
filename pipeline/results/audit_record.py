"""What an audit needs of every committed token: the row that decided it, its draft, and where its coins lie."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

RAGGED = {
    "offsets": ("token_ids", "weights"),
    "proposal_offsets": ("proposal_probs",),
    "bound_offsets": ("bounds",),
}
"""The ragged arrays by the offsets that divide them into rows."""


@dataclass(frozen=True, eq=False)
class AuditRecord:
    """The verifier's own inputs and decisions, a row a committed token.

    Attributes:
        rounds: int32 [n], the verification round that committed the token; 0 is the one on the prefill's logits.
        rows: int32 [n], its row within the round's block: the number of drafts accepted before it.
        positions: int64 [n], the counter of the token's coins: ``gpu.uniforms`` at this position, with purpose
            `gpu.DRAW` for a replacement or bonus token, and `gpu.ACCEPT` for the test of its draft by itself; at the
            position of the round's row 0 with purpose `gpu.ACCEPT_BLOCK` for a block's.
        draft_tokens: int32 [n], the draft that the row tested; -1 where it had none.
        draft_probs: float32 [n], the draft's probability under the law it was drawn from: 1 for a draft that was
            chosen, not drawn; NaN where there was none.
        accepted: bool [n], whether the draft was kept.
        totals: int64 [n], the weight of the row's whole support as the filter summed it.
        offsets: int64 [n + 1]; row i of `token_ids` and `weights` is ``offsets[i]:offsets[i + 1]``.
        token_ids: int32 [nnz], the row's support, ascending.
        weights: int64 [nnz], of `token_ids`, in 2^-44 of the most probable token's; 0 for a token so improbable that
            it can't be drawn.
        proposal_offsets: int64 [n + 1]; row i of `proposal_probs`, as long as the support where the draft was drawn
            from a law of its own, else empty.
        proposal_probs: float32, that law on the row's support.
        bound_offsets: int64 [n + 1]; ``bounds[bound_offsets[i]:bound_offsets[i + 1]]`` is of the round whose row 0 is
            token i, where its drafts were verified as a block; else empty.
        bounds: float64, what the coins of rows 1, 2, ... were held against, to the last row that could be reached.
    """

    rounds: np.ndarray
    rows: np.ndarray
    positions: np.ndarray
    draft_tokens: np.ndarray
    draft_probs: np.ndarray
    accepted: np.ndarray
    totals: np.ndarray
    offsets: np.ndarray
    token_ids: np.ndarray
    weights: np.ndarray
    proposal_offsets: np.ndarray
    proposal_probs: np.ndarray
    bound_offsets: np.ndarray
    bounds: np.ndarray

    def __len__(self) -> int:
        return len(self.rounds)

    def cut(self, length: int) -> AuditRecord:
        """The first `length` tokens."""
        cut = {name: getattr(self, name)[:length] for name in DTYPES if name not in _ALL_RAGGED}
        for offsets, names in RAGGED.items():
            cut[offsets] = getattr(self, offsets)[: length + 1]
            cut |= {name: getattr(self, name)[: cut[offsets][-1]] for name in names}
        return AuditRecord(**cut)

    @classmethod
    def join(cls, parts: Sequence[AuditRecord]) -> AuditRecord:
        """One record of all, in order; an empty one of none."""
        joined: dict[str, np.ndarray] = {
            name: np.concatenate([np.empty(0, dtype), *(getattr(part, name) for part in parts)], dtype=dtype)
            for name, dtype in DTYPES.items()
            if name not in RAGGED
        }
        for offsets in RAGGED:
            sizes = [np.diff(getattr(part, offsets)) for part in parts]
            joined[offsets] = np.concatenate([[0], np.cumsum(np.concatenate([np.empty(0, np.int64), *sizes]))])
            joined[offsets] = joined[offsets].astype(np.int64)
        return cls(**joined)


DTYPES: dict[str, type] = {
    "rounds": np.int32,
    "rows": np.int32,
    "positions": np.int64,
    "draft_tokens": np.int32,
    "draft_probs": np.float32,
    "accepted": np.bool_,
    "totals": np.int64,
    "offsets": np.int64,
    "token_ids": np.int32,
    "weights": np.int64,
    "proposal_offsets": np.int64,
    "proposal_probs": np.float32,
    "bound_offsets": np.int64,
    "bounds": np.float64,
}
"""The dtype of every array of an `AuditRecord`."""

_ALL_RAGGED = {name for offsets, names in RAGGED.items() for name in (offsets, *names)}

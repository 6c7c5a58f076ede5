"""What the rows of a whole block may be: by their grammars, and without an ending before its time."""

from __future__ import annotations

from collections.abc import Collection, Sequence

import numpy as np

from pipeline.batch.request import Request
from pipeline.grammars.walk import clear_bits


def allowed_rows(
    requests: Sequence[Request], draft_tokens: np.ndarray, num_drafts: np.ndarray, vocab_size: int
) -> tuple[np.ndarray, np.ndarray, dict[tuple[int, int], str]]:
    """The masks of the rows that may not be everything, as `gpu.restrict_logits` takes them.

    Args:
        requests: B. Those with a grammar have a mask a row; those without, one for all rows before `min_new_tokens`.
        draft_tokens: int32 [B, W - 1].
        num_drafts: int32 [B].
        vocab_size: V.

    Returns:
        Masks int32 [N, ceil(V / 32)]; which one is a row's, int32 [B, W], -1 for none; and why row i of request b
        has no policy, by (b, i), where its grammar allows no token at all.
    """
    rows = np.full((len(requests), draft_tokens.shape[1] + 1), -1, np.int32)
    masks, failures, count = [np.empty((0, -(-vocab_size // 32)), np.int32)], {}, 0
    for b, request in enumerate(requests):
        early = request.params.min_new_tokens - request.num_generated
        if request.grammar is not None:
            drafts = draft_tokens[b, : num_drafts[b]].tolist()
            made = request.grammar.masks(drafts, early, request.scanner.ending_ids)
            rows[b, : len(made)] = count + np.arange(len(made))
            for i in np.flatnonzero(~made.any(axis=1)).tolist():
                failures[b, i] = (
                    f"grammar: it allows no token of the vocabulary at output token {request.num_generated + i}, "
                    "expected one that can be continued or ended there"
                )
        elif early > 0 and request.scanner.ending_ids:
            made = _all_but(request.scanner.ending_ids, vocab_size)
            rows[b, :early] = count
        else:
            continue
        masks.append(made)
        count += len(made)
    return np.concatenate(masks), rows, failures


def _all_but(banned: Collection[int], vocab_size: int) -> np.ndarray:
    """The mask int32 [1, ceil(V / 32)] of all other tokens."""
    mask = np.full((1, -(-vocab_size // 32)), -1, np.int32)
    clear_bits(mask[0], banned)
    return mask

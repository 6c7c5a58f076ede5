"""The bitmasks of a whole block."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from pipeline.request import Request


def allowed_rows(
    requests: Sequence[Request], draft_tokens: np.ndarray, num_drafts: np.ndarray, vocab_size: int
) -> tuple[np.ndarray, np.ndarray, dict[tuple[int, int], str]]:
    """What the rows of requests with a grammar may be, as `gpu.restrict_logits` takes it.

    Args:
        requests: B; those without a grammar have no masks.
        draft_tokens: int32 [B, W - 1].
        num_drafts: int32 [B].
        vocab_size: V.

    Returns:
        Masks int32 [N, ceil(V / 32)]; which one is a row's, int32 [B, W], -1 for none; and why row i of request b
        has no policy, by (b, i), where its grammar allows no token at all.
    """
    rows = np.full((len(requests), draft_tokens.shape[1] + 1), -1, np.int32)
    masks, failures, count = [], {}, 0
    for b, request in enumerate(requests):
        if request.grammar is None:
            continue
        drafts = draft_tokens[b, : num_drafts[b]].tolist()
        early = request.params.min_new_tokens - request.num_generated
        made = request.grammar.masks(drafts, early, request.scanner.ending_ids)
        rows[b, : len(made)] = count + np.arange(len(made))
        masks.append(made)
        count += len(made)
        for i in np.flatnonzero(~made.any(axis=1)).tolist():
            failures[b, i] = (
                f"grammar: it allows no token of the vocabulary at output token {request.num_generated + i}, expected "
                "one that can be continued or ended there"
            )
    none = np.empty((0, -(-vocab_size // 32)), np.int32)
    return np.concatenate([none, *masks]), rows, failures

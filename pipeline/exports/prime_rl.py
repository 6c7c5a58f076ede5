"""prime-rl's kept tokens: flat ids and a count a token (prime-rl pull requests 3235, 3431).

A count of 0 says that there is no replay for that token: a prompt's, a tool's, or one that was sampled unfiltered.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np

from pipeline.errors import InvalidRequest
from pipeline.exports.reading import field_of, floats, integers, mask_of, read_mask
from pipeline.results.rollout import Rollout, SamplingMask


def to_prime_rl(rollout: Rollout, *, with_prompt: bool = False) -> dict[str, np.ndarray]:
    """`ids` int32 [nnz] and `counts` int32: one for every output token; 0 for all if no mask was recorded.

    Args:
        with_prompt: Put a 0 for every prompt token before them, as in a whole sequence.

    Raises:
        InvalidRequest: The rollout failed.
    """
    if rollout.sampling_mask is None and rollout.ok:
        ids, counts = np.empty(0, np.int32), np.zeros(len(rollout.token_ids), np.int32)
    else:
        mask = mask_of(rollout)
        ids, counts = mask.token_ids, mask.sizes.astype(np.int32)
    if with_prompt:
        counts = np.concatenate([np.zeros(len(rollout.prompt_token_ids), np.int32), counts])
    return {"ids": ids, "counts": counts}


def from_prime_rl(
    layout: Mapping[str, Any], token_ids: Any, logprobs: Any, *, vocab_size: int | None = None
) -> tuple[SamplingMask, np.ndarray]:
    """The mask of the tokens that have one, and which they are.

    Args:
        layout: `ids` and `counts`.
        token_ids, logprobs: Of all tokens that have a count, [n].
        vocab_size: Ids must be below it, if given.

    Returns:
        A mask of m rows, and bool [n] with m of them True: rows and True tokens stand in the same order.

    Raises:
        InvalidRequest: What is wrong; rows are counted over the tokens that have a mask.
    """
    counts = integers("counts", field_of(layout, "counts"))
    negative = np.flatnonzero(counts < 0)
    if len(negative):
        raise InvalidRequest(f"counts[{negative[0]}]={counts[negative[0]]}, expected at least 0")
    taken = integers("token_ids", token_ids)
    if len(taken) != len(counts):
        raise InvalidRequest(f"counts: {len(counts)}, expected {len(taken)}: one a token")
    selected = floats("logprobs", logprobs, len(counts))
    replayed = counts > 0
    offsets = np.cumsum([0, *counts[replayed]]).astype(np.int64)
    ids = integers("ids", field_of(layout, "ids"))
    mask = read_mask("ids", ids, offsets, selected[replayed], "selected", taken[replayed], vocab_size)
    return mask, replayed

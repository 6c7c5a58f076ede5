"""miles' rollout fields: a flat mask, and candidates for score centering (miles pull request 3317).

| Field | Holds |
|---|---|
| `rollout_sampling_mask_ids` | int32 [nnz], the supports one after another |
| `rollout_sampling_mask_offsets` | int64 [n + 1]; every row has at least one id |
| `rollout_topk_token_ids` | int32 [n, K], padded with -1 |
| `rollout_topk_log_probs` | float32 [n, K], padded with -inf |
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np

from pipeline.errors import InvalidRequest
from pipeline.exports.reading import field_of, floats, integers, mask_of, read_mask
from pipeline.results.mask_checks import check_top, rows_of
from pipeline.results.rollout import Rollout, SamplingMask, TopLogprobs


def to_miles(rollout: Rollout) -> dict[str, np.ndarray]:
    """The mask's two fields.

    Raises:
        InvalidRequest: The rollout has no mask, or an empty row.
    """
    mask = mask_of(rollout)
    empty = np.flatnonzero(mask.sizes == 0)
    if len(empty):
        raise InvalidRequest(f"mask[{empty[0]}]=[], expected at least one token")
    return {"rollout_sampling_mask_ids": mask.token_ids, "rollout_sampling_mask_offsets": mask.offsets}


def from_miles(
    layout: Mapping[str, Any], token_ids: Any, logprobs: Any, *, vocab_size: int | None = None
) -> SamplingMask:
    """The mask of a sample.

    Args:
        layout: With the mask's two fields.
        token_ids, logprobs: The response's tokens and `rollout_log_probs`, [n].
        vocab_size: Ids must be below it, if given.

    Raises:
        InvalidRequest: What is wrong, with the row.
    """
    ids = integers("rollout_sampling_mask_ids", field_of(layout, "rollout_sampling_mask_ids"))
    offsets = integers(
        "rollout_sampling_mask_offsets", field_of(layout, "rollout_sampling_mask_offsets"), np.int64
    )  # fmt: skip
    selected = floats("logprobs", logprobs, len(offsets) - 1)
    return read_mask("rollout_sampling_mask", ids, offsets, selected, "selected", token_ids, vocab_size)


def to_miles_top(rollout: Rollout, k: int | None = None) -> dict[str, np.ndarray]:
    """Candidates for score centering, [n, K].

    A mask in "support" mode gives the complete supports, most probable first, ties by id; otherwise `top_logprobs` are
    taken.

    Args:
        k: The width. None: the largest support, or the K that was recorded.

    Raises:
        InvalidRequest: Neither was recorded; a support larger than `k`, by row: a support is handed over whole or not
            at all; a `k` below the recorded K.
    """
    if rollout.sampling_mask is not None and rollout.sampling_mask.mode == "support":
        ids, values = _padded(mask_of(rollout), k)
    elif rollout.top_logprobs is not None:
        ids, values = rollout.top_logprobs.ids, rollout.top_logprobs.values
        if k is not None and k != ids.shape[1]:
            raise InvalidRequest(f"k={k}, expected the recorded K, {ids.shape[1]}")
    else:
        raise InvalidRequest(
            'top_logprobs=None, expected them or a mask in mode "support": sample with top_logprobs=K, or with '
            'return_sampling_mask=True and sampling_logprobs="support"'
        )
    return {"rollout_topk_token_ids": ids, "rollout_topk_log_probs": values}


def from_miles_top(layout: Mapping[str, Any], *, vocab_size: int | None = None) -> TopLogprobs:
    """The candidates of a sample.

    Raises:
        InvalidRequest: What is wrong (see pipeline.results.mask_checks.check_top), with the row.
    """
    ids = np.asarray(field_of(layout, "rollout_topk_token_ids"))
    values = np.asarray(field_of(layout, "rollout_topk_log_probs"))
    check_top("rollout_topk", ids, values, vocab_size)
    return TopLogprobs(ids.astype(np.int32), values.astype(np.float32))


def _padded(mask: SamplingMask, k: int | None) -> tuple[np.ndarray, np.ndarray]:
    sizes = mask.sizes
    width = int(sizes.max(initial=1)) if k is None else k
    wide = np.flatnonzero(sizes > width)
    if len(wide):
        raise InvalidRequest(f"mask[{wide[0]}].size={sizes[wide[0]]}, expected at most k={width}")
    rows = rows_of(mask.offsets)
    order = np.lexsort((mask.token_ids, -mask.logprobs, rows))
    columns = np.arange(len(rows)) - mask.offsets[rows]
    ids = np.full((len(mask), width), -1, np.int32)
    values = np.full((len(mask), width), -np.inf, np.float32)
    ids[rows, columns], values[rows, columns] = mask.token_ids[order], mask.logprobs[order]
    return ids, values

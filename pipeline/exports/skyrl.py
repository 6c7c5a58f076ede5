"""SkyRL's dense mask: int32 [tokens, top_k], padded with -1 (SkyRL pull requests 883, 2079)."""

from __future__ import annotations

from typing import Any

import numpy as np

from pipeline.errors import InvalidRequest
from pipeline.exports.reading import floats, mask_of, read_mask
from pipeline.results.mask_checks import kind_of, rows_of
from pipeline.results.rollout import Rollout, SamplingMask


def to_skyrl(rollout: Rollout, top_k: int) -> np.ndarray:
    """int32 [n, top_k], each row's ids ascending, then -1.

    Raises:
        InvalidRequest: The rollout has no mask; a support larger than `top_k` (ties at the cutoff are kept, so it may
            be larger than the sampler's top_k), by row.
    """
    mask = mask_of(rollout)
    wide = np.flatnonzero(mask.sizes > top_k)
    if len(wide):
        raise InvalidRequest(
            f"mask[{wide[0]}].size={mask.sizes[wide[0]]}, expected at most top_k={top_k}: pass a larger width"
        )
    rows = rows_of(mask.offsets)
    dense = np.full((len(mask), top_k), -1, np.int32)
    dense[rows, np.arange(len(rows)) - mask.offsets[rows]] = mask.token_ids
    return dense


def from_skyrl(sampling_mask: Any, token_ids: Any, logprobs: Any, *, vocab_size: int | None = None) -> SamplingMask:
    """The mask of a dense array.

    Args:
        sampling_mask: Integers [n, K]; what is -1 is padding, wherever it stands.
        token_ids, logprobs: The response's own, [n].
        vocab_size: Ids must be below it, if given.

    Raises:
        InvalidRequest: What is wrong, with the row.
    """
    dense = np.asarray(sampling_mask)
    if dense.ndim != 2 or dense.dtype.kind not in "iu":
        raise InvalidRequest(f"sampling_mask={kind_of(dense)}, expected integers [tokens, top_k]")
    held = dense != -1
    offsets = np.concatenate([[0], np.cumsum(held.sum(1))]).astype(np.int64)
    selected = floats("logprobs", logprobs, len(dense))
    ids = dense[held].astype(np.int32)
    return read_mask("sampling_mask", ids, offsets, selected, "selected", token_ids, vocab_size)

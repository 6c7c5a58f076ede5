"""Prompt lookup on a device: one launch, no synchronisation."""

from typing import Any

import numpy as np

from gpu.arrays import Array
from gpu.device.launch import pointer
from gpu.device.memory import check_device, empty
from gpu.lookup.kernel import lookup_kernel


def lookup(
    token_ids: Array, lengths: Array, num_drafts: int, max_ngram: int, min_ngram: int, out: Any
) -> tuple[Array, Array]:
    """prompt_lookup of CuPy arrays."""
    if token_ids.ndim != 2:
        raise ValueError(f"token_ids={list(token_ids.shape)}, expected a CuPy array int32 [B, L]")
    check_device("token_ids", token_ids, np.int32, token_ids.shape)
    batch, longest = token_ids.shape
    check_device("lengths", lengths, np.int32, (batch,))
    if out is None:
        out = empty((batch, num_drafts), np.int32), empty((batch,), np.int32)
    drafts = check_device("out[0]", out[0], np.int32, (batch, num_drafts))
    counts = check_device("out[1]", out[1], np.int32, (batch,))
    if batch:
        lookup_kernel().launch(
            (batch,), pointer(token_ids), longest, pointer(lengths), num_drafts, max_ngram, min_ngram,
            pointer(drafts), pointer(counts),
        )  # fmt: skip
    return drafts, counts

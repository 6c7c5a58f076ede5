"""vLLM's sampling mask: CSR in the process, lists of lists over HTTP (vLLM pull request 49577).

It holds the supports only; tokens and their log-probabilities stand beside it in a completion.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from pipeline.exports.reading import csr_of, field_of, floats, integers, mask_of, read_mask
from pipeline.results.rollout import Rollout, SamplingMask


def to_vllm(rollout: Rollout) -> dict[str, np.ndarray]:
    """`token_ids` int32 [nnz] and `offsets` int64 [n + 1], from 0 to nnz.

    Raises:
        InvalidRequest: The rollout has no mask.
    """
    mask = mask_of(rollout)
    return {"token_ids": mask.token_ids, "offsets": mask.offsets}


def from_vllm(
    layout: Mapping[str, Any], token_ids: Any, logprobs: Any, *, vocab_size: int | None = None
) -> SamplingMask:
    """The mask of a completion's CSR.

    Args:
        layout: `token_ids` and `offsets`.
        token_ids, logprobs: The completion's own, [n].
        vocab_size: Ids must be below it, if given.

    Raises:
        InvalidRequest: What is wrong, with the row.
    """
    offsets = integers("offsets", field_of(layout, "offsets"), np.int64)
    selected = floats("logprobs", logprobs, len(offsets) - 1)
    ids = integers("token_ids", field_of(layout, "token_ids"))
    return read_mask("sampling_mask", ids, offsets, selected, "selected", token_ids, vocab_size)


def to_vllm_lists(rollout: Rollout) -> list[list[int]]:
    """A list of ids a token, as JSON holds it.

    Raises:
        InvalidRequest: The rollout has no mask.
    """
    return [row.tolist() for row in mask_of(rollout)]


def from_vllm_lists(
    sampling_mask: Sequence[Sequence[int]], token_ids: Any, logprobs: Any, *, vocab_size: int | None = None
) -> SamplingMask:
    """The mask of an HTTP response's `sampling_mask`; arguments and errors as in from_vllm."""
    ids, offsets = csr_of("sampling_mask", sampling_mask)
    selected = floats("logprobs", logprobs, len(offsets) - 1)
    return read_mask("sampling_mask", ids, offsets, selected, "selected", token_ids, vocab_size)

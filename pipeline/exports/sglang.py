"""SGLang's `meta_info` of a response with a sampling mask (SGLang pull requests 27408, 34201).

`output_token_sampling_mask` is a list of ids a token; `output_token_sampling_logprobs` a number a token (mode
"selected") or a list beside the ids ("support"); `output_token_sampling_mask_length` the number of tokens.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np

from pipeline.errors import InvalidRequest
from pipeline.exports.reading import csr_of, field_of, floats, mask_of, read_mask
from pipeline.results.rollout import Rollout, SamplingMask

MASK = "output_token_sampling_mask"
LOGPROBS = "output_token_sampling_logprobs"
LENGTH = "output_token_sampling_mask_length"


def to_sglang(rollout: Rollout) -> dict[str, Any]:
    """The three fields, as JSON holds them.

    Raises:
        InvalidRequest: The rollout has no mask.
    """
    mask = mask_of(rollout)
    if mask.mode == "support":
        logprobs = [mask.row_logprobs(i).tolist() for i in range(len(mask))]
    else:
        logprobs = mask.logprobs.tolist()
    return {MASK: [row.tolist() for row in mask], LOGPROBS: logprobs, LENGTH: len(mask)}


def from_sglang(meta_info: Mapping[str, Any], token_ids: Any, *, vocab_size: int | None = None) -> SamplingMask:
    """The mask of a response.

    Args:
        meta_info: The response's; other fields are not looked at. The mode is told by the log-probabilities' form.
        token_ids: The response's `output_ids`, [n].
        vocab_size: Ids must be below it, if given.

    Raises:
        InvalidRequest: What is wrong, with the row; a length that isn't the number of rows.
    """
    ids, offsets = csr_of(MASK, field_of(meta_info, MASK))
    length = meta_info.get(LENGTH, len(offsets) - 1)
    if length != len(offsets) - 1:
        raise InvalidRequest(f"{LENGTH}={length!r}, expected {len(offsets) - 1}, the rows of {MASK}")
    given = field_of(meta_info, LOGPROBS)
    if not (len(given) and isinstance(given[0], (list, tuple, np.ndarray))):
        logprobs = floats(LOGPROBS, given, len(offsets) - 1)
        return read_mask(MASK, ids, offsets, logprobs, "selected", token_ids, vocab_size)
    logprobs, starts = csr_of(LOGPROBS, given, lambda name, row: floats(name, row, len(row)))
    differ = np.flatnonzero(np.diff(starts) != np.diff(offsets)) if len(starts) == len(offsets) else [len(starts) - 1]
    if len(differ):
        raise InvalidRequest(f"{LOGPROBS}[{differ[0]}]: another length, expected that of {MASK}[{differ[0]}]")
    return read_mask(MASK, ids, offsets, logprobs, "support", token_ids, vocab_size)

"""What the layouts share: taking a rollout's record, and reading a foreign one with every row checked."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Literal

import numpy as np

from pipeline.errors import InvalidRequest
from pipeline.results.mask_checks import check_shape, check_supports, kind_of, positions_of, rows_of
from pipeline.results.rollout import Rollout, SamplingMask


def mask_of(rollout: Rollout) -> SamplingMask:
    """The rollout's mask, of as many rows as it has tokens.

    Raises:
        InvalidRequest: It failed, has no mask, or one that doesn't line up.
    """
    if not rollout.ok:
        raise InvalidRequest(f"rollout.error={rollout.error!r}, expected a finished rollout")
    if rollout.sampling_mask is None:
        raise InvalidRequest("sampling_mask=None, expected one: sample with return_sampling_mask=True")
    check_shape(rollout.sampling_mask, len(rollout.token_ids))
    return rollout.sampling_mask


def field_of(layout: Mapping[str, Any], name: str) -> Any:
    """A field of a layout.

    Raises:
        InvalidRequest: It isn't there.
    """
    if not isinstance(layout, Mapping) or layout.get(name) is None:
        raise InvalidRequest(f"{name}=None, expected it in the layout")
    return layout[name]


def integers(name: str, values: Any, dtype: type = np.int32) -> np.ndarray:
    """A one-dimensional array of integers, as `dtype`.

    Raises:
        InvalidRequest: Anything else, or an integer that `dtype` can't hold.
    """
    array = np.asarray(values)
    if array.size == 0 and array.ndim == 1:
        return np.empty(0, dtype)
    if array.ndim != 1 or array.dtype.kind not in "iu":
        raise InvalidRequest(f"{name}={kind_of(array)}, expected a one-dimensional array of integers")
    limits = np.iinfo(dtype)
    wrong = np.flatnonzero((array < limits.min) | (array > limits.max))
    if len(wrong):
        raise InvalidRequest(f"{name}[{wrong[0]}]={array[wrong[0]]}, expected an {np.dtype(dtype)}")
    return array.astype(dtype)


def floats(name: str, values: Any, length: int) -> np.ndarray:
    """float32 [length].

    Raises:
        InvalidRequest: Anything else.
    """
    array = np.asarray(values)
    if array.shape != (length,) or (length and array.dtype.kind not in "fiu"):
        raise InvalidRequest(f"{name}={kind_of(array)}, expected {length} numbers")
    return array.astype(np.float32)


def csr_of(name: str, rows: Any, convert: Any = integers) -> tuple[np.ndarray, np.ndarray]:
    """Lists of lists as flat values and offsets int64 [n + 1].

    Raises:
        InvalidRequest: A row that isn't a list of numbers, by its index.
    """
    if isinstance(rows, (str, bytes)) or not isinstance(rows, (Sequence, np.ndarray)):
        raise InvalidRequest(f"{name}={type(rows).__name__}, expected a list of lists")
    for i, row in enumerate(rows):
        if isinstance(row, (str, bytes)) or not isinstance(row, (Sequence, np.ndarray)):
            raise InvalidRequest(f"{name}[{i}]={row!r}, expected a list")
    parts = [convert(f"{name}[{i}]", row) for i, row in enumerate(rows)]
    offsets = np.cumsum([0, *map(len, parts)]).astype(np.int64)
    return (np.concatenate(parts) if parts else convert(name, [])), offsets


def read_mask(
    name: str,
    token_ids: np.ndarray,
    offsets: np.ndarray,
    logprobs: np.ndarray,
    mode: Literal["selected", "support"],
    taken: Any,
    vocab_size: int | None,
) -> SamplingMask:
    """A checked mask, its rows sorted.

    Args:
        name: What the layout calls the supports.
        token_ids, offsets, logprobs, mode: As in SamplingMask, rows in any order.
        taken: The committed tokens [n]; each must be in its support.
        vocab_size: Ids must be below it; None: not known.

    Raises:
        InvalidRequest: What is wrong, with the row.
    """
    taken = integers("token_ids", taken)
    mask = SamplingMask(token_ids, offsets, logprobs, mode)
    check_shape(mask, len(taken))
    order = np.lexsort((token_ids, rows_of(offsets)))
    mask = SamplingMask(token_ids[order], offsets, logprobs[order] if mode == "support" else logprobs, mode)
    check_supports(mask, vocab_size, name=name)
    positions_of(taken, mask)
    return mask

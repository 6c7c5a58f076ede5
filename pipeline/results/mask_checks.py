"""What a trainer must refuse in a recorded mask: every check names the row.

Rows are counted over all masks that were put side by side.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from pipeline.errors import InvalidRequest
from pipeline.results.rollout import SamplingMask

SUM_TOLERANCE = 2e-5
"""How far a recorded distribution's sum may be from one: float32 log-probabilities, with room for other engines'."""


def join_masks(masks: SamplingMask | Sequence[SamplingMask]) -> SamplingMask:
    """One mask of all rows; a single mask is returned as it is.

    Raises:
        InvalidRequest: Not masks, none at all, or masks of different modes.
    """
    if isinstance(masks, SamplingMask):
        return masks
    if not isinstance(masks, Sequence) or not masks or not all(isinstance(mask, SamplingMask) for mask in masks):
        got = type(masks).__name__ if masks else repr(masks)
        raise InvalidRequest(f"mask={got}, expected a SamplingMask or a non-empty sequence of them")
    modes = sorted({mask.mode for mask in masks})
    if len(modes) > 1:
        raise InvalidRequest(f"mask.mode={modes}, expected one mode: join masks of one kind")
    starts = np.cumsum([0, *(mask.offsets[-1] for mask in masks[:-1])])
    offsets = [mask.offsets[1:] + start for mask, start in zip(masks, starts, strict=True)]
    return SamplingMask(
        np.concatenate([mask.token_ids for mask in masks], dtype=np.int32),
        np.concatenate([[0], *offsets]).astype(np.int64),
        np.concatenate([mask.logprobs for mask in masks], dtype=np.float32),
        masks[0].mode,
    )


def kind_of(value: Any) -> str:
    """Type and shape of an array, or the type of anything else, for a message."""
    return f"{value.dtype}{list(value.shape)}" if hasattr(value, "dtype") else type(value).__name__


def rows_of(offsets: np.ndarray) -> np.ndarray:
    """The row of every entry of a CSR array, int64 [nnz]."""
    return np.repeat(np.arange(len(offsets) - 1), np.diff(offsets))


def check_shape(mask: SamplingMask, num_tokens: int | None = None) -> None:
    """Refuse a mask whose arrays don't belong together.

    Args:
        mask: Its offsets, sizes and mode are checked.
        num_tokens: How many rows it must have; None: any number.

    Raises:
        InvalidRequest: What is wrong, with the row where there is one.
    """
    ids, offsets, logprobs = mask.token_ids, mask.offsets, mask.logprobs
    for name, value in (("token_ids", ids), ("offsets", offsets)):
        if not isinstance(value, np.ndarray) or value.ndim != 1 or value.dtype.kind not in "iu":
            raise InvalidRequest(f"mask.{name}={kind_of(value)}, expected a one-dimensional array of integers")
    if not len(offsets) or offsets[0] != 0:
        raise InvalidRequest(f"mask.offsets={offsets[:3]}, expected them to start at 0")
    falling = np.flatnonzero(np.diff(offsets.astype(np.int64)) < 0)
    if len(falling):
        row = falling[0]
        raise InvalidRequest(
            f"mask.offsets[{row + 1}]={offsets[row + 1]}, expected at least offsets[{row}]={offsets[row]}"
        )
    if offsets[-1] != len(ids):
        raise InvalidRequest(f"mask.offsets[{len(mask)}]={offsets[-1]}, expected the number of entries, {len(ids)}")
    if num_tokens is not None and len(mask) != num_tokens:
        raise InvalidRequest(f"mask rows={len(mask)}, expected {num_tokens}: one for every token")
    if mask.mode not in ("selected", "support"):
        raise InvalidRequest(f'mask.mode={mask.mode!r}, expected "selected" or "support"')
    expected = len(ids) if mask.mode == "support" else len(mask)
    if not isinstance(logprobs, np.ndarray) or logprobs.shape != (expected,):
        raise InvalidRequest(
            f"mask.logprobs={kind_of(logprobs)}, expected a NumPy array [{expected}] in mode {mask.mode!r}"
        )


def check_supports(
    mask: SamplingMask, vocab_size: int | None = None, max_support: int | None = None, *, name: str = "mask"
) -> None:
    """Refuse supports that no policy can have.

    Args:
        mask: Checked as by check_shape, then row by row.
        vocab_size: Ids must be below it; None: only not negative.
        max_support: The most tokens of a support; None: any number.
        name: What messages call it.

    Raises:
        InvalidRequest: An empty row, one of more than `max_support` tokens, ids outside the vocabulary, ids that don't
            ascend (unsorted or twice); in "support" mode a row whose probabilities don't sum to one within 2e-5; a
            log-probability that is NaN, above 0 (by 2e-5) or +inf.
    """
    check_shape(mask)
    ids, offsets, sizes = mask.token_ids, mask.offsets, mask.sizes
    empty = np.flatnonzero(sizes == 0)
    if len(empty):
        raise InvalidRequest(f"{name}[{empty[0]}]=[], expected at least one token: every row has a support")
    if max_support is not None and len(sizes) and sizes.max() > max_support:
        row = int((sizes > max_support).argmax())
        raise InvalidRequest(
            f"{name}[{row}].size={sizes[row]}, expected at most max_support={max_support}: sample with a smaller top_k "
            "or top_p, or raise max_support"
        )
    outside = ids < 0 if vocab_size is None else (ids < 0) | (ids >= vocab_size)
    if outside.any():
        entry = int(outside.argmax())
        limit = "" if vocab_size is None else f" and below the vocabulary, {vocab_size}"
        raise InvalidRequest(f"{name}[{_row(offsets, entry)}] has token id={ids[entry]}, expected at least 0{limit}")
    unordered = ids[1:] <= ids[:-1]
    unordered[offsets[1:-1] - 1] = False  # from one row to the next
    if unordered.any():
        entry = int(unordered.argmax())
        raise InvalidRequest(
            f"{name}[{_row(offsets, entry)}] has token ids={ids[entry]}, {ids[entry + 1]} side by side, expected "
            "ascending ids, each once"
        )
    check_logprobs(f"{name}.logprobs", mask.logprobs)
    if mask.mode == "support" and len(sizes):
        sums = np.add.reduceat(np.exp(mask.logprobs.astype(np.float64)), offsets[:-1])
        wrong = np.flatnonzero(np.abs(sums - 1) > SUM_TOLERANCE)
        if len(wrong):
            raise InvalidRequest(
                f"{name}[{wrong[0]}] sums to {float(sums[wrong[0]])!r}, expected 1 within {SUM_TOLERANCE}: it is whole"
            )


def check_logprobs(name: str, logprobs: np.ndarray) -> None:
    """Refuse log-probabilities that are NaN, or above 0 by more than rounding.

    Raises:
        InvalidRequest: The first of them.
    """
    wrong = np.flatnonzero(~(logprobs <= SUM_TOLERANCE))
    if len(wrong):
        raise InvalidRequest(f"{name}[{wrong[0]}]={logprobs[wrong[0]]}, expected a number of at most 0")


def positions_of(token_ids: np.ndarray, mask: SamplingMask) -> np.ndarray:
    """Where every token stands among the mask's entries, int64 [n].

    Args:
        token_ids: Integers [n], a token a row.
        mask: Of n rows whose ids ascend.

    Raises:
        InvalidRequest: A token that its support lacks; a different number of rows.
    """
    token_ids = np.asarray(token_ids)
    if token_ids.ndim != 1 or token_ids.dtype.kind not in "iu":
        raise InvalidRequest(f"token_ids={kind_of(token_ids)}, expected a one-dimensional array of integers")
    if len(token_ids) != len(mask):
        raise InvalidRequest(f"token_ids: {len(token_ids)} tokens, expected {len(mask)}: one for every mask row")
    found = np.flatnonzero(mask.token_ids == np.repeat(token_ids, mask.sizes))
    if len(found) < len(mask):
        has = np.zeros(len(mask), bool)
        has[np.searchsorted(mask.offsets, found, side="right") - 1] = True
        row = int(has.argmin())
        raise InvalidRequest(
            f"token_ids[{row}]={token_ids[row]}, expected one of the {mask.sizes[row]} tokens of mask[{row}]"
        )
    return found


def _row(offsets: np.ndarray, entry: int) -> int:
    return int(np.searchsorted(offsets, entry, side="right")) - 1


def check_top(name: str, ids: np.ndarray, logprobs: np.ndarray, vocab_size: int | None = None) -> None:
    """Refuse recorded top-K arrays that no policy can have.

    Args:
        name: What messages call them.
        ids: Integers [n, K].
        logprobs: Floats [n, K], over the whole policy: a row sums to at most one.
        vocab_size: Ids must be below it; None: only not negative.

    Raises:
        InvalidRequest: Other shapes or types, K = 0; by row: an empty one, ids and log-probabilities that aren't padded
            with -1 and -inf at the end, an id twice or outside the vocabulary, a log-probability that is NaN or above 0
            (by 2e-5), a sum above one (by 2e-5).
    """
    if ids.ndim != 2 or ids.shape != logprobs.shape or ids.dtype.kind not in "iu" or logprobs.dtype.kind != "f":
        raise InvalidRequest(
            f"{name}: ids {kind_of(ids)}, log-probabilities {kind_of(logprobs)}, expected integers and floats [n, K]"
        )
    if ids.shape[1] == 0:
        raise InvalidRequest(f"{name}: K=0, expected at least 1")
    held = ids >= 0
    wrong = (held[:, 1:] & ~held[:, :-1]).any(1) | ((ids < -1) | (held == np.isneginf(logprobs))).any(1) | ~held[:, 0]
    if wrong.any():
        row = int(wrong.argmax())
        raise InvalidRequest(
            f"{name}[{row}]: ids={ids[row].tolist()[:8]}, log-probabilities={logprobs[row].tolist()[:8]}, expected at "
            "least one id, and only -1 with -inf behind the last"
        )
    ordered = np.sort(ids, axis=1)
    twice = ((ordered[:, 1:] == ordered[:, :-1]) & (ordered[:, 1:] >= 0)).any(1)
    if twice.any():
        row = int(twice.argmax())
        raise InvalidRequest(f"{name}[{row}] has a token id twice in {ids[row].tolist()[:8]}, expected each once")
    outside = ids >= (np.inf if vocab_size is None else vocab_size)
    if outside.any():
        row = int(outside.any(1).argmax())
        raise InvalidRequest(
            f"{name}[{row}] has token id={ids[row].max()}, expected one below the vocabulary, {vocab_size}"
        )
    unfit = ~(logprobs <= SUM_TOLERANCE)
    if unfit.any():
        row = int(unfit.any(1).argmax())
        raise InvalidRequest(f"{name}[{row}] has log-probability={logprobs[row][unfit[row]][0]}, expected at most 0")
    sums = np.exp(logprobs.astype(np.float64)).sum(1)
    above = np.flatnonzero(sums > 1 + SUM_TOLERANCE)
    if len(above):
        raise InvalidRequest(
            f"{name}[{above[0]}] sums to {sums[above[0]]}, expected at most 1: log-probabilities over the whole policy"
        )

"""Penalties and bias on the host: one row a thread."""

from typing import NamedTuple

import numpy as np
from numba import njit, prange

from gpu.adjust.penalty import is_neutral, penalise
from gpu.adjust.record import History, LogitBias
from gpu.checks import check_array, check_csr, check_ids, check_range


@njit(nogil=True)
def _occurrences(drafts, size, token):
    count = 0
    for i in range(size):
        count += drafts[i] == token
    return count


@njit(nogil=True)
def _penalise_row(row, ids, counts, drafts, num_before, repetition, frequency, presence):
    for j in range(ids.size):
        count = counts[j] + _occurrences(drafts, num_before, ids[j])
        row[ids[j]] = penalise(row[ids[j]], count, repetition, frequency, presence)
    for i in range(num_before):
        token = drafts[i]
        if token < 0 or token >= row.size or _occurrences(drafts, i, token) > 0:
            continue
        place = np.searchsorted(ids, token)
        if place == ids.size or ids[place] != token:
            count = _occurrences(drafts, num_before, token)
            row[token] = penalise(row[token], count, repetition, frequency, presence)


@njit(nogil=True, parallel=True, cache=True)
def _adjust(
    logits, draft_tokens, num_drafts, offsets, ids, counts, repetition, frequency, presence,
    bias_offsets, bias_ids, bias_values,
):  # fmt: skip
    width = logits.shape[1]
    for index in prange(logits.shape[0] * width):
        b, i = np.int64(index) // width, np.int64(index) % width  # prange counts in uint64
        if i > num_drafts[b]:
            continue
        if not is_neutral(repetition[b], frequency[b], presence[b]):
            first, last = offsets[b], offsets[b + 1]
            _penalise_row(
                logits[b, i], ids[first:last], counts[first:last], draft_tokens[b], i,
                repetition[b], frequency[b], presence[b],
            )  # fmt: skip
        for j in range(bias_offsets[b], bias_offsets[b + 1]):
            if bias_values[j] != 0:
                logits[b, i, bias_ids[j]] += bias_values[j]


def _check_history(history: History, batch: int, vocabulary: int) -> History:
    ids = check_ids("history.token_ids", history.token_ids, vocabulary)
    offsets = check_csr("history.offsets", history.offsets, batch, ids.size)
    counts = check_array("history.output_counts", history.output_counts, np.int32, ids.shape)
    in_prompt = check_array("history.in_prompt", history.in_prompt, np.bool_, ids.shape)
    seen = (counts > 0) | ((counts == 0) & in_prompt)
    check_range("history.output_counts", counts, seen, "above 0, or 0 for a token of the prompt")
    request = np.repeat(np.arange(batch), np.diff(offsets))
    if ((np.diff(ids) <= 0) & (np.diff(request) == 0)).any():
        raise ValueError(f"history.token_ids={ids}, expected strictly ascending ids within each request")
    return History(offsets, ids, counts, in_prompt)


class Penalties(NamedTuple):
    """float32 [B] each."""

    repetition: np.ndarray
    frequency: np.ndarray
    presence: np.ndarray


def check_penalties(
    batch: int, repetition: np.ndarray | None, frequency: np.ndarray | None, presence: np.ndarray | None
) -> Penalties:
    """The three as arrays, neutral where they are None. ValueError for what isn't a penalty."""

    def penalty(name: str, values: np.ndarray | None, neutral: float) -> np.ndarray:
        if values is None:
            return np.full(batch, neutral, np.float32)
        values = check_array(name, values, np.float32, (batch,))
        good = np.isfinite(values) & ((values > 0) if neutral else True)
        check_range(name, values, good, "a finite number above 0" if neutral else "a finite number")
        return values

    return Penalties(
        penalty("repetition_penalty", repetition, 1.0),
        penalty("frequency_penalty", frequency, 0.0),
        penalty("presence_penalty", presence, 0.0),
    )


def check_drafts(
    draft_tokens: np.ndarray, num_drafts: np.ndarray, batch: int, width: int
) -> tuple[np.ndarray, np.ndarray]:
    """Both, if they are as `adjust_logits` takes them."""
    draft_tokens = check_array("draft_tokens", draft_tokens, np.int32, (batch, width - 1))
    num_drafts = check_array("num_drafts", num_drafts, np.int32, (batch,))
    check_range("num_drafts", num_drafts, (num_drafts >= 0) & (num_drafts < width), f"0..{width - 1}")
    return draft_tokens, num_drafts


def adjust(
    logits: np.ndarray,
    draft_tokens: np.ndarray,
    num_drafts: np.ndarray,
    history: History | None,
    repetition_penalty: np.ndarray | None,
    frequency_penalty: np.ndarray | None,
    presence_penalty: np.ndarray | None,
    logit_bias: LogitBias | None,
) -> None:
    """adjust_logits of NumPy arrays."""
    if not isinstance(logits, np.ndarray) or logits.ndim != 3 or logits.dtype != np.float32:
        got = f"{getattr(logits, 'dtype', type(logits).__name__)}{list(getattr(logits, 'shape', ()))}"
        raise ValueError(f"logits={got}, expected a NumPy array float32 [B, W, V]")
    batch, width, vocabulary = logits.shape
    draft_tokens, num_drafts = check_drafts(draft_tokens, num_drafts, batch, width)
    repetition, frequency, presence = check_penalties(batch, repetition_penalty, frequency_penalty, presence_penalty)
    none = np.zeros(batch + 1, np.int64), np.empty(0, np.int32)
    seen = History(*none, np.empty(0, np.int32), np.empty(0, np.bool_))
    if (repetition == 1).all() and not frequency.any() and not presence.any():
        if logit_bias is None:
            return
    elif history is not None:
        seen = _check_history(history, batch, vocabulary)
    bias = LogitBias(*none, np.empty(0, np.float32))
    if logit_bias is not None:
        bias_ids = check_ids("logit_bias.token_ids", logit_bias.token_ids, vocabulary)
        offsets = check_csr("logit_bias.offsets", logit_bias.offsets, batch, bias_ids.size)
        values = check_array("logit_bias.values", logit_bias.values, np.float32, bias_ids.shape)
        check_range("logit_bias.values", values, values < np.inf, "a number below +inf")
        bias = LogitBias(offsets, bias_ids, values)
    _adjust(
        logits, draft_tokens, num_drafts, seen.offsets, seen.token_ids, seen.output_counts,
        repetition, frequency, presence, bias.offsets, bias.token_ids, bias.values,
    )  # fmt: skip

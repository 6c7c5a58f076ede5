"""Penalties, biases and bans of slots on the host: one row a thread."""

import numpy as np
from numba import njit, prange

from gpu.adjust.host import check_drafts, check_penalties
from gpu.adjust.penalty import adjust_token, is_neutral
from gpu.adjust.record import SlotHistory
from gpu.checks import check_array
from gpu.logit_rows import load, logit_rows


@njit(nogil=True)
def _occurrences(drafts, size, token):
    count = np.int32(0)
    for i in range(size):
        count += np.int32(drafts[i] == token)
    return count


@njit(nogil=True, error_model="numpy")
def _adjust_row(flat, start, out, words, bias, drafts, num_before, early, repetition, frequency, presence):
    neutral = is_neutral(repetition, frequency, presence)
    for token in range(out.size):
        drafted = _occurrences(drafts, num_before, token)
        x = np.float32(load(flat, start + token))
        out[token] = adjust_token(
            x, words[token], drafted, bias[token], early, neutral, repetition, frequency, presence
        )  # fmt: skip


@njit(nogil=True, parallel=True, cache=True)
def _adjust(
    flat, starts, out, draft_tokens, num_drafts, words, bias, generated, min_new_tokens, repetition, frequency, presence
):
    width = out.shape[1]
    for index in prange(out.shape[0] * width):
        b, i = np.int64(index) // width, np.int64(index) % width  # prange counts in uint64
        if i > num_drafts[b]:
            for token in range(out.shape[2]):
                out[b, i, token] = load(flat, starts[index] + token)
        else:
            _adjust_row(
                flat, starts[index], out[b, i], words[b], bias[b], draft_tokens[b], i,
                generated[b] + i < min_new_tokens[b], repetition[b], frequency[b], presence[b],
            )  # fmt: skip


def adjust(
    logits: np.ndarray,
    draft_tokens: np.ndarray,
    num_drafts: np.ndarray,
    history: SlotHistory,
    repetition_penalty: np.ndarray | None,
    frequency_penalty: np.ndarray | None,
    presence_penalty: np.ndarray | None,
    out: np.ndarray,
) -> None:
    """adjust_logits of NumPy arrays with a SlotHistory."""
    rows = logit_rows(logits, 3)
    batch, width, vocabulary = logits.shape
    draft_tokens, num_drafts = check_drafts(draft_tokens, num_drafts, batch, width)
    penalties = check_penalties(batch, repetition_penalty, frequency_penalty, presence_penalty)
    words = check_array("history.words", history.words, np.int32, (batch, vocabulary))
    bias = check_array("history.bias", history.bias, np.float32, (batch, vocabulary))
    generated = check_array("history.generated", history.generated, np.int64, (batch,))
    min_new_tokens = check_array("history.min_new_tokens", history.min_new_tokens, np.int64, (batch,))
    if not isinstance(out, np.ndarray) or out.dtype != np.float32 or out.shape != logits.shape:
        got = f"{out.dtype}{list(out.shape)}" if isinstance(out, np.ndarray) else type(out).__name__
        raise ValueError(f"out={got}, expected a NumPy array float32{list(logits.shape)}")
    _adjust(
        rows.flat, rows.starts, out, draft_tokens, num_drafts, words, bias, generated, min_new_tokens, *penalties
    )  # fmt: skip

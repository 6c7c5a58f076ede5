"""Verification on the host: one request a thread."""

from dataclasses import replace

import numba
import numpy as np
from numba import njit, prange

from gpu import status
from gpu.checks import check_array, check_range, check_uniforms
from gpu.draft_law import draft_probability
from gpu.logit_rows import logit_rows
from gpu.proposal.laws import laws_of
from gpu.proposal.record import LogitsLaw
from gpu.row_walk import WALK_CHUNK, draw_token, log_probability_of, total_left, weight_of
from gpu.support import Support, check_host_support, check_support
from gpu.verification.record import Verdict
from gpu.verification.rule import bound_of, is_below, next_scale, ratio_of, verifies_block

_OK, _INVALID = np.uint8(status.OK), np.uint8(status.INVALID)
_NOBODY = np.int32(-1)
_NO_BOUNDS = np.empty((0, 0))


@njit(nogil=True)
def _by_draft(
    request, flat, starts, vocabulary, support, draft_tokens, num_drafts, accept_uniforms, draw_uniforms, laws,
    threshold_single, threshold_acc, ids, weights,
):  # fmt: skip
    """Drafts kept, and the token behind them, -1 for a request that ends INVALID there."""
    drafts = num_drafts[request]
    for i in range(drafts + 1):
        row = request * (draft_tokens.shape[1] + 1) + i
        start = starts[row]
        draft, draft_row = _NOBODY, np.int64(-1)
        if support.status[row] != _OK:
            return i, _NOBODY
        if i < drafts:
            draft = draft_tokens[request, i]
            draft_prob = 1.0
            if not 0 <= draft < vocabulary:
                return i, _NOBODY
            if laws.starts.size > 0:
                draft_row = request * draft_tokens.shape[1] + i
                draft_prob = draft_probability(laws, draft_row, draft)
                if not 0.0 < draft_prob < np.inf:
                    return i, _NOBODY
            total = np.float64(support.total[row])
            mass = np.float64(weight_of(draft, flat, start, support, row))
            if accept_uniforms[request, i] * draft_prob * threshold_acc * total < mass:
                continue
            if mass >= threshold_single * total:
                continue
        if support.greedy[row]:
            return i, support.argmax[row]
        left = total_left(draft, laws, draft_row, 1.0, flat, start, vocabulary, support, row, ids, weights)
        if left < 0:
            return i, _NOBODY
        return i, draw_token(
            draw_uniforms[request, i], left, draft, laws, draft_row, 1.0, flat, start, vocabulary, support, row,
            ids, weights,
        )  # fmt: skip
    return 0, _NOBODY  # never reached: the row behind the drafts returns


@njit(nogil=True)
def _as_block(
    request, flat, starts, vocabulary, support, draft_tokens, num_drafts, accept_uniforms, draw_uniforms, laws,
    bounds, ids, weights,
):  # fmt: skip
    """Drafts kept, and the token behind them, -1 for a request that ends INVALID there. Fills the request's bounds."""
    drafts, width = num_drafts[request], draft_tokens.shape[1] + 1
    scale = 1.0
    kept, kept_left, kept_scale = 0, np.int64(-1), 1.0
    for i in range(drafts + 1):
        row = request * width + i
        start = starts[row]
        tested, draft_row, ratio = False, np.int64(-1), 0.0
        good = support.status[row] == _OK
        if good and i < drafts:
            draft, draft_row = draft_tokens[request, i], request * (width - 1) + i
            good = 0 <= draft < vocabulary
            if good:
                draft_prob = draft_probability(laws, draft_row, draft)
                good = 0.0 < draft_prob < np.inf
            if good:
                tested = True
                ratio = ratio_of(weight_of(draft, flat, start, support, row), draft_prob, support.total[row])
        bound, coin = scale, accept_uniforms[request, i - 1] if i > 0 else 0.0
        if is_below(coin, scale):
            left = np.int64(-1)
            if good:
                left = total_left(
                    _NOBODY, laws, draft_row, scale, flat, start, vocabulary, support, row, ids, weights
                )  # fmt: skip
            if tested:
                bound = bound_of(left, scale, support.total[row])
            if is_below(coin, bound):
                kept, kept_left, kept_scale = i, left, scale
        bounds[request, i] = bound
        if not good:
            break
        scale = next_scale(scale, ratio)
    if kept_left < 0:
        return kept, _NOBODY
    row = request * width + kept
    draft_row = request * (width - 1) + kept if kept < drafts else np.int64(-1)
    return kept, draw_token(
        draw_uniforms[request, kept], kept_left, _NOBODY, laws, draft_row, kept_scale, flat, starts[row], vocabulary,
        support, row, ids, weights,
    )  # fmt: skip


@njit(nogil=True)
def _verify_request(
    request, flat, starts, vocabulary, support, draft_tokens, num_drafts, accept_uniforms, draw_uniforms,
    laws, threshold_single, threshold_acc, as_block,
    num_accepted, num_committed, tokens, logprobs, statuses, error_row, bounds, ids, weights,
):  # fmt: skip
    width = tokens.shape[1]
    if as_block:
        bounds[request, :] = np.nan
        kept, token = _as_block(
            request, flat, starts, vocabulary, support, draft_tokens, num_drafts, accept_uniforms, draw_uniforms, laws,
            bounds, ids, weights,
        )  # fmt: skip
    else:
        kept, token = _by_draft(
            request, flat, starts, vocabulary, support, draft_tokens, num_drafts, accept_uniforms, draw_uniforms, laws,
            threshold_single, threshold_acc, ids, weights,
        )  # fmt: skip
    committed = kept + 1 if token >= 0 else kept
    for i in range(width):
        tokens[request, i] = -1
        logprobs[request, i] = np.float32(np.nan)
        if i < committed:
            row = request * width + i
            tokens[request, i] = draft_tokens[request, i] if i < kept else token
            logprobs[request, i] = log_probability_of(tokens[request, i], flat, starts[row], support, row)
    num_accepted[request], num_committed[request] = kept, committed
    statuses[request] = _OK if token >= 0 else _INVALID
    error_row[request] = -1 if token >= 0 else kept


@njit(nogil=True, parallel=True, cache=True)
def _verify(
    flat, starts, vocabulary, support, draft_tokens, num_drafts, accept_uniforms, draw_uniforms,
    laws, threshold_single, threshold_acc, as_block,
    num_accepted, num_committed, tokens, logprobs, statuses, error_row, bounds, threads,
):  # fmt: skip
    ids = np.empty((threads, WALK_CHUNK), np.int32)
    weights = np.empty((threads, WALK_CHUNK), np.int64)
    for index in prange(num_drafts.size):
        request = np.int64(index)  # prange counts in uint64
        thread = numba.get_thread_id()
        _verify_request(
            request, flat, starts, vocabulary, support, draft_tokens, num_drafts,
            accept_uniforms, draw_uniforms, laws, threshold_single, threshold_acc, as_block,
            num_accepted, num_committed, tokens, logprobs, statuses, error_row, bounds, ids[thread], weights[thread],
        )  # fmt: skip


def verify(
    logits: np.ndarray,
    support: Support,
    draft_tokens: np.ndarray,
    num_drafts: np.ndarray,
    accept_uniforms: np.ndarray,
    draw_uniforms: np.ndarray,
    draft_probs: np.ndarray | LogitsLaw | None,
    threshold_single: float,
    threshold_acc: float,
    out: Verdict | None,
) -> Verdict:
    """verify_chain of NumPy arrays."""
    rows = logit_rows(logits, 3)
    batch, width = logits.shape[:2]
    check_host_support(support)
    check_support(support, batch * width)
    draft_tokens = check_array("draft_tokens", draft_tokens, np.int32, (batch, width - 1))
    num_drafts = check_array("num_drafts", num_drafts, np.int32, (batch,))
    check_range("num_drafts", num_drafts, (num_drafts >= 0) & (num_drafts < width), f"0..{width - 1}")
    accept_uniforms = check_uniforms("accept_uniforms", accept_uniforms, (batch, width))
    draw_uniforms = check_uniforms("draw_uniforms", draw_uniforms, (batch, width))
    laws = laws_of(draft_probs, batch, width - 1, rows.vocabulary)
    if out is not None and (not isinstance(out.tokens, np.ndarray) or out.tokens.shape != (batch, width)):
        raise ValueError(f"out={out.tokens.shape}, expected a Verdict of an earlier call with the same shapes")
    verdict = out or Verdict(
        num_accepted=np.empty(batch, np.int32),
        num_committed=np.empty(batch, np.int32),
        tokens=np.empty((batch, width), np.int32),
        logprobs=np.empty((batch, width), np.float32),
        status=np.empty(batch, np.uint8),
        error_row=np.empty(batch, np.int32),
    )
    as_block = width > 1 and verifies_block(draft_probs, threshold_single, threshold_acc)
    verdict = replace(verdict, bounds=np.empty((batch, width)) if as_block else None)
    _verify(
        rows.flat, rows.starts, rows.vocabulary, support.arrays(), draft_tokens, num_drafts,
        accept_uniforms, draw_uniforms, laws, threshold_single, threshold_acc, as_block,
        verdict.num_accepted, verdict.num_committed, verdict.tokens, verdict.logprobs, verdict.status,
        verdict.error_row, _NO_BOUNDS if verdict.bounds is None else verdict.bounds, numba.get_num_threads(),
    )  # fmt: skip
    return verdict

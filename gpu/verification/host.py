"""Chain verification on the host: one request a thread."""

import numba
import numpy as np
from numba import njit, prange

from gpu import status
from gpu.checks import check_array, check_range, check_uniforms
from gpu.draft_law import draft_probability
from gpu.logit_rows import logit_rows
from gpu.proposal.laws import laws_of
from gpu.proposal.record import LogitsLaw
from gpu.row_walk import WALK_CHUNK, draw_token, log_probability_of, weight_of
from gpu.support import Support, check_host_support, check_support
from gpu.verification.record import Verdict

_OK, _INVALID = np.uint8(status.OK), np.uint8(status.INVALID)


@njit(nogil=True)
def _verify_request(
    request, flat, starts, vocabulary, support, draft_tokens, num_drafts, accept_uniforms, draw_uniforms,
    laws, threshold_single, threshold_acc,
    num_accepted, num_committed, tokens, logprobs, statuses, error_row, ids, weights,
):  # fmt: skip
    width = tokens.shape[1]
    statuses[request] = _OK
    error_row[request] = -1
    for i in range(width):
        tokens[request, i] = -1
        logprobs[request, i] = np.float32(np.nan)
    kept, committed = 0, 0
    for i in range(num_drafts[request] + 1):
        row = request * width + i
        start = starts[row]
        accepted = False
        valid = support.status[row] == _OK
        draft, draft_row = np.int32(-1), np.int64(-1)
        if valid and i < num_drafts[request]:
            draft = draft_tokens[request, i]
            draft_prob = 1.0
            valid = 0 <= draft < vocabulary
            if valid and laws.starts.size > 0:
                draft_row = request * (width - 1) + i
                draft_prob = draft_probability(laws, draft_row, draft)
                valid = 0.0 < draft_prob < np.inf
            if valid:
                total = np.float64(support.total[row])
                mass = np.float64(weight_of(draft, flat, start, support, row))
                accepted = accept_uniforms[request, i] * draft_prob * threshold_acc * total < mass
                accepted = accepted or mass >= threshold_single * total
        token = np.int32(-1)
        if accepted:
            token = draft
        elif valid and support.greedy[row]:
            token = support.argmax[row]
        elif valid:
            token = draw_token(
                draw_uniforms[request, i], draft, laws, draft_row,
                flat, start, vocabulary, support, row, ids, weights,
            )  # fmt: skip
        if token < 0:
            statuses[request] = _INVALID
            error_row[request] = i
            break
        tokens[request, i] = token
        logprobs[request, i] = log_probability_of(token, flat, start, support, row)
        committed += 1
        if not accepted:
            break
        kept += 1
    num_accepted[request] = kept
    num_committed[request] = committed


@njit(nogil=True, parallel=True, cache=True)
def _verify(
    flat, starts, vocabulary, support, draft_tokens, num_drafts, accept_uniforms, draw_uniforms,
    laws, threshold_single, threshold_acc,
    num_accepted, num_committed, tokens, logprobs, statuses, error_row, threads,
):  # fmt: skip
    ids = np.empty((threads, WALK_CHUNK), np.int32)
    weights = np.empty((threads, WALK_CHUNK), np.int64)
    for index in prange(num_drafts.size):
        request = np.int64(index)  # prange counts in uint64
        thread = numba.get_thread_id()
        _verify_request(
            request, flat, starts, vocabulary, support, draft_tokens, num_drafts,
            accept_uniforms, draw_uniforms, laws, threshold_single, threshold_acc,
            num_accepted, num_committed, tokens, logprobs, statuses, error_row, ids[thread], weights[thread],
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
    _verify(
        rows.flat, rows.starts, rows.vocabulary, support.arrays(), draft_tokens, num_drafts,
        accept_uniforms, draw_uniforms, laws, threshold_single, threshold_acc,
        verdict.num_accepted, verdict.num_committed, verdict.tokens, verdict.logprobs, verdict.status,
        verdict.error_row, numba.get_num_threads(),
    )  # fmt: skip
    return verdict

"""Verification of one row by a block: its draft is tested, and where it isn't kept, the token in its place is drawn.

That is for drafts verified one by one; gpu/verification/block.py has the other rule. No row waits for another: whoever
has the answers of all rows of a request takes them up to the first that isn't a draft kept (gpu/verification/chain.py).
What rows behind that one have drawn is in vain, and takes nobody's time.

An answer is an int32: a kept draft's token; DRAWN + the token drawn in a draft's place or behind all drafts; BAD; or
LEFT, where the draft isn't kept and the row carries no entries: to walk it in vain would take time. It stands in
`Verdicts.tokens` until the request is settled, its token's log-probability (NaN: no token yet) in `logprobs`, and the
row's LogScale in `Rows.log_scales`.
"""

from functools import lru_cache
from typing import Any

import numpy as np
from numba import cuda

from gpu.device.block import WARP
from gpu.device.instructions import fetch_early
from gpu.device.rows import row_start, row_without_maxima
from gpu.device.vectors import element_of, format_of
from gpu.support.policy import LogScale, keep_log_scale, log_probability_under, log_scale, weight_under
from gpu.verification.draw import draw_of, law_without
from gpu.verification.law import law_of

DRAWN = 1 << 30  # above any token
BAD, LEFT = -1, -2


@cuda.jit(device=True)
def number_of_drafts(requests, request, width):
    """How many drafts a request has, and whether so many are possible: nobody has checked it. Else 0."""
    drafts = np.int32(requests.num_drafts[request])
    possible = 0 <= drafts < width
    return (drafts if possible else np.int32(0)), possible


@cuda.jit(device=True)
def fetch_request(index, width, requests):
    """Ask for what the answer of a row will read: it comes while the row is filtered. By one thread."""
    request = np.int32(np.uint32(index) // np.uint32(width))
    i = np.int32(index - request * width)
    fetch_early(requests.num_drafts, np.int64(request))
    fetch_early(requests.accept_uniforms, np.int64(index))
    fetch_early(requests.draw_uniforms, np.int64(index))
    if i < width - 1:
        fetch_early(requests.draft_tokens, np.int64(np.int64(request) * (width - 1) + i))


@lru_cache
def answer_of(name: str, proposal_name: str | None, threads: int) -> Any:
    """A device function that writes a row's answer, for logits of this dtype and laws of this format.

    (index, policy, logits, rows, requests, verdicts, shared, scratch64). policy: the row's, whose entries the block may
    just have written. Rows behind a request's drafts have no answer. shared: int32 [4], scratch64: int64 [WARP].
    """
    granule = 2 * format_of(name).lanes
    element, draft_prob_of = element_of(name), law_of(proposal_name)
    proposes = proposal_name is not None
    draw = draw_of(name, proposal_name, threads).from_entries

    @cuda.jit(device=True)
    def accepts(policy, x, draft, draft_prob, uniform, requests):
        total = np.float64(policy.total)
        mass = np.float64(weight_under(policy, draft, x))
        limit = uniform * draft_prob * requests.threshold_acc * total
        return limit < mass or mass >= requests.threshold_single * total

    @cuda.jit(device=True)
    def test(index, draft, draft_row, policy, uniform, logits, requests):
        # Whether the draft and its law are good, and whether it is kept.
        good, draft_prob = 0 <= draft < logits.vocabulary, np.float64(1.0)
        if good and proposes:
            draft_at = row_start(requests.laws.values, draft_row)
            draft_prob = np.float64(draft_prob_of(requests.laws, draft_row, draft_at, draft))
            good = 0.0 < draft_prob < np.inf
        kept = False
        if good:
            x = element(logits.words, np.int64(row_start(logits, index) + draft))
            kept = accepts(policy, x, draft, draft_prob, uniform, requests)
        return good, kept

    @cuda.jit(device=True)
    def answer(index, policy, logits, rows, requests, verdicts, shared, scratch64):
        width = logits.width
        request = np.int32(np.uint32(index) // np.uint32(width))
        i = np.int32(index - request * width)
        # Loads that wait for no other come first.
        uniform, accept_uniform = requests.draw_uniforms[index], requests.accept_uniforms[index]
        draft_row, draft = np.int32(request * (width - 1) + i), np.int32(-1)
        if i < width - 1:
            draft = np.int32(requests.draft_tokens[draft_row])
        drafts, possible = number_of_drafts(requests, request, width)
        if i > drafts:
            if cuda.threadIdx.x == 0:
                keep_log_scale(rows, index, LogScale(0.0, 0.0))  # whoever settles reads that of every row
            return
        found, scale = np.int32(BAD), LogScale(0.0, 0.0)
        if policy.valid and possible:
            good, kept = True, False
            if i < drafts:
                good, kept = test(index, draft, draft_row, policy, accept_uniform, logits, requests)
            else:
                draft, draft_row = np.int32(-1), np.int32(-1)
            if cuda.threadIdx.x < WARP:  # meanwhile
                scale = log_scale(policy)
            if kept:
                found = draft
            elif good and policy.greedy:
                found = np.int32(DRAWN + policy.argmax)
            elif good and policy.count > rows.capacity:
                found = np.int32(LEFT)
            elif good:
                cuda.syncthreads()  # behind the entries, and behind what has used the scratches
                law = law_without(draft, draft_row if proposes else np.int32(-1), requests.laws)
                row = row_without_maxima(logits, index, granule)
                token, _ = draw(row, index, policy, uniform, law, rows, shared, scratch64)
                if token >= 0:
                    found = np.int32(DRAWN + token)
        if cuda.threadIdx.x == 0:
            verdicts.tokens[index] = found
            keep_log_scale(rows, index, scale)
            logprob = np.float32(np.nan)
            if found >= 0:
                x = element(logits.words, np.int64(row_start(logits, index) + (found & np.int32(DRAWN - 1))))
                logprob = np.float32(log_probability_under(policy, x, scale))
            verdicts.logprobs[index] = logprob

    return answer


@cuda.jit(device=True)
def reach_of_drafts(request, i, drafts, width, requests, verdicts, shared):
    """`reach` (gpu/verification/chain.py): the first row that isn't a draft kept ends the round."""
    out = np.int64(np.int64(request) * width + i)
    answer, logprob = np.int32(BAD), np.float32(np.nan)
    if i <= drafts:
        answer, logprob = np.int32(verdicts.tokens[out]), np.float32(verdicts.logprobs[out])
    if i == 0:
        shared[0] = 4 * width
    cuda.syncthreads()
    if i <= drafts and not 0 <= answer < DRAWN:
        how = np.int32(-answer) if answer < 0 else np.int32(0)
        cuda.atomic.min(shared, 0, np.int32(4 * i + how))
    cuda.syncthreads()
    last, how = np.int32(shared[0] >> 2), np.int32(shared[0] & 3)  # the row behind all drafts keeps none
    return (answer & np.int32(DRAWN - 1)), logprob, last, how


@lru_cache
def draw_left_of(name: str, proposal_name: str | None, threads: int) -> Any:
    """`draw_left` (gpu/verification/chain.py)."""
    granule = 2 * format_of(name).lanes
    draw, proposes = draw_of(name, proposal_name, threads).from_logits, proposal_name is not None

    @cuda.jit(device=True)
    def draw_left(request, i, drafts, policy, logits, rows, requests, shared, scratch64):
        index = np.int64(np.int64(request) * logits.width + i)
        draft, draft_row = np.int32(-1), np.int32(-1)
        if i < drafts:
            at = np.int32(request * (logits.width - 1) + i)
            draft = np.int32(requests.draft_tokens[at])
            draft_row = at if proposes else np.int32(-1)
        law = law_without(draft, draft_row, requests.laws)
        row = row_without_maxima(logits, index, granule)
        token, _ = draw(row, index, policy, requests.draw_uniforms[index], law, rows, shared, scratch64)
        return np.int32(token)

    return draw_left

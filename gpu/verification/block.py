"""Drafts verified as a block, on a device: each row's block of threads says what it would give, the last one decides.

A row makes its draft's ratio known as soon as it is filtered, waits for those of the rows before it, which makes its
scale, and holds its coin against its bound: whether as many drafts are accepted as lie before it, for all that this row
can know. If so it has drawn the token behind them already, in vain where a later row is kept too. Whoever is the last
of the request takes the last row kept (gpu/verification/chain.py).

A block waits only for blocks of lower number (gpu/rounds/kernel.py says why that is safe), and only for what they make
known before they wait themselves.

An answer is an int32, 2 * what it gives + whether the row is kept: a token; BAD, where the row can't be used and is the
last; WRONG, where its draft's law isn't one, which matters only if it is drawn from; LEFT, where the row carries no
entries and the draw is left to whoever decides. It stands in `Verdicts.tokens` until the request is settled, the
token's log-probability (NaN: none is kept) in `logprobs`.
"""

from functools import lru_cache
from typing import Any, NamedTuple

import numpy as np
from numba import cuda, float32, float64, int64

from gpu.device.block import FULL, WARP
from gpu.device.instructions import make_known, what_is_known
from gpu.device.launch import pointer_to, record_of
from gpu.device.rows import row_start, row_without_maxima
from gpu.device.vectors import element_of, format_of
from gpu.support.policy import LogScale, keep_log_scale, log_probability_under, log_scale, weight_under
from gpu.verification.draw import draw_of, law_of_row
from gpu.verification.law import law_of
from gpu.verification.row import number_of_drafts
from gpu.verification.rule import bound_of, is_below, next_scale, ratio_of

BAD, WRONG, LEFT = (1 << 30) - 1, (1 << 30) - 2, (1 << 30) - 3  # above any token


class Told(NamedTuple):
    """What the rows of a request tell each other, an element a row."""

    ratios: Any  # float64: a draft's, -1 for 0; 0 until it is known, and between launches
    bounds: Any  # float64: see Verdict
    residuals: Any  # int64: the sum of a row's residual, of rows that carry no entries
    draft_logprobs: Any  # float32: of the row's draft under its policy


TOLD = record_of(Told, pointer_to(float64), pointer_to(float64), pointer_to(int64), pointer_to(float32))


@cuda.jit(device=True)
def scale_of(ratios, first, i):
    """The scale of row i of the request whose row 0 is `first`, in every thread; waits for the rows between."""
    scale = np.float64(1.0)
    for begin in range(0, i, WARP):
        ratio = np.float64(-1.0)
        if begin + cuda.laneid < i:
            ratio = np.float64(what_is_known(ratios, np.int64(first + begin + cuda.laneid)))
            while ratio == 0.0:
                ratio = np.float64(what_is_known(ratios, np.int64(first + begin + cuda.laneid)))
        for k in range(min(np.int32(WARP), np.int32(i - begin))):
            scale = np.float64(next_scale(scale, max(cuda.shfl_sync(FULL, ratio, k), np.float64(0.0))))
    return scale


@lru_cache
def block_answer_of(name: str, proposal_name: str, threads: int) -> Any:
    """`answer_of` (gpu/verification/row.py) for drafts that are verified as a block."""
    granule = 2 * format_of(name).lanes
    element, draft_prob_of = element_of(name), law_of(proposal_name)
    draw = draw_of(name, proposal_name, threads)
    draw_entry, sum_row = draw.from_entries, draw.sum_of_logits

    @cuda.jit(device=True)
    def test(index, draft, draft_row, policy, logits, laws):
        # Whether the draft and its law are good, its ratio and its logit.
        good, ratio, x = 0 <= draft < logits.vocabulary, np.float64(0.0), np.float32(0.0)
        if good:
            draft_prob = np.float64(draft_prob_of(laws, draft_row, row_start(laws.values, draft_row), draft))
            good = 0.0 < draft_prob < np.inf
            if good:
                x = element(logits.words, np.int64(row_start(logits, index) + draft))
                ratio = np.float64(ratio_of(weight_under(policy, draft, x), draft_prob, policy.total))
        return good, ratio, x

    @cuda.jit(device=True)
    def offer(index, policy, uniform, law, logits, rows, shared, scratch64):
        # What the row gives, and what is left of it.
        cuda.syncthreads()  # behind the entries, and behind what has used the scratches
        row, left, found = row_without_maxima(logits, index, granule), np.int64(0), np.int32(LEFT)
        if policy.count <= rows.capacity:
            token, left = draw_entry(row, index, policy, uniform, law, rows, shared, scratch64)
            found = np.int32(token)
        elif law.draft_row >= 0:
            left = np.int64(sum_row(row, policy, law, scratch64))
        return (np.int32(WRONG) if left < 0 else found), left

    @cuda.jit(device=True)
    def answer(index, policy, logits, rows, requests, verdicts, shared, scratch64):
        width, told = logits.width, requests.told
        request = np.int32(np.uint32(index) // np.uint32(width))
        i = np.int32(index - request * width)
        # Loads that wait for no other come first.
        uniform, coin = requests.draw_uniforms[index], np.float64(0.0)
        if i > 0:
            coin = requests.accept_uniforms[index - 1]
        draft_row, draft = np.int32(request * (width - 1) + i), np.int32(-1)
        if i < width - 1:
            draft = np.int32(requests.draft_tokens[draft_row])
        drafts, possible = number_of_drafts(requests, request, width)
        if i > drafts:
            if cuda.threadIdx.x == 0:
                keep_log_scale(rows, index, LogScale(0.0, 0.0))  # whoever settles reads that of every row
            return
        good, ratio, x = policy.valid and possible, np.float64(0.0), np.float32(0.0)
        if i < drafts:
            if good:
                good, ratio, x = test(index, draft, draft_row, policy, logits, requests.laws)
            if cuda.threadIdx.x == 0:
                make_known(told.ratios, np.int64(index), ratio if ratio > 0.0 else np.float64(-1.0))
        log = LogScale(0.0, 0.0)
        if policy.valid and cuda.threadIdx.x < WARP:  # meanwhile
            log = log_scale(policy)
        scale = scale_of(told.ratios, np.int64(np.int64(request) * width), i)
        found, left, bound, kept = np.int32(BAD), np.int64(0), scale, is_below(coin, scale)
        if good:
            found = np.int32(0)  # of a row that isn't kept nobody asks
            if kept:
                law = law_of_row(draft_row if i < drafts else np.int32(-1), scale, requests.laws)
                found, left = offer(index, policy, uniform, law, logits, rows, shared, scratch64)
                if i < drafts:
                    bound = np.float64(bound_of(left, scale, policy.total))
                    kept = is_below(coin, bound)
        if cuda.threadIdx.x == 0:
            verdicts.tokens[index] = np.int32(2 * found + (1 if kept else 0))
            told.bounds[index], told.residuals[index] = bound, left
            keep_log_scale(rows, index, log)
            if good and i < drafts:
                told.draft_logprobs[index] = log_probability_under(policy, x, log)
            logprob = np.float32(np.nan)
            if kept and found < LEFT:
                x = element(logits.words, np.int64(row_start(logits, index) + found))
                logprob = np.float32(log_probability_under(policy, x, log))
            verdicts.logprobs[index] = logprob

    return answer


@cuda.jit(device=True)
def reach_of_block(request, i, drafts, width, requests, verdicts, shared):
    """`reach` (gpu/verification/chain.py) for drafts that are verified as a block."""
    out, found, kept = np.int64(np.int64(request) * width + i), np.int32(BAD), False
    if i <= drafts:
        answer = np.int32(verdicts.tokens[out])
        found, kept = np.int32(answer >> 1), answer & 1 != 0
    if i == 0:
        shared[0], shared[1] = drafts, 0
    cuda.syncthreads()
    if i <= drafts and found == BAD:
        cuda.atomic.min(shared, 0, np.int32(i))
    cuda.syncthreads()
    end = np.int32(shared[0])
    if i <= end and kept:
        how = np.int32(0 if found < LEFT else (2 if found == LEFT else 1))
        cuda.atomic.max(shared, 1, np.int32(4 * i + how))
    cuda.syncthreads()
    last, how = np.int32(shared[1] >> 2), np.int32(shared[1] & 3)
    logprob = np.float32(np.nan)
    if i < last:
        found = np.int32(requests.draft_tokens[request * (width - 1) + i])
        logprob = np.float32(requests.told.draft_logprobs[out])
    elif i == last:
        logprob = np.float32(verdicts.logprobs[out])
    if end < i < width:
        requests.told.bounds[out] = np.nan
    return found, logprob, last, how


@lru_cache
def block_draw_left_of(name: str, proposal_name: str, threads: int) -> Any:
    """`draw_left` (gpu/verification/chain.py) for drafts that are verified as a block."""
    granule = 2 * format_of(name).lanes
    draw = draw_of(name, proposal_name, threads).from_sum

    @cuda.jit(device=True)
    def draw_left(request, last, drafts, policy, logits, rows, requests, shared, scratch64):
        first, told = np.int64(np.int64(request) * logits.width), requests.told
        index = np.int64(first + last)
        scale, left, draft_row = scale_of(told.ratios, first, last), np.int64(told.residuals[index]), np.int32(-1)
        if last < drafts and left > 0:
            draft_row = np.int32(request * (logits.width - 1) + last)
        law = law_of_row(draft_row, scale, requests.laws)
        row, uniform = row_without_maxima(logits, index, granule), requests.draw_uniforms[index]
        return np.int32(draw(row, index, policy, uniform, law, left, rows, shared, scratch64))

    return draw_left


@cuda.jit(device=True)
def forget_block(request, i, width, told):
    """Leave nothing for the next launch; behind everything that asks for a scale."""
    if i < width:
        told.ratios[np.int64(np.int64(request) * width + i)] = 0.0

"""Verification on a device, and the kernel that does only that: a block a request.

A thread tests each row's draft at once; the first row that doesn't accept ends the round, and the block draws its
token. Rows behind it are never drawn.
"""

from functools import lru_cache
from typing import Any

import numpy as np
from numba import cuda, float32, float64, int32, int64, types, void

from gpu import status as statuses
from gpu.device.launch import LOGIT_TYPES, Kernel, pointer_to
from gpu.device.rows import open_row
from gpu.device.vectors import element_of, format_of, row_start
from gpu.support.policy import SUPPORT_TYPES, log_probability_under, log_scale, open_policy, weight_under
from gpu.verification.draw import Law, draw_of

THREADS = 512
MAX_REGISTERS = 64  # two blocks a multiprocessor
SCRATCH64 = 33  # int64 of shared memory
_OK, _INVALID = np.uint8(statuses.OK), np.uint8(statuses.INVALID)
_ACCEPTED, _DRAWN, _BAD = 0, 1, 2

VERDICT_TYPES = (
    pointer_to(int32), pointer_to(int32), pointer_to(int32), pointer_to(float32), pointer_to(types.uint8),
    pointer_to(int32),
)  # fmt: skip
REQUEST_TYPES = (
    pointer_to(int32), pointer_to(int32), pointer_to(float64), pointer_to(float64),
    pointer_to(types.uint32), int32, int64, int64, float64, float64,
)  # fmt: skip


@lru_cache
def settle_of(name: str, proposal_name: str | None, threads: int) -> Any:
    """A device function that verifies one request and writes its verdict, for logits and draft probabilities.

    (request, shared, scratch64, arguments of the kernel) -> rows committed, whether the request is OK, the policy and
    the log scale of this thread's row. shared: int32 [8], scratch64: int64 [SCRATCH64].
    """
    granule = 2 * format_of(name).lanes
    element, draft_prob_of = element_of(name), element_of(proposal_name or "float32")
    proposes = proposal_name is not None
    draw = draw_of(name, proposal_name, threads)

    @cuda.jit(device=True)
    def accepts(policy, x, draft, uniform, draft_prob, threshold_single, threshold_acc):
        total = np.float64(policy.total)
        mass = np.float64(weight_under(policy, draft, x))
        return uniform * draft_prob * threshold_acc * total < mass or mass >= threshold_single * total

    @cuda.jit(device=True)
    def proposal_start(request, i, skew, request_step, row_step):
        return np.int64(skew + np.int64(request) * request_step + np.int64(i) * row_step)

    @cuda.jit(device=True)
    def settle(
        request, shared, scratch64,
        words, skew, width, request_step, row_step, vocabulary,
        status, maximum, cutoff, total, count, argmax, greedy, temperature, token_ids, weights, segments, capacity,
        num_segments,
        draft_tokens, num_drafts, accept_uniforms, draw_uniforms, proposal, proposal_skew, proposal_step,
        proposal_row_step, threshold_single, threshold_acc,
        num_accepted, num_committed, tokens, logprobs, verdict_status, error_row,
    ):  # fmt: skip
        i = cuda.threadIdx.x
        first_row = np.int64(request) * width
        drafts = np.int32(num_drafts[request])
        possible = 0 <= drafts < width  # nobody has checked it: else the request ends INVALID at its first row
        drafts = drafts if possible else np.int32(0)
        if i == 0:
            shared[0], shared[2], shared[3] = width, -1, _BAD
        cuda.syncthreads()
        decision, draft, draft_prob = np.int32(_ACCEPTED), np.int32(-1), np.float64(1.0)
        policy = open_policy(
            first_row + min(i, width - 1), status, maximum, cutoff, total, count, argmax, greedy, temperature
        )
        scale = log_scale(policy)  # early: it hides behind the loads
        if i <= drafts and i < width:
            decision = np.int32(_DRAWN) if policy.valid and possible else np.int32(_BAD)
            if policy.valid and i < drafts:
                draft = np.int32(draft_tokens[np.int64(request) * (width - 1) + i])
                good = 0 <= draft < vocabulary
                if good and proposes:
                    at = proposal_start(request, i, proposal_skew, proposal_step, proposal_row_step)
                    draft_prob = np.float64(draft_prob_of(proposal, np.int64(at + draft)))
                    good = 0.0 < draft_prob < np.inf
                if not good:
                    decision = np.int32(_BAD)
                else:
                    start = row_start(first_row + i, width, request_step, row_step, skew)
                    x = element(words, np.int64(start + draft))
                    if accepts(
                        policy, x, draft, accept_uniforms[first_row + i], draft_prob, threshold_single, threshold_acc
                    ):
                        decision = np.int32(_ACCEPTED)
            if decision != _ACCEPTED:
                cuda.atomic.min(shared, 0, i)
        cuda.syncthreads()
        last = np.int32(shared[0])
        if i == last:
            shared[2], shared[3] = draft, decision
        cuda.syncthreads()
        removed, decision = np.int32(shared[2]), np.int32(shared[3])
        at_row = first_row + last
        policy_of_last = open_policy(
            min(at_row, first_row + width - 1), status, maximum, cutoff, total, count, argmax, greedy, temperature
        )
        token = np.int32(-1)
        if decision == _DRAWN:
            token = np.int32(policy_of_last.argmax)
            if not policy_of_last.greedy:
                row = open_row(at_row, words, skew, width, request_step, row_step, vocabulary, words, 0, granule)
                law_at = np.int64(-1)
                if proposes and removed >= 0:
                    law_at = proposal_start(request, last, proposal_skew, proposal_step, proposal_row_step)
                    removed = np.int32(-1)
                token = draw(
                    row, policy_of_last, draw_uniforms[at_row], Law(removed, proposal, law_at), token_ids, weights,
                    at_row * capacity, capacity, segments, at_row * num_segments, shared[4:], scratch64,
                )  # fmt: skip
        if i < width:
            out = first_row + i
            if i < last:
                tokens[out] = draft
            elif i == last and token >= 0:
                tokens[out] = token
                draft = token
            else:
                tokens[out] = -1
                draft = np.int32(-1)
            logprobs[out] = np.float32(np.nan)
            if draft >= 0 and i <= last:
                start = row_start(first_row + i, width, request_step, row_step, skew)
                x = element(words, np.int64(start + draft))
                logprobs[out] = log_probability_under(policy, x, scale)
        good = token >= 0
        committed = np.int32(last + (1 if good else 0))
        if i == 0:
            num_accepted[request], num_committed[request] = last, committed
            verdict_status[request] = _OK if good else _INVALID
            error_row[request] = -1 if good else last
        return committed, good, policy, scale

    return settle


@lru_cache
def verify_kernel(name: str, proposal_name: str | None, threads: int = THREADS) -> Kernel:
    """The kernel for logits and draft probabilities of these dtypes (None: no proposals); its grid is (requests,)."""
    settle = settle_of(name, proposal_name, threads)

    def verify(
        words, skew, width, request_step, row_step, vocabulary,
        status, maximum, cutoff, total, count, argmax, greedy, temperature, token_ids, weights, segments, capacity,
        num_segments,
        draft_tokens, num_drafts, accept_uniforms, draw_uniforms, proposal, proposal_skew, proposal_step,
        proposal_row_step, threshold_single, threshold_acc,
        num_accepted, num_committed, tokens, logprobs, verdict_status, error_row,
    ):  # fmt: skip
        shared = cuda.shared.array(8, int32)
        scratch64 = cuda.shared.array(SCRATCH64, int64)
        settle(
            cuda.blockIdx.x, shared, scratch64,
            words, skew, width, request_step, row_step, vocabulary,
            status, maximum, cutoff, total, count, argmax, greedy, temperature, token_ids, weights, segments, capacity,
            num_segments,
            draft_tokens, num_drafts, accept_uniforms, draw_uniforms, proposal, proposal_skew, proposal_step,
            proposal_row_step, threshold_single, threshold_acc,
            num_accepted, num_committed, tokens, logprobs, verdict_status, error_row,
        )  # fmt: skip

    signature = void(*LOGIT_TYPES, *SUPPORT_TYPES, *REQUEST_TYPES, *VERDICT_TYPES)
    return Kernel(verify, signature, threads, MAX_REGISTERS)

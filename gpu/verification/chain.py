"""Verification on a device, and the kernel that does only that: a block a request.

A thread tests each row's draft at once; the first row that doesn't accept ends the round, and the block draws its
token. Rows behind it are never drawn.
"""

from functools import lru_cache
from typing import Any, NamedTuple

import numpy as np
from numba import cuda, float32, float64, int32, int64, types, void

from gpu import status as statuses
from gpu.device.launch import Kernel, pointer_to, record_of
from gpu.device.rows import LOGITS, row_start, row_without_maxima
from gpu.device.vectors import element_of, format_of
from gpu.support.policy import ROWS, log_probability_under, log_scale, open_policy, weight_under
from gpu.verification.draw import Law, draw_of
from gpu.verification.law import LAWS, law_of

THREADS = 512
MAX_REGISTERS = 64  # two blocks a multiprocessor
SCRATCH64 = 33  # int64 of shared memory
_OK, _INVALID = np.uint8(statuses.OK), np.uint8(statuses.INVALID)
_ACCEPTED, _DRAWN, _BAD = 0, 1, 2


class Requests(NamedTuple):
    """What verification reads, as kernels take it."""

    draft_tokens: Any  # int32 [B, W - 1]
    num_drafts: Any  # int32 [B]
    accept_uniforms: Any  # float64 [B, W]
    draw_uniforms: Any
    laws: Any  # Laws: what the drafts were drawn from, where they were
    threshold_single: Any
    threshold_acc: Any


class Verdicts(NamedTuple):
    """A Verdict as kernels take it: pointers to the arrays of that name."""

    num_accepted: Any
    num_committed: Any
    tokens: Any
    logprobs: Any
    status: Any
    error_row: Any


REQUESTS = record_of(
    Requests,
    pointer_to(int32), pointer_to(int32), pointer_to(float64), pointer_to(float64), LAWS, float64, float64,
)  # fmt: skip
VERDICTS = record_of(
    Verdicts,
    pointer_to(int32), pointer_to(int32), pointer_to(int32), pointer_to(float32), pointer_to(types.uint8),
    pointer_to(int32),
)  # fmt: skip


@lru_cache
def settle_of(name: str, proposal_name: str | None, threads: int) -> Any:
    """A device function that verifies one request and writes its verdict, for logits of this dtype and such laws.

    (request, logits, rows, requests, verdicts, shared, scratch64) -> rows committed, whether the request is OK, the
    policy and the log scale of this thread's row. shared: int32 [8], scratch64: int64 [SCRATCH64].
    """
    granule = 2 * format_of(name).lanes
    element, draft_prob_of = element_of(name), law_of(proposal_name)
    proposes = proposal_name is not None
    draw = draw_of(name, proposal_name, threads)

    @cuda.jit(device=True)
    def accepts(policy, x, draft, draft_prob, uniform, requests):
        total = np.float64(policy.total)
        mass = np.float64(weight_under(policy, draft, x))
        limit = uniform * draft_prob * requests.threshold_acc * total
        return limit < mass or mass >= requests.threshold_single * total

    @cuda.jit(device=True)
    def settle(request, logits, rows, requests, verdicts, shared, scratch64):
        width = logits.width
        i = cuda.threadIdx.x
        first_row = np.int64(request) * width
        drafts = np.int32(requests.num_drafts[request])
        possible = 0 <= drafts < width  # nobody has checked it: else the request ends INVALID at its first row
        drafts = drafts if possible else np.int32(0)
        if i == 0:
            shared[0], shared[2], shared[3] = width, -1, _BAD
        cuda.syncthreads()
        decision, draft, draft_prob = np.int32(_ACCEPTED), np.int32(-1), np.float64(1.0)
        policy = open_policy(rows, first_row + min(i, width - 1))
        scale = log_scale(policy)  # early: it hides behind the loads
        if i <= drafts and i < width:
            decision = np.int32(_DRAWN) if policy.valid and possible else np.int32(_BAD)
            if policy.valid and i < drafts:
                draft = np.int32(requests.draft_tokens[np.int64(request) * (width - 1) + i])
                good = 0 <= draft < logits.vocabulary
                if good and proposes:
                    draft_row = np.int32(request * (width - 1) + i)
                    draft_at = row_start(requests.laws.values, draft_row)
                    draft_prob = np.float64(draft_prob_of(requests.laws, draft_row, draft_at, draft))
                    good = 0.0 < draft_prob < np.inf
                if not good:
                    decision = np.int32(_BAD)
                else:
                    x = element(logits.words, np.int64(row_start(logits, first_row + i) + draft))
                    if accepts(policy, x, draft, draft_prob, requests.accept_uniforms[first_row + i], requests):
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
        policy_of_last = open_policy(rows, min(at_row, first_row + width - 1))
        token = np.int32(-1)
        if decision == _DRAWN:
            token = np.int32(policy_of_last.argmax)
            if not policy_of_last.greedy:
                row = row_without_maxima(logits, at_row, granule)
                draft_row, draft_at = np.int32(-1), np.int64(0)
                if proposes and removed >= 0:
                    draft_row, removed = np.int32(request * (width - 1) + last), np.int32(-1)
                    draft_at = row_start(requests.laws.values, draft_row)
                law = Law(removed, draft_row, draft_at, requests.laws)
                uniform = requests.draw_uniforms[at_row]
                token = draw(row, at_row, policy_of_last, uniform, law, rows, shared[4:], scratch64)
        if i < width:
            out = first_row + i
            if i < last:
                verdicts.tokens[out] = draft
            elif i == last and token >= 0:
                verdicts.tokens[out] = token
                draft = token
            else:
                verdicts.tokens[out] = -1
                draft = np.int32(-1)
            verdicts.logprobs[out] = np.float32(np.nan)
            if draft >= 0 and i <= last:
                x = element(logits.words, np.int64(row_start(logits, first_row + i) + draft))
                verdicts.logprobs[out] = log_probability_under(policy, x, scale)
        good = token >= 0
        committed = np.int32(last + (1 if good else 0))
        if i == 0:
            verdicts.num_accepted[request], verdicts.num_committed[request] = last, committed
            verdicts.status[request] = _OK if good else _INVALID
            verdicts.error_row[request] = -1 if good else last
        return committed, good, policy, scale

    return settle


@lru_cache
def verify_kernel(name: str, proposal_name: str | None, threads: int = THREADS) -> Kernel:
    """The kernel for logits of this dtype and laws of this format (None: none); its grid is (requests,)."""
    settle = settle_of(name, proposal_name, threads)

    def verify(logits, rows, requests, verdicts):
        shared = cuda.shared.array(8, int32)
        scratch64 = cuda.shared.array(SCRATCH64, int64)
        settle(cuda.blockIdx.x, logits, rows, requests, verdicts, shared, scratch64)

    return Kernel(verify, void(LOGITS, ROWS, REQUESTS, VERDICTS), threads, MAX_REGISTERS)

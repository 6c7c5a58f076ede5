"""Verification of a request on a device, and the kernel that does only that: a block a row.

Every row's block leaves an answer (gpu/verification/row.py and block.py, a rule each); whichever is the last of its
request settles it.
"""

from functools import lru_cache
from typing import Any, NamedTuple

import numpy as np
from numba import cuda, float32, float64, int32, int64, types, void

from gpu import status as statuses
from gpu.device.block import WARP, last_to_come
from gpu.device.launch import Kernel, pointer_to, record_of
from gpu.device.rows import LOGITS, row_start
from gpu.device.vectors import element_of
from gpu.support.policy import ROWS, kept_log_scale, log_probability_under, open_policy
from gpu.verification.block import TOLD, block_answer_of, block_draw_left_of, forget_block, reach_of_block
from gpu.verification.law import LAWS
from gpu.verification.row import answer_of, draw_left_of, number_of_drafts, reach_of_drafts

THREADS = 512
MAX_REGISTERS = 64  # two blocks a multiprocessor
SCRATCH64 = WARP + 1  # int64 of shared memory
_OK, _INVALID = np.uint8(statuses.OK), np.uint8(statuses.INVALID)


class Requests(NamedTuple):
    """What verification reads, as kernels take it."""

    draft_tokens: Any  # int32 [B, W - 1]
    num_drafts: Any  # int32 [B]
    accept_uniforms: Any  # float64 [B, W]
    draw_uniforms: Any
    laws: Any  # Laws: what the drafts were drawn from, where they were
    told: Any  # Told: where they are verified as a block
    threshold_single: Any
    threshold_acc: Any


class Rule(NamedTuple):
    """The rule of verification, as device functions."""

    answer: Any  # see `answer_of` in gpu/verification/row.py
    reach: Any
    """(request, i, drafts, width, requests, verdicts, shared) -> row i's token and its log-probability, if it is
    committed; the row that ends the round, and how: 0, 1 if it ends the request INVALID, 2 if its draw is left. By
    every thread, i its number; shared: int32 [2]."""
    draw_left: Any
    """(request, last, drafts, its policy, logits, rows, requests, shared, scratch64) -> the token of that row, which
    carries no entries; -1 for a bad law."""


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
    pointer_to(int32), pointer_to(int32), pointer_to(float64), pointer_to(float64), LAWS, TOLD,
    float64, float64,
)  # fmt: skip
VERDICTS = record_of(
    Verdicts,
    pointer_to(int32), pointer_to(int32), pointer_to(int32), pointer_to(float32), pointer_to(types.uint8),
    pointer_to(int32),
)  # fmt: skip


@lru_cache
def rule_of(name: str, proposal_name: str | None, as_block: bool, threads: int) -> Rule:
    """The rule for logits of this dtype and such laws; drafts with laws may be verified as a block."""
    if as_block:
        assert proposal_name is not None
        answer = block_answer_of(name, proposal_name, threads)
        return Rule(answer, reach_of_block, block_draw_left_of(name, proposal_name, threads))
    return Rule(answer_of(name, proposal_name, threads), reach_of_drafts, draw_left_of(name, proposal_name, threads))


@lru_cache
def settle_of(name: str, proposal_name: str | None, as_block: bool, threads: int) -> Any:
    """A device function that makes a request's verdict of its rows' answers, for logits of this dtype and such laws.

    (request, logits, rows, requests, verdicts, shared, scratch64) -> rows committed, whether the request is OK.
    shared: int32 [6], scratch64: int64 [SCRATCH64].
    """
    element, (_, reach, draw_left) = element_of(name), rule_of(name, proposal_name, as_block, threads)

    @cuda.jit(device=True)
    def settle(request, logits, rows, requests, verdicts, shared, scratch64):
        width, i = logits.width, cuda.threadIdx.x
        out = np.int64(np.int64(request) * width + i)
        drafts, _ = number_of_drafts(requests, request, width)
        answer, logprob, last, how = reach(request, i, drafts, width, requests, verdicts, shared)
        good = how == 0
        if how == 2:
            policy = open_policy(rows, np.int64(request) * width + last)
            token = draw_left(request, last, drafts, policy, logits, rows, requests, shared[2:], scratch64)
            good = token >= 0
            if good and i == last:
                answer = token
                x = element(logits.words, np.int64(row_start(logits, out) + token))
                logprob = log_probability_under(policy, x, kept_log_scale(rows, out))
        if as_block:
            forget_block(request, i, width, requests.told)
        committed = np.int32(last + (1 if good else 0))
        if i < width:
            kept = i < committed
            verdicts.tokens[out] = answer if kept else np.int32(-1)
            verdicts.logprobs[out] = logprob if kept else np.float32(np.nan)
        if i == 0:
            verdicts.num_accepted[request], verdicts.num_committed[request] = last, committed
            verdicts.status[request] = _OK if good else _INVALID
            verdicts.error_row[request] = -1 if good else last
        return committed, good

    return settle


@lru_cache
def verify_kernel(name: str, proposal_name: str | None, as_block: bool, threads: int = THREADS) -> Kernel:
    """The kernel for logits of this dtype, laws of this format (None: none) and this rule; its grid is (rows,).

    Its argument `answered`, int64 [R], zero between launches: of the first ones how many rows of each request are done.
    """
    answer = rule_of(name, proposal_name, as_block, threads).answer
    settle = settle_of(name, proposal_name, as_block, threads)

    def verify(logits, rows, requests, verdicts, answered):
        shared = cuda.shared.array(8, int32)
        scratch64 = cuda.shared.array(SCRATCH64, int64)
        row = np.int32(cuda.blockIdx.x)
        request = np.int32(np.uint32(row) // np.uint32(logits.width))
        answer(row, open_policy(rows, row), logits, rows, requests, verdicts, shared, scratch64)
        if last_to_come(logits.width, answered, np.int64(request), shared, 6):
            settle(request, logits, rows, requests, verdicts, shared, scratch64)

    return Kernel(verify, void(LOGITS, ROWS, REQUESTS, VERDICTS, pointer_to(int64)), threads, MAX_REGISTERS)

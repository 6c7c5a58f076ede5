"""Verification of a request on a device, and the kernel that does only that: a block a row.

Every row's block leaves an answer (gpu/verification/row.py); whichever is the last of its request settles it: the
first row that isn't a draft kept ends the round.
"""

from functools import lru_cache
from typing import Any, NamedTuple

import numpy as np
from numba import cuda, float32, float64, int32, int64, types, void

from gpu import status as statuses
from gpu.device.block import WARP, last_to_come
from gpu.device.launch import Kernel, pointer_to, record_of
from gpu.device.rows import LOGITS, row_start, row_without_maxima
from gpu.device.vectors import element_of, format_of
from gpu.support.policy import ROWS, kept_log_scale, log_probability_under, open_policy
from gpu.verification.draw import draw_of, law_without
from gpu.verification.law import LAWS
from gpu.verification.row import BAD, DRAWN, LEFT, answer_of, number_of_drafts

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
    """A device function that makes a request's verdict of its rows' answers, for logits of this dtype and such laws.

    (request, logits, rows, requests, verdicts, shared, scratch64) -> rows committed, whether the request is OK.
    shared: int32 [6], scratch64: int64 [SCRATCH64].
    """
    granule = 2 * format_of(name).lanes
    element, proposes = element_of(name), proposal_name is not None
    draw = draw_of(name, proposal_name, threads).from_logits

    @cuda.jit(device=True)
    def draw_left(request, i, drafts, policy, logits, rows, requests, shared, scratch64):
        # The token of row i, which carries no entries and whose draft isn't kept; -1 for a bad law.
        index = np.int64(np.int64(request) * logits.width + i)
        draft, draft_row = np.int32(-1), np.int32(-1)
        if i < drafts:
            at = np.int32(request * (logits.width - 1) + i)
            draft = np.int32(requests.draft_tokens[at])
            draft_row = at if proposes else np.int32(-1)
        law = law_without(draft, draft_row, requests.laws)
        row = row_without_maxima(logits, index, granule)
        return np.int32(draw(row, index, policy, requests.draw_uniforms[index], law, rows, shared, scratch64))

    @cuda.jit(device=True)
    def settle(request, logits, rows, requests, verdicts, shared, scratch64):
        width, i = logits.width, cuda.threadIdx.x
        out = np.int64(np.int64(request) * width + i)
        drafts, _ = number_of_drafts(requests, request, width)
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
        good = how == 0
        if how == -LEFT:
            policy = open_policy(rows, np.int64(request) * width + last)
            token = draw_left(request, last, drafts, policy, logits, rows, requests, shared[2:], scratch64)
            good = token >= 0
            if good and i == last:
                answer = token
                x = element(logits.words, np.int64(row_start(logits, out) + token))
                logprob = log_probability_under(policy, x, kept_log_scale(rows, out))
        committed = np.int32(last + (1 if good else 0))
        if i < width:
            kept = i < committed
            verdicts.tokens[out] = (answer & np.int32(DRAWN - 1)) if kept else np.int32(-1)
            verdicts.logprobs[out] = logprob if kept else np.float32(np.nan)
        if i == 0:
            verdicts.num_accepted[request], verdicts.num_committed[request] = last, committed
            verdicts.status[request] = _OK if good else _INVALID
            verdicts.error_row[request] = -1 if good else last
        return committed, good

    return settle


@lru_cache
def verify_kernel(name: str, proposal_name: str | None, threads: int = THREADS) -> Kernel:
    """The kernel for logits of this dtype and laws of this format (None: none); its grid is (rows,).

    Its argument `answered`, int64 [R], zero between launches: of the first ones how many rows of each request are done.
    """
    answer, settle = answer_of(name, proposal_name, threads), settle_of(name, proposal_name, threads)

    def verify(logits, rows, requests, verdicts, answered):
        shared = cuda.shared.array(8, int32)
        scratch64 = cuda.shared.array(SCRATCH64, int64)
        row = np.int32(cuda.blockIdx.x)
        request = np.int32(np.uint32(row) // np.uint32(logits.width))
        answer(row, open_policy(rows, row), logits, rows, requests, verdicts, shared, scratch64)
        if last_to_come(logits.width, answered, np.int64(request), shared, 6):
            settle(request, logits, rows, requests, verdicts, shared, scratch64)

    return Kernel(verify, void(LOGITS, ROWS, REQUESTS, VERDICTS, pointer_to(int64)), threads, MAX_REGISTERS)

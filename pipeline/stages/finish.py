"""Stage 10: tokens to their requests, ends found, everything cut at the same place, slots freed."""

from __future__ import annotations

from typing import Any, Literal

import numpy as np

from pipeline.batch.records import Finished, Packed
from pipeline.batch.request import Request
from pipeline.batch.state import State
from pipeline.results.chunk import Chunk, Records
from pipeline.results.rollout import FinishReason, Rollout, SamplingMask, TopLogprobs


class Finish:
    """Scans the committed tokens; the one that ends the output is the last that is kept.

    A time limit is looked at once a round, behind its last token.
    """

    def __call__(self, state: State, packed: Packed) -> Finished:
        ended = []
        parts = zip(packed.requests, packed.chunks, packed.failures, packed.num_accepted.tolist(), strict=True)
        for request, chunk, failure, accepted in parts:
            request.num_accepted.append(accepted)
            tokens = chunk.token_ids.tolist()
            try:
                length, reason = self._end(state, request, tokens)
            except Exception as error:  # the tokenizer's decoder, while looking for stop strings
                failure = failure or f"the tokenizer failed on the output: {type(error).__name__}: {error}"
            else:
                request.token_ids += tokens[:length]
                request.records.append(chunk.cut(length))
                request.finish_reason = reason
            if failure and not request.finish_reason:
                request.fail(failure)
                request.finish_reason = "abort"
                # Not at once: an abandoned round must find the rows as they were.
                state.dirty.add(request.slot)
            if request.finish_reason:
                state.active[request.slot] = None
                request.slot = -1
                ended.append((request, make_rollout(request, state.target.tokenizer)))
        return Finished(ended)

    @staticmethod
    def _end(state: State, request: Request, tokens: list[int]) -> tuple[int, FinishReason | None]:
        """How many of the tokens the output takes, and whether it ends with them."""
        room = max(request.remaining(state.options.max_length), 1)
        within = tokens if len(tokens) <= room else tokens[:room]
        length, reason = request.scanner.scan(within) if request.grammar is None else _follow(request, within)
        if reason is None and length == room:
            reason = "length"
        if reason is None and request.deadline is not None and state.clock() >= request.deadline:
            reason = "time"
        return length, reason


def _follow(request: Request, tokens: list[int]) -> tuple[int, FinishReason | None]:
    """`StopScanner.scan` beside a grammar."""
    assert request.grammar is not None
    for i, token in enumerate(tokens):
        reason = request.scanner.push(token)
        if reason is None:
            try:
                reason = "stop" if request.grammar.push(token) else None
            except ValueError as error:
                request.fail(str(error))
                reason = "abort"
        if reason:
            return i + 1, reason
    return len(tokens), None


def make_rollout(request: Request, tokenizer: Any) -> Rollout:
    """The rollout of a request that ended; an aborted one hands out no token and no partial record."""
    params = request.params
    text = ""
    if request.error is None:
        try:
            text = _text(request, tokenizer)
        except Exception as error:  # one output that can't be decoded must not end the round
            request.fail(f"the tokenizer failed on the output: {type(error).__name__}: {error}")
            request.finish_reason = "abort"
    kept = request.error is None
    records = request.records if kept else Records()
    whole = records.whole(masks=params.return_sampling_mask, top=params.top_logprobs, audit=params.record == "audit")
    return Rollout(
        prompt_token_ids=request.prompt.token_ids,
        token_ids=whole.token_ids,
        text=text,
        finish_reason=request.finish_reason or "abort",
        logprobs=whole.logprobs if kept and params.return_logprobs else None,
        sampling_mask=_mask(whole, params.sampling_logprobs) if kept else None,
        top_logprobs=_top(whole) if kept else None,
        num_rounds=len(request.num_accepted),
        num_accepted=np.array(request.num_accepted, dtype=np.int32),
        seed=request.seed,
        prompt_index=request.prompt.index,
        sample_index=request.sample_index,
        params_index=request.params_index,
        error=request.error,
        audit=whole.audit if kept else None,
    )


def _text(request: Request, tokenizer: Any) -> str:
    cut = request.scanner.cut_text
    if cut is not None or tokenizer is None:
        return cut or ""
    return tokenizer.decode(request.token_ids, skip_special_tokens=True)


def _mask(whole: Chunk, mode: Literal["selected", "support"]) -> SamplingMask | None:
    if whole.mask_ids is None or whole.mask_sizes is None or whole.mask_logprobs is None:
        return None
    return SamplingMask(
        token_ids=whole.mask_ids,
        offsets=_offsets(whole.mask_sizes),
        logprobs=whole.mask_logprobs if mode == "support" else whole.logprobs,
        mode=mode,
    )


def _offsets(sizes: np.ndarray) -> np.ndarray:
    offsets = np.zeros(len(sizes) + 1, np.int64)
    np.cumsum(sizes, out=offsets[1:])
    return offsets


def _top(whole: Chunk) -> TopLogprobs | None:
    if whole.top_ids is None or whole.top_values is None:
        return None
    return TopLogprobs(whole.top_ids, whole.top_values)

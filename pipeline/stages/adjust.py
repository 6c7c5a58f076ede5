"""Stage 5: the logits that are sampled from: penalties, bias, processors, grammars, and no ending before its time."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import Any

import numpy as np
import torch

import gpu
from pipeline.arrays import array_of
from pipeline.batch.grammar_rows import allowed_rows
from pipeline.batch.records import Adjusted, Block, Proposal
from pipeline.batch.request import Request
from pipeline.batch.state import State


class Adjust:
    """Changes each verify row with that row's own prefix: prompt, output, and the drafts before it.

    Where the model's logits are; a block in which nobody adjusts anything passes through without a copy. A row whose
    processor raises, or whose grammar allows nothing, has no policy, which ends its request if the verification gets to
    that row.
    """

    def __call__(self, state: State, block: Block) -> Adjusted:
        proposal, tensor = block.proposal, block.logits.detach()
        adjusts = any(request.params.adjusts for request in proposal.requests)
        allowed, mask_rows, failures = allowed_rows(
            proposal.requests, proposal.draft_tokens, proposal.num_drafts, tensor.shape[2]
        )
        if adjusts or len(allowed):
            # A copy: the block's record keeps the logits as the model gave them.
            tensor = tensor.to(torch.float32 if adjusts else tensor.dtype, copy=True)
        logits = array_of(tensor.contiguous())
        if adjusts:
            _penalise(logits, proposal)
            for b, request in enumerate(proposal.requests):
                if request.params.logits_processors:
                    failed = _process(logits[b], request, proposal.draft_tokens[b, : proposal.num_drafts[b]])
                    if failed:
                        failures[b, failed[0]] = failed[1]
        if len(allowed):
            gpu.restrict_logits(logits, gpu.beside(logits, allowed), gpu.beside(logits, mask_rows))
        return Adjusted(proposal, logits, failures)


def _penalise(logits: Any, proposal: Proposal) -> None:
    params = [request.params for request in proposal.requests]
    penalised = any(p.repetition_penalty != 1 or p.presence_penalty or p.frequency_penalty for p in params)
    put = partial(gpu.beside, logits)
    gpu.adjust_logits(
        logits,
        put(proposal.draft_tokens),
        put(proposal.num_drafts),
        history=put(_history(proposal.requests)) if penalised else None,
        repetition_penalty=put(np.array([p.repetition_penalty for p in params], np.float32)),
        frequency_penalty=put(np.array([p.frequency_penalty for p in params], np.float32)),
        presence_penalty=put(np.array([p.presence_penalty for p in params], np.float32)),
        logit_bias=put(_bias(proposal.requests)) if any(p.logit_bias for p in params) else None,
    )


def _history(requests: Sequence[Request]) -> gpu.History:
    ids, counts, in_prompt = [], [], []
    for request in requests:
        prompt, output = request.prompt.token_ids, np.array(request.token_ids, np.int32)
        seen = np.unique(np.concatenate([prompt, output]))
        ids.append(seen)
        counts.append(np.bincount(np.searchsorted(seen, output), minlength=len(seen)).astype(np.int32))
        in_prompt.append(np.isin(seen, prompt))
    return gpu.History(_offsets(ids), np.concatenate(ids), np.concatenate(counts), np.concatenate(in_prompt))


def _bias(requests: Sequence[Request]) -> gpu.LogitBias:
    biases = [request.params.logit_bias or {} for request in requests]
    ids = [np.array(list(bias.keys()), np.int32) for bias in biases]
    values = [np.array(list(bias.values()), np.float32) for bias in biases]
    return gpu.LogitBias(_offsets(ids), np.concatenate(ids), np.concatenate(values))


def _offsets(parts: Sequence[np.ndarray]) -> np.ndarray:
    return np.concatenate([[0], np.cumsum([len(part) for part in parts])]).astype(np.int64)


def _process(logits: Any, request: Request, drafts: np.ndarray) -> tuple[int, str] | None:
    """Call the request's processors on each of its rows, float32 [W, V], in place; (row, reason) where they fail.

    They get rows on the host. A failed row and those after it are NaN. It may lie behind a draft that the policy
    forbids: then nothing is lost.
    """
    rows = gpu.to_host(logits)
    failed = _process_rows(rows, request, drafts)
    logits[...] = gpu.beside(logits, rows)
    return failed


def _process_rows(rows: np.ndarray, request: Request, drafts: np.ndarray) -> tuple[int, str] | None:
    committed = np.concatenate([request.prompt.token_ids, np.array(request.token_ids, np.int32)])
    for i in range(len(drafts) + 1):
        prefix = torch.from_numpy(np.concatenate([committed, drafts[:i]]).astype(np.int64))[None]
        scores = torch.from_numpy(rows[i].copy())[None]
        try:
            for processor in request.params.logits_processors:
                scores = processor(prefix, scores)
                if not isinstance(scores, torch.Tensor) or scores.shape != (1, rows.shape[1]):
                    shape = list(scores.shape) if isinstance(scores, torch.Tensor) else type(scores).__name__
                    raise TypeError(f"{processor!r} returned {shape}, expected a tensor [1, {rows.shape[1]}]")
            rows[i] = scores[0].detach().float().cpu().numpy()
        except Exception as error:
            # A user's code can raise anything; it must not end any other request.
            rows[i:] = np.nan
            return i, f"logits_processors: {type(error).__name__}: {error}"
    return None

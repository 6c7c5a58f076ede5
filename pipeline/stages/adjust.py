"""Stage 5: the logits that are sampled from: penalties, bias, processors, grammars, and no ending before its time."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch

import gpu
from pipeline.grammars.rows import allowed_rows
from pipeline.records import Adjusted, Block, Proposal
from pipeline.request import Request
from pipeline.state import State


class Adjust:
    """Changes each verify row with that row's own prefix: prompt, output, and the drafts before it.

    A block in which nobody adjusts anything passes through without a copy on the CPU. A row whose processor raises, or
    whose grammar allows nothing, has no policy, which ends its request if the verification gets to that row.
    """

    def __call__(self, state: State, block: Block) -> Adjusted:
        proposal = block.proposal
        # A grammar's rows ban early endings themselves.
        wanted = [
            r.params.adjusts or (r.grammar is None and r.num_generated < r.params.min_new_tokens)
            for r in proposal.requests
        ]
        logits = to_host(block.logits)
        failures: dict[tuple[int, int], str] = {}
        if any(wanted):
            # A copy: the block's record keeps the logits as the model gave them.
            logits = np.array(block.logits.float().cpu().numpy())
            _penalise(logits, proposal)
            for b, request in enumerate(proposal.requests):
                drafts = proposal.draft_tokens[b, : proposal.num_drafts[b]]
                if request.params.logits_processors:
                    failed = _process(logits[b], request, drafts)
                    if failed:
                        failures[b, failed[0]] = failed[1]
                if wanted[b] and request.grammar is None:
                    _forbid_endings(logits[b], request)
        if any(request.grammar is not None for request in proposal.requests):
            logits = logits if any(wanted) else logits.copy()
            allowed, rows, empty = allowed_rows(
                proposal.requests, proposal.draft_tokens, proposal.num_drafts, logits.shape[2]
            )
            gpu.restrict_logits(logits, allowed, rows)
            failures = empty | failures
        return Adjusted(proposal, logits, failures)


def to_host(logits: torch.Tensor) -> np.ndarray:
    """The logits as the kernels take them: float32, float16, or bfloat16 as uint16 bits; no copy from the CPU."""
    logits = logits.detach().cpu()
    if logits.dtype == torch.bfloat16:
        return logits.view(torch.uint16).numpy()
    return logits.numpy()


def _penalise(logits: np.ndarray, proposal: Proposal) -> None:
    params = [request.params for request in proposal.requests]
    penalised = any(p.repetition_penalty != 1 or p.presence_penalty or p.frequency_penalty for p in params)
    gpu.adjust_logits(
        logits,
        proposal.draft_tokens,
        proposal.num_drafts,
        history=_history(proposal.requests) if penalised else None,
        repetition_penalty=np.array([p.repetition_penalty for p in params], np.float32),
        frequency_penalty=np.array([p.frequency_penalty for p in params], np.float32),
        presence_penalty=np.array([p.presence_penalty for p in params], np.float32),
        logit_bias=_bias(proposal.requests) if any(p.logit_bias for p in params) else None,
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


def _process(rows: np.ndarray, request: Request, drafts: np.ndarray) -> tuple[int, str] | None:
    """Call the request's processors on each of its rows, float32 [W, V], in place; (row, reason) where they fail.

    A failed row and those after it are NaN. It may lie behind a draft that the policy forbids: then nothing is lost.
    """
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


def _forbid_endings(rows: np.ndarray, request: Request) -> None:
    early = request.params.min_new_tokens - request.num_generated
    if early > 0 and request.scanner.ending_ids:
        rows[:early, list(request.scanner.ending_ids)] = -np.inf

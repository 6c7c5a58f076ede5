"""Stage 3: the drafts of a block."""

from __future__ import annotations

import functools

import numpy as np
import torch

import gpu
from pipeline.arrays import array_of
from pipeline.batch.records import Proposal
from pipeline.batch.request import Request
from pipeline.batch.state import State
from pipeline.drafting.drawing import Drawing
from pipeline.drafting.proposer import Contexts, Proposer, checked
from pipeline.policy.policies import row_policies, weighed_whole


def draws_drafts(state: State) -> bool:
    """Whether sampled requests get drawn drafts."""
    wanted = state.options.proposal
    return wanted == "sample" or (wanted == "auto" and getattr(state.draft, "draws_by_default", False))


class Draft:
    """The draft's tokens after every anchor: its argmax, or drawn from its law with coins of the request's own.

    Either way they are proposed without seeing the verification's coins. Greedy requests always get the argmax; whether
    sampled ones get draws is the option `proposal`, by default the method's own way.

    A request whose limits leave room for fewer tokens than a block gets fewer drafts; that cap doesn't look at the
    drafts, so the law stays exact. The option `draft_lengths` caps by the draft's confidences; see drafting/lengths.py.
    """

    def __call__(self, state: State) -> Proposal:
        requests = state.running
        if state.draft is None:
            empty = np.empty((len(requests), 0), dtype=np.int32)
            return Proposal(requests, empty, np.zeros(len(requests), dtype=np.int32))
        most = state.block_size - 1
        room = np.array([min(most, r.remaining(state.options.max_length) - 1) for r in requests], dtype=np.int32)
        if isinstance(state.draft, Proposer):
            return self._from_tokens(state, state.draft, requests, room)
        device, drawing = state.target.device, self._drawing(state, requests)
        anchors = torch.tensor([request.anchor for request in requests], device=device)
        starts = torch.tensor([request.cached for request in requests], device=device)
        drafted = state.draft.propose(
            anchors,
            starts,
            state.draft_cache,
            kv_length=max(request.cached for request in requests) + state.block_size,
            draw=drawing,
        )
        rule = state.options.draft_lengths
        if rule is not None:
            room = rule(drafted.confidence().cpu().numpy(), room)
        return Proposal(
            requests,
            draft_tokens=drafted.tokens.to(device="cpu", dtype=torch.int32).numpy(),
            num_drafts=room,
            draft_probs=None if drawing is None else drawing.law(drafted.law, state.target.vocab_size),
        )

    def _from_tokens(self, state: State, proposer: Proposer, requests: list[Request], room: np.ndarray) -> Proposal:
        """The drafts of a method that reads tokens; the block is as wide as its longest row."""
        batch, most = len(requests), state.block_size - 1
        drawn = draws_drafts(state)
        temperatures = [r.params.temperature if drawn and not r.params.greedy else 0.0 for r in requests]
        rows = [np.concatenate([r.prompt.token_ids, np.array(r.token_ids, np.int32)]) for r in requests]
        lengths = np.array([len(row) for row in rows], np.int32)
        token_ids = np.full((batch, lengths.max(initial=1)), -1, np.int32)
        for into, row in zip(token_ids, rows, strict=True):
            into[: len(row)] = row
        contexts = Contexts(
            token_ids,
            lengths,
            np.array(temperatures, np.float32),
            self._uniforms(requests, most),
            vocab_size=state.target.vocab_size,
        )
        tokens, num_drafts, probs = checked(proposer.propose(contexts), proposer, contexts)
        num_drafts = np.minimum(num_drafts, room)
        width = int(num_drafts.max(initial=0))
        probs = None if probs is None else np.ascontiguousarray(probs[:, :width])
        return Proposal(requests, np.ascontiguousarray(tokens[:, :width]), num_drafts, probs)

    @classmethod
    def _drawing(cls, state: State, requests: list[Request]) -> Drawing | None:
        """How the requests' drafts are drawn: under their own policies. None where all are chosen."""
        if not draws_drafts(state) or all(request.params.greedy for request in requests):
            return None
        params, vocabulary, order = [r.params for r in requests], state.target.vocab_size, state.options.filter_order
        coins = torch.from_numpy(cls._uniforms(requests, state.block_size - 1)).to(state.target.device)
        return Drawing(
            functools.cache(lambda rows: row_policies(params, rows, vocabulary, array_of(coins))),
            coins,
            order,
            whole_rows=any(weighed_whole(p, vocabulary, order) for p in params),
        )

    @staticmethod
    def _uniforms(requests: list[Request], num_drafts: int) -> np.ndarray:
        # A coin for each draft of each round: one that drew an unverified draft before may have swayed, through a
        # schedule, how long the neighbours' blocks were, and through them how long this one is.
        return gpu.uniforms(
            np.array([request.seed for request in requests], dtype=np.uint64),
            np.array([request.num_generated * num_drafts for request in requests], dtype=np.int64),
            num_drafts,
            gpu.PROPOSAL,
        )

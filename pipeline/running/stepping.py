"""Rounds of a pipeline, each whole or not at all, and what ends a request between two of them."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Collection
from dataclasses import replace

import torch

import gpu
from pipeline.arrays import torchs_stream
from pipeline.batch.records import Block, Round, Settled
from pipeline.batch.request import Request
from pipeline.batch.slot_limit import is_out_of_memory
from pipeline.batch.state import State
from pipeline.engine import Engine
from pipeline.errors import InvalidRequest
from pipeline.policy.contract import Capabilities, check_request
from pipeline.results.rollout import Rollout
from pipeline.running.host_threads import threads_for
from pipeline.running.stage_runner import StageRunner
from pipeline.stages.finish import make_rollout

MOST_CONTAINED = 8
"""Requests in a row that exceptions of stages may end before the exception is raised."""


class Stepper:
    """Runs one pipeline's rounds, on the engine or stage by stage; `SpeculativePipeline.step` says what it promises.

    Args:
        state: The pipeline's.
        runner: Its stages.
        engine: None: every round runs stage by stage.
    """

    def __init__(self, state: State, runner: StageRunner, engine: Engine | None) -> None:
        self._state, self._runner, self._engine = state, runner, engine
        self._to_cancel: deque[int] = deque()
        self._taken_out: list[tuple[Request, Rollout]] = []
        self._contained, self._tried = 0, False

    @property
    def capabilities(self) -> Capabilities:
        """What the pair can do under the options, thresholds and stages of now."""
        captured = self._engine is not None and self._engine.rounds.graphs is not None
        return Capabilities.of(self._state, self._runner.stages["verify"], captured)

    @property
    def has_ends(self) -> bool:
        """Whether the next round hands out requests that were ended before it."""
        return bool(self._to_cancel or self._taken_out)

    def cancel(self, ticket: int) -> None:
        """End a ticket's samples before the next round."""
        self._to_cancel.append(ticket)

    def forget(self, tickets: Collection[int]) -> None:
        """Don't hand out what was ended of these tickets."""
        self._taken_out = [pair for pair in self._taken_out if pair[0].prompt.ticket not in tickets]

    def step(self, contain: bool, meanwhile: Callable[[], None] | None = None) -> Round:
        """One round; see `SpeculativePipeline.step`.

        meanwhile: see `Engine.step`; without an engine nobody calls it.
        """
        while True:
            self._take_out_cancelled()
            go_back = self._state.save()
            try:
                with threads_for(self._most_logits()):
                    done = self._round(meanwhile)
            except Exception as error:
                self._undo(go_back, error)
                scarce = is_out_of_memory(error)
                if not (scarce or contain) or self._contained >= MOST_CONTAINED:
                    self._contained = 0
                    raise
                if self._tried:
                    self._give_way(error, scarce)
                elif scarce and self._state.target.device.type == "cuda":
                    torch.cuda.empty_cache()
                    gpu.release_memory()
                self._tried = True  # until a round comes to tokens: an engine's fails only when it is read
            except BaseException as error:
                self._undo(go_back, error)
                raise
            else:
                if done.num_tokens:
                    self._state.slot_limit.succeed()
                    self._contained, self._tried = 0, False
                taken_out, self._taken_out = self._taken_out, []
                return replace(done, taken_out=taken_out)

    def _round(self, meanwhile: Callable[[], None] | None) -> Round:
        delivered = []
        if self._engine is not None:
            if self._runner.looked_into or not self._engine.takes():
                delivered = self._engine.drain()
            else:
                admitted, delivered = self._engine.step(meanwhile)
                return Round(admitted, None, None, delivered)
        with torchs_stream(self._state.target.device):
            self._state.clean()
            admitted = self._runner.run("admit")
            prefill = decode = None
            if admitted.requests:
                prefill = self._settle(self._runner.run("prefill", admitted))
            self._state.close_holes()
            if self._state.active:
                decode = self._settle(self._runner.run("forward", self._runner.run("draft")))
            return Round(admitted, prefill, decode, delivered)

    def _settle(self, block: Block) -> Settled:
        self._refuse_masks_without_law(block)
        adjusted = self._runner.run("adjust", block)
        verified = self._runner.run("verify", adjusted)
        captured = self._runner.run("capture", verified)
        committed = self._runner.run("commit", captured)
        packed = self._runner.run("pack", committed)
        return Settled(block, adjusted, verified, captured, committed, packed, self._runner.run("finish", packed))

    def _refuse_masks_without_law(self, block: Block) -> None:
        # The stage may have been replaced since the request was checked.
        can = self.capabilities
        if not can.law_preserved:
            for request in block.proposal.requests:
                if request.params.keeps_supports:
                    try:
                        check_request(request.prompt.token_ids, request.params, can)
                    except InvalidRequest as refusal:
                        request.fail(str(refusal))

    def _most_logits(self) -> int:
        """Of what waits and runs, in one round."""
        state = self._state
        batch = min(len(state.waiting) + len(state.running), state.options.max_batch)
        return batch * state.block_size * state.target.vocab_size

    def _undo(self, go_back: Callable[[], None], error: BaseException) -> None:
        go_back()
        if self._engine is not None:
            self._engine.forget(error)

    def _give_way(self, error: Exception, scarce: bool) -> None:
        """After a round that failed twice: fewer requests at once, or the end of the one at fault."""
        culprit = self._state.make_room()
        if culprit is None:
            return
        reason = "out of memory alone in the batch" if scarce else "a stage failed"
        self._abort(culprit, f"{reason}: {type(error).__name__}: {error}")
        if not scarce:
            self._contained += 1
            self._state.slot_limit.reset()

    def _abort(self, request: Request, reason: str) -> None:
        """End a request between rounds; the next round hands it out."""
        self._state.remove(request)
        request.fail(reason)
        request.finish_reason = "abort"
        self._taken_out.append((request, make_rollout(request, self._state.target.tokenizer)))

    def _take_out_cancelled(self) -> None:
        tickets = set()
        while self._to_cancel:
            tickets.add(self._to_cancel.popleft())
        for request in self._state.abandon(tickets):
            if request.num_generated:
                request.finish_reason = "cancelled"
            else:
                request.fail("cancelled before its first token")
            self._taken_out.append((request, make_rollout(request, self._state.target.tokenizer)))

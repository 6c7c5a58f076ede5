"""The host's loop: it launches a round, and reads the one before while the device goes on.

What a round commits moves the slots on, on the device, so the next round can be queued before anybody has looked. A
request that turns out to have ended in round r - 1 has a row in round r, which is dropped: nothing of it is handed out.
"""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

import gpu
from pipeline.batch.grammar_rows import allowed_rows
from pipeline.batch.records import Admitted, Delivered
from pipeline.batch.request import Request
from pipeline.batch.slot_limit import is_out_of_memory
from pipeline.batch.state import State
from pipeline.engine.buckets import kv_bucket, slots_bucket
from pipeline.engine.features import Features, why_eager
from pipeline.engine.graphs import Graphs
from pipeline.engine.own_stream import OwnStream
from pipeline.engine.prefills import Prefills
from pipeline.engine.rounds import Rounds, Shape, Ticket
from pipeline.engine.slots import Slot, Slots
from pipeline.errors import InvalidRequest
from pipeline.stages.pack import BlockRows, pack_rows


@dataclass(frozen=True)
class _Launched:
    """A round on its way: who had which slot."""

    phase: int
    requests: list[tuple[int, Request]]
    ticket: Ticket
    failures: Mapping[tuple[int, int], str]  # as in `pipeline.batch.records.Adjusted`


class Engine:
    """Runs the rounds of one pipeline on the device.

    Args:
        state: The pipeline's; its caches are reserved whole, so that they never move.
        run: Calls one of the pipeline's stages by name, with its records.
        graphs: Capture rounds as CUDA graphs; otherwise they are launched piece by piece.
    """

    def __init__(self, state: State, run: Callable[..., Any], *, graphs: bool):
        self.state, self._run = state, run
        target, num_slots = state.target, state.options.max_batch
        self._stream = OwnStream(target.device)
        for cache in (state.target_cache, state.draft_cache):
            if cache is not None:
                cache.reserve()
        slots = Slots(num_slots, state.block_size, target.device)
        first = torch.zeros(num_slots, 1, target.vocab_size, dtype=target.logits_dtype, device=target.device)
        self.rounds = Rounds(state, slots, first, Graphs() if graphs else None)
        self._prefills = Prefills(state, first, Graphs() if graphs else None)
        self._pending: deque[_Launched] = deque()
        # How many of the rounds on their way a request is in, by phase.
        self._unread: dict[int, Counter[Request]] = {gpu.FIRST: Counter(), gpu.DECODING: Counter()}
        self._occupants: list[Request | None] = [None] * num_slots
        self._stale = True

    @property
    def graphs(self) -> list[Graphs]:
        """All that it captures: rounds, and chunks of prompts; none without graphs."""
        return [graphs for graphs in (self.rounds.graphs, self._prefills.graphs) if graphs is not None]

    # --- one round --------------------------------------------------------------------------------------------------

    def takes(self) -> bool:
        """Whether the batch, with those who would be admitted now, can run here."""
        state = self.state
        room = state.options.max_batch - len(state.running)
        coming = [request for request, _ in zip(state.waiting, range(room), strict=False)]
        return why_eager(state, [*state.running, *coming]) is None

    def step(self, meanwhile: Callable[[], None] | None = None) -> tuple[Admitted, list[Delivered]]:
        """Launch a round, and deliver what the rounds before it came to; without work, deliver all.

        meanwhile: work for the host between the two, while rounds are on their way; it may change nothing of the state.

        With a grammar among the requests nothing may be on its way when a block is launched: what its rows may be
        depends on every token before.
        """
        with self._stream.entered():
            self._prefills.join()
            admitted = self._run("admit")
            self._place(admitted)
            waits = any(request.grammar is not None for request in self.state.running)
            before = len(self._pending)
            if not self._ready():
                self._prefills.advance(None)  # nobody to be beside
            self._launch_first()
            delivered = self._deliver_first(len(self._pending)) if waits else []
            self._prefills.beside(self.state.options.prefill_chunk)
            self._launch_decode()
            if not waits:
                if meanwhile is not None:
                    meanwhile()
                delivered = self._deliver_first(before if len(self._pending) > before else len(self._pending))
            return admitted, delivered

    def drain(self) -> list[Delivered]:
        """Bring everything that has been launched or prefilled to the host, so that another may go on from there."""
        with self._stream.entered():
            self._prefills.join()
            if len(self._prefills):
                self._place(Admitted([]))
                self._prefills.advance(None)
                self._launch_first()
            delivered = self._deliver_first(len(self._pending))
        self._stale = True
        return delivered

    def forget(self, error: BaseException) -> None:
        """After an exception: drop what is on its way; everything goes on from what the host knows.

        Requests whose first token hadn't been read wait again. Where memory ran out, that of graphs and rounds is given
        up.
        """
        state = self.state
        self._pending.clear()
        self._prefills.clear()
        for unread in self._unread.values():
            unread.clear()
        if is_out_of_memory(error):
            with self._stream.entered():
                self._prefills.join()  # a chunk may be under way in them
                for graphs in self.graphs:
                    graphs.clear()
                self.rounds.clear()
        for request in reversed(state.running):
            if not request.num_generated:
                state.active[request.slot] = None
                state.dirty.add(request.slot)
                request.restart()
                state.waiting.appendleft(request)
        self._stale = True

    # --- slots ------------------------------------------------------------------------------------------------------

    def _place(self, admitted: Admitted) -> None:
        """Make the device's slots those of the host's requests, and clean what failed requests left."""
        state = self.state
        self._prefills.keep(state.running)
        if not state.waiting and not self._stale:
            self._close_holes()
        self._prefills.add(admitted.requests)
        holders = state.active + [None] * (state.options.max_batch - len(state.active))
        changed = {
            slot: request
            for slot, request in enumerate(holders)
            if self._stale or request is not self._occupants[slot] or slot in state.dirty
        }
        self._write(changed, gpu.DECODING)
        self._occupants, self._stale = list(holders), False
        state.clean()

    def _write(self, requests: dict[int, Request | None], phase: int) -> None:
        """Requests as the host knows them; one without a first token is idle unless its phase is FIRST."""
        options, target = self.state.options, self.state.target
        rows = {}
        for slot, request in requests.items():
            if request is None:
                rows[slot] = Slot()
            else:
                its = phase if phase == gpu.FIRST or request.num_generated else gpu.IDLE
                drafts = self.state.block_size - 1
                rows[slot] = Slot.of(request, its, options.max_length, target.vocab_size, drafts)
        self.rounds.slots.write(rows)
        if any(r is not None and (r.params.adjusts or r.params.min_new_tokens) for r in requests.values()):
            self.rounds.make_adjusting()
        if self.rounds.adjusting is not None:
            self.rounds.adjusting.write(requests)
        if self.rounds.histories is not None:
            self.rounds.histories.write(requests)

    def _close_holes(self) -> None:
        """Move the last requests into empty slots where that makes the batch's bucket smaller."""
        state = self.state
        while state.active and state.active[-1] is None:
            state.active.pop()
        most, running = state.options.max_batch, state.running
        bucket = slots_bucket(len(running), most)
        if not running or bucket == slots_bucket(len(state.active), most):
            return
        for moved in [request for request in running if request.slot >= bucket]:
            slot, source = state.active.index(None), moved.slot
            if moved in self._prefills or self._occupants[source] is not moved or state.dirty & {slot, source}:
                return
            length = min(self._reach(moved), state.target_cache.max_length)
            for cache in (state.target_cache, state.draft_cache):
                if cache is not None:
                    cache.copy_row(source, slot, length)
            self.rounds.slots.move(source, slot)
            if self.rounds.adjusting is not None:
                self.rounds.adjusting.move(source, slot)
            if self.rounds.histories is not None:
                self.rounds.histories.move(source, slot)
            state.active[slot], state.active[source] = moved, None
            moved.slot = slot
            self._occupants[slot] = moved
        while state.active and state.active[-1] is None:
            state.active.pop()

    # --- launching --------------------------------------------------------------------------------------------------

    def _launch_first(self) -> None:
        """Launch the round of the first tokens of those whose prompts are through."""
        requests = sorted(((request.slot, request) for request in self._prefills.take_through()), key=lambda r: r[0])
        if not requests:
            return
        self._write(dict(requests), gpu.FIRST)
        batch = slots_bucket(requests[-1][0] + 1, self.state.options.max_batch)
        features = Features.of(self.state, [request for _, request in requests], batch).first()
        self._launch(Shape(gpu.FIRST, batch, 0, features), requests)

    def _launch_decode(self) -> None:
        ready = self._ready()
        if not any(self._goes_on(request) for request in ready):
            return
        options = self.state.options
        batch = slots_bucket(ready[-1].slot + 1, options.max_batch)
        # Of all the slots that the round runs over, those amid their prefill too.
        reach = max(map(self._reach, self.state.active[:batch]))
        kv_length = kv_bucket(reach, self.state.target_cache.max_length)
        shape = Shape(gpu.DECODING, batch, kv_length, Features.of(self.state, ready, batch))
        self._launch(shape, [(request.slot, request) for request in ready])

    def _launch(self, shape: Shape, requests: list[tuple[int, Request]]) -> None:
        failures: dict[tuple[int, int], str] = {}
        constrained = [(b, request) for b, request in requests if request.grammar is not None]

        def allowed(drafts: np.ndarray, num_drafts: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
            slots = [b for b, _ in constrained]
            masks, found, failed = allowed_rows(
                [request for _, request in constrained], drafts[slots], num_drafts[slots], self.state.target.vocab_size
            )
            rows = np.full((shape.batch, drafts.shape[1] + 1), -1, np.int32)
            rows[slots] = found
            failures.update({(slots[i], row): reason for (i, row), reason in failed.items()})
            return masks, rows

        ticket = self.rounds.launch(shape, allowed if constrained else None)
        self._pending.append(_Launched(shape.phase, requests, ticket, failures))
        self._unread[shape.phase].update(request for _, request in requests)

    def _ready(self) -> list[Request]:
        """The requests whose prompts are through, in slot order."""
        amid_prefill = self._prefills.requests
        return [request for request in self.state.running if request not in amid_prefill]

    def _goes_on(self, request: Request) -> bool:
        """Whether it may need a round beyond those on their way, each of which commits a token at least."""
        unread = sum(of_phase[request] for of_phase in self._unread.values())
        return request.remaining(self.state.options.max_length) > unread

    def _reach(self, request: Request | None) -> int:
        """One more than the last position that its next round can write to; 0 for an empty slot."""
        if request is None:
            return 0
        cached = max(request.cached, len(request.prompt.token_ids))
        return cached + self.state.block_size * (self._unread[gpu.DECODING][request] + 1)

    # --- delivering -------------------------------------------------------------------------------------------------

    def _deliver_first(self, count: int) -> list[Delivered]:
        """What so many of the rounds on their way came to, oldest first."""
        return [self._deliver(self._pending.popleft()) for _ in range(count)]

    def _deliver(self, launched: _Launched) -> Delivered:
        """Read a round's results, hand tokens to who is still running, and finish whom they end."""
        results, state = launched.ticket.receive(), self.state
        unread = self._unread[launched.phase]
        for _, request in launched.requests:
            unread[request] -= 1
            if not unread[request]:
                del unread[request]
        running = set(state.running)
        own = [(b, request) for b, request in launched.requests if request in running]
        width = results.verdict.tokens.shape[1]
        rows = BlockRows(
            verdict=results.verdict,
            capture=results.capture,
            top_ids=results.top_ids,
            top_values=results.top_values,
            top_start=np.arange(results.verdict.tokens.shape[0] + 1) * width,
            failures=launched.failures,
        )
        packed = pack_rows(rows, own, state.options.max_support)
        num_committed = results.verdict.num_committed.tolist()
        for b, request in own:
            if request.num_generated:
                request.cached += num_committed[b]
        return Delivered(packed, self._run("finish", packed))


def make_engine(state: State, run: Callable[..., Any]) -> Engine | None:
    """The engine that the options ask for; None: eager rounds.

    "auto" is graphs on CUDA where draft and options allow it, else eager rounds.

    Raises:
        InvalidRequest: An engine was asked for that the draft or the options rule out.
    """
    wanted, reason = state.options.engine, why_eager(state, [])
    if wanted == "auto":
        wanted = "graphs" if state.target.device.type == "cuda" and reason is None else "eager"
    if wanted == "eager":
        return None
    if reason is not None:
        raise InvalidRequest(f'engine={wanted!r}, expected "auto" or "eager": {reason}')
    return Engine(state, run, graphs=wanted == "graphs")

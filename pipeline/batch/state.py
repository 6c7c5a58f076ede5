"""What the stages share: the models, their caches, the queue and the batch."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Collection
from dataclasses import dataclass, field
from typing import Any

from pipeline.batch.request import Request
from pipeline.batch.slot_limit import SlotLimit
from pipeline.options import Options


@dataclass
class State:
    """The pipeline's mutable state. Stages read it; who writes a field is said beside it.

    Attributes:
        target: `model_loaders.Target`.
        draft: A draft model or a `pipeline.drafting.proposer.Proposer`; None for ordinary decoding.
        target_cache, draft_cache: One row a slot; the draft's is None without a draft.
        options: The pipeline's options.
        waiting: Requests without a slot, in order. Written by submit and admit.
        active: The requests of slots 0, 1, ...; None where one finished. Written by admit and finish.
        dirty: Slots whose cache rows may hold NaN. Written by finish and abandon, emptied by clean.
        entered: Who got which slot in this round. Written by take.
        threshold_single, threshold_acc: Acceptance thresholds. Written by set_accept_thresholds.
        clock: Seconds; what `SamplingParams.max_time` is measured by.
        slot_limit: How many slots are in use after faults. Written by the pipeline's step.
    """

    target: Any
    draft: Any
    target_cache: Any
    draft_cache: Any
    options: Options
    waiting: deque[Request] = field(default_factory=deque)
    active: list[Request | None] = field(default_factory=list)
    threshold_single: float = 1.0
    threshold_acc: float = 1.0
    dirty: set[int] = field(default_factory=set)
    entered: list[tuple[Request, int]] = field(default_factory=list)
    clock: Callable[[], float] = time.monotonic
    slot_limit: SlotLimit = field(init=False)

    def __post_init__(self) -> None:
        self.slot_limit = SlotLimit(self.options.max_batch)

    @property
    def running(self) -> list[Request]:
        """The requests that have a slot, in slot order."""
        return [request for request in self.active if request is not None]

    def tap(self) -> None:
        """Have the target hand out what this pipeline's draft needs; pipelines may share a target."""
        self.target.set_taps(() if self.draft is None else self.draft.target_layer_ids)

    def take(self, slot: int) -> Request:
        """Give a free slot to the first waiting request."""
        request = self.waiting[0]
        self.entered.append((request, slot))
        request.slot = slot
        if request.params.max_time is not None:
            request.deadline = self.clock() + request.params.max_time
        self.active[slot] = request
        self.waiting.popleft()
        return request

    def save(self) -> Callable[[], None]:
        """Remember where everything stands before a round; the result, called, goes back there.

        Entries that an abandoned round left in the caches lie beyond what their rows hold, so they are overwritten.
        """
        self.entered.clear()
        active = list(self.active)
        marks = [(request, request.mark()) for request in self.running]

        def restore() -> None:
            for request, slot in reversed(self.entered):
                self.dirty.add(slot)
                if not (self.waiting and self.waiting[0] is request):
                    self.waiting.appendleft(request)
                request.restart()
            self.active = active
            for request, mark in marks:
                request.go_back(mark)
            self.dirty -= {request.slot for request, _ in marks}  # they go on from what their rows hold
            self.entered.clear()

        return restore

    def make_room(self) -> Request | None:
        """After a round that failed and was undone: go on with fewer requests at once.

        Those that lose their slot wait again, before all others, and start again from their prompts; their seeds are
        their own, so they get the same tokens.

        Returns:
            The request that alone made the round fail, still in its place; None if others were there too.
        """
        used = min(self.slot_limit.limit, len(self.running) + len(self.waiting))
        if not self.slot_limit.shrink(used):
            return next(iter((*self.running, *self.waiting)), None)
        for slot in reversed(range(self.slot_limit.limit, len(self.active))):
            request = self.active.pop()
            if request is not None:
                self.dirty.add(slot)
                request.restart()
                self.waiting.appendleft(request)
        return None

    def remove(self, request: Request) -> None:
        """Take one request out, wherever it is; its siblings go on."""
        prompt = request.prompt
        prompt.unstarted.discard(request.sample_index)
        if not prompt.unstarted:
            prompt.prefix = None
        if request in self.waiting:
            self.waiting.remove(request)
        elif 0 <= request.slot < len(self.active) and self.active[request.slot] is request:
            self.active[request.slot] = None
            self.dirty.add(request.slot)

    def abandon(self, tickets: Collection[int]) -> list[Request]:
        """Take out the requests of these tickets, wherever they are, and return them."""
        if not tickets:
            return []
        taken = [r for r in (*self.running, *self.waiting) if r.prompt.ticket in tickets]
        self.waiting = deque(request for request in self.waiting if request.prompt.ticket not in tickets)
        for slot, request in enumerate(self.active):
            if request is not None and request.prompt.ticket in tickets:
                self.active[slot] = None
                self.dirty.add(slot)
        return taken

    def clean(self) -> None:
        """Zero the cache rows of failed requests: a masked NaN still poisons the row of whoever comes next."""
        for slot in self.dirty:
            for cache in (self.target_cache, self.draft_cache):
                if cache is not None:
                    cache.release(slot)
        self.dirty.clear()

    def close_holes(self) -> None:
        """Move the last requests into the slots of finished ones, so that the batch stays one view of the caches."""
        self.clean()
        self._drop_tail()
        for slot in range(len(self.active)):
            if slot < len(self.active) and self.active[slot] is None:
                moved = self.active[-1]
                assert moved is not None
                for cache in (self.target_cache, self.draft_cache):
                    if cache is not None:
                        cache.copy_row(moved.slot, slot, moved.cached)
                moved.slot, self.active[slot] = slot, moved
                self.active.pop()
                self._drop_tail()

    def _drop_tail(self) -> None:
        while self.active and self.active[-1] is None:
            self.active.pop()

    @property
    def block_size(self) -> int:
        """Rows of a verify block: the anchor and the drafts."""
        return 1 if self.draft is None else 1 + self.draft.num_drafts

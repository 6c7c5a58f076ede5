"""Stage 1: free slots to waiting requests, first come, first served."""

from __future__ import annotations

from pipeline.batch.records import Admitted
from pipeline.batch.state import State


class Admit:
    """Fills the holes that finished requests left, then the slots behind them."""

    def __call__(self, state: State) -> Admitted:
        admitted = []
        for slot in range(state.slot_limit.limit):
            if not state.waiting:
                break
            if slot == len(state.active):
                state.active.append(None)
            if state.active[slot] is None:
                admitted.append(state.take(slot))
        return Admitted(admitted)

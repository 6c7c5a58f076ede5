"""The ten stages of a pipeline, called by name, timed and observed."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

from pipeline import stages as library
from pipeline.batch.state import State
from pipeline.errors import InvalidRequest

STAGES = ("admit", "prefill", "draft", "forward", "adjust", "verify", "capture", "commit", "pack", "finish")

ENGINE_RUNS = ("admit", "finish")
"""The stages that the engine calls; the others' work is one piece on the device."""


class StageRunner:
    """Runs stages on a pipeline's state.

    Attributes:
        stages: By name; any may be replaced.
        seconds: Time spent in every stage so far, by name.
    """

    def __init__(self, state: State) -> None:
        self._state = state
        self.stages: dict[str, Any] = {name: getattr(library, name.capitalize())() for name in STAGES}
        self.seconds = dict.fromkeys(STAGES, 0.0)
        self._observers: dict[str, list[Callable[[Any], None]]] = {name: [] for name in STAGES}
        self._stages_of_engine = {name: stage for name, stage in self.stages.items() if name not in ENGINE_RUNS}

    def run(self, name: str, *records: Any) -> Any:
        """The record that a stage makes of these."""
        started = time.perf_counter()
        record = self.stages[name](self._state, *records)
        self.seconds[name] += time.perf_counter() - started
        for callback in list(self._observers[name]):
            callback(record)
        return record

    def observe(self, stage: str, callback: Callable[[Any], None]) -> Callable[[], None]:
        """Call `callback` with every record of a stage; the result, called, ends it.

        Raises:
            InvalidRequest: No stage of that name.
        """
        if stage not in self._observers:
            raise InvalidRequest(f"stage={stage!r}, expected one of {', '.join(STAGES)}")
        observers = self._observers[stage]
        observers.append(callback)

        def leave() -> None:
            if callback in observers:
                observers.remove(callback)

        return leave

    @property
    def looked_into(self) -> bool:
        """Whether somebody watches or has replaced a stage whose work the engine does in one piece."""
        return any(
            self.stages[name] is not stage or self._observers[name] for name, stage in self._stages_of_engine.items()
        )

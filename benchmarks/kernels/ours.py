"""A round through the library's kernels: filter, verify, capture, pack."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch

from benchmarks.kernels.cases import CAPACITY, MAX_SUPPORT, WIDTH, Inputs, Setting, Shape
from gpu import Capture, RoundBuffer, Verdict, run_round, select_support, top_logprobs

NUM_TOP = 128
_ROOM = 4096


def as_cupy(tensor: torch.Tensor) -> Any:
    """The tensor's memory as the kernels take it; bfloat16 as uint16."""
    import cupy

    if tensor.dtype == torch.bfloat16:
        return cupy.from_dlpack(tensor.view(torch.int16)).view(np.uint16)
    return cupy.from_dlpack(tensor)


class Rounds:
    """The rounds of all input sets. Their results lie in one buffer each, as large on every set."""

    def __init__(self, shape: Shape, setting: Setting, sets: list[Inputs]):
        self.rounds = [Round(shape, setting, inputs) for inputs in sets]
        self.stages = ("filter", "verify", *self._records(setting))
        if "capture" in self.stages:
            needed = max(int(one.capture.offsets[-1]) for one in self.rounds)
            self.room = -(-needed // _ROOM) * _ROOM
            for one in self.rounds:
                one.buffer = RoundBuffer(shape.batch, WIDTH, self.room, num_slots=1)
                one.verdict, one.capture = one.buffer.out

    @staticmethod
    def _records(setting: Setting) -> tuple[str, ...]:
        if not setting.unfiltered:
            return ("capture", "pack")
        return ("top_logprobs",)

    def calls(self, through: str) -> list:
        """A function for each set that runs the stages up to and including this one."""
        stages = self.stages[: self.stages.index(through) + 1]
        # Each of these holds the one before it.
        contained = {"filter": "verify", "verify": "capture"}
        stages = tuple(stage for stage in stages if contained.get(stage) not in stages)

        def call(one: Round):
            steps = [getattr(one, f"run_{stage}") for stage in stages]

            def run():
                for step in steps:
                    step()

            return run

        return [call(one) for one in self.rounds]

    def facts(self) -> dict[str, Any]:
        """What a round commits and records, on average over the sets."""
        committed = np.mean([one.verdict.num_committed.get().mean() for one in self.rounds])
        facts = {"tokens_a_request": round(float(committed), 3), "support": int(self.rounds[0].support.count.max())}
        if "capture" in self.stages:
            entries = np.mean([int(one.capture.offsets[-1]) for one in self.rounds])
            facts |= {"entries": round(float(entries)), "packed_bytes": self.rounds[0].buffer.nbytes}
        return facts


class Round:
    """One input set and the memory that its results go to."""

    def __init__(self, shape: Shape, setting: Setting, inputs: Inputs):
        import cupy

        self.inputs, self.setting = inputs, setting
        batch, rows = shape.batch, shape.rows
        self.logits = as_cupy(inputs.logits)
        self.flat = self.logits.reshape(rows, shape.vocabulary)
        self.temperature, self.min_p = cupy.ones(rows, np.float32), cupy.zeros(rows, np.float32)
        self.top_k = cupy.full(rows, setting.top_k, np.int32)
        self.top_p = cupy.full(rows, setting.top_p, np.float32)
        self.num_drafts = cupy.full(batch, WIDTH - 1, np.int32)
        self.everyone, self.nobody = cupy.ones(batch, np.bool_), cupy.zeros(batch, np.bool_)
        self.row_numbers = cupy.arange(rows, dtype=np.int32)
        self.drafts, self.accept, self.draw = (as_cupy(t) for t in (inputs.drafts, inputs.accept, inputs.draw))
        self.support = self.verdict = self.capture = self.top = self.buffer = None
        self.run_verify() if setting.unfiltered else self.run_capture()

    def run_filter(self) -> None:
        self.support = select_support(
            self.flat, self.temperature, self.top_k, self.top_p, self.min_p, capacity=CAPACITY,
            whole_rows=self.setting.top_k == 0, out=self.support,
        )  # fmt: skip

    def run_verify(self) -> None:
        """The round without a mask request."""
        self._run(self.nobody)

    def run_capture(self) -> None:
        self._run(self.everyone)

    def _run(self, wanted: Any) -> None:
        before = None if self.capture is None else (self.support, self.verdict, self.capture)
        self.support, self.verdict, self.capture = run_round(
            self.logits, self.temperature, self.top_k, self.top_p, self.min_p, self.drafts, self.num_drafts,
            self.accept, self.draw, wanted, self.max_support, capacity=CAPACITY,
            whole_rows=self.setting.top_k == 0, out=before,
        )  # fmt: skip

    def run_pack(self) -> None:
        self.buffer.send()

    def run_top_logprobs(self) -> None:
        self.top = top_logprobs(self.flat, self.support, NUM_TOP, self.row_numbers, out=self.top)

    @property
    def max_support(self) -> int:
        return CAPACITY if self.setting.top_k else MAX_SUPPORT

    def packed(self) -> tuple[Verdict, Capture]:
        """What run_pack has fetched, once the stream is done."""
        return self.buffer.view(0)

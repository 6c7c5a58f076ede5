"""A round through the library's kernels: filter, verify, capture, pack."""

from __future__ import annotations

import ctypes
import dataclasses
import importlib.util
from typing import Any

import numpy as np
import torch

from benchmarks.kernels.cases import CAPACITY, MAX_SUPPORT, WIDTH, Inputs, Setting, Shape
from gpu import Capture, Verdict, capture_masks, select_support, top_logprobs, verify_chain

NUM_TOP = 128
_ALIGNED = 256
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
                one.settle(self.room)

    @staticmethod
    def _records(setting: Setting) -> tuple[str, ...]:
        if not setting.unfiltered:
            return ("capture", "pack")
        return ("top_logprobs",) if importlib.util.find_spec("gpu.top_tokens.device") else ()

    def calls(self, through: str) -> list:
        """A function for each set that runs the stages up to and including this one."""
        stages = self.stages[: self.stages.index(through) + 1]

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
            facts |= {"entries": round(float(entries)), "packed_bytes": self.rounds[0].buffer.size}
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
        self.wanted, self.row_numbers = cupy.ones(batch, np.bool_), cupy.arange(rows, dtype=np.int32)
        self.drafts, self.accept, self.draw = (as_cupy(t) for t in (inputs.drafts, inputs.accept, inputs.draw))
        self.support = self.verdict = self.capture = self.top = None
        self.run_filter()
        self.run_verify()
        if not setting.unfiltered:
            self.run_capture()

    def run_filter(self) -> None:
        self.support = select_support(
            self.flat, self.temperature, self.top_k, self.top_p, self.min_p, capacity=CAPACITY, out=self.support
        )

    def run_verify(self) -> None:
        self.verdict = verify_chain(
            self.logits, self.support, self.drafts, self.num_drafts, self.accept, self.draw, out=self.verdict
        )

    def run_capture(self) -> None:
        self.capture = capture_masks(
            self.logits, self.support, self.verdict, self.wanted, self.max_support, out=self.capture
        )

    def run_pack(self) -> None:
        self.buffer.data.copy_to_host_async(self.host.ctypes.data_as(ctypes.c_void_p), self.host.nbytes)

    def run_top_logprobs(self) -> None:
        self.top = top_logprobs(self.flat, self.support, NUM_TOP, self.row_numbers, out=self.top)

    @property
    def max_support(self) -> int:
        return CAPACITY if self.setting.top_k else MAX_SUPPORT

    def settle(self, room: int) -> None:
        """Move verdict and capture, with room for this many entries, into one buffer, which one copy fetches."""
        import cupy
        import cupyx

        entries = {name: getattr(self.capture, name)[:room] for name in ("token_ids", "logprobs")}
        self._layout = (self.verdict, dataclasses.replace(self.capture, **entries))
        size = sum(_aligned(array.nbytes) for record in self._layout for array in vars(record).values())
        self.buffer = cupy.empty(size, np.uint8)
        self.host = cupyx.empty_pinned((size,), np.uint8)
        self.verdict, self.capture = self._views(self.buffer)

    def packed(self) -> tuple[Verdict, Capture]:
        """What run_pack has fetched, once the stream is done."""
        return self._views(self.host)

    def _views(self, buffer: Any) -> tuple[Verdict, Capture]:
        records, begin = [], 0
        for record in self._layout:
            fields = {}
            for name, array in vars(record).items():
                part = buffer[begin : begin + array.nbytes]
                fields[name] = part.view(array.dtype).reshape(array.shape)
                begin += _aligned(array.nbytes)
            records.append(type(record)(**fields))
        return records[0], records[1]


def _aligned(size: int) -> int:
    return -(-size // _ALIGNED) * _ALIGNED

"""Runs of a pipeline, and what a round of them takes."""

from __future__ import annotations

import dataclasses
import gc
import math
import statistics
import time
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import torch

from pipeline import Rollouts, SamplingParams, SpeculativePipeline
from pipeline.engine.graphs import Graphs
from pipeline.engine.rounds import Ticket

ENGINES = {"cuda": "graphs", "cpu": "overlapped"}
PROFILED_TOKENS = 48
_MOST_WARM_UPS = 4


class Arm:
    """One pipeline and policy; each run generates once."""

    def __init__(self, pipe: SpeculativePipeline, prompts: Sequence[Any], params: SamplingParams):
        self.pipe, self.prompts, self.params = pipe, prompts, params
        self.runs: list[dict[str, float]] = []
        self.shares: dict[str, float] = {}
        self._warm_ups = 0

    def run(self) -> None:
        """Generate, and note the rate and what a round took; a run that met a new shape doesn't count."""
        before = shapes(self.pipe)
        with receiving() as received:
            synchronize()
            started = time.perf_counter()
            rollouts = self._generate(self.prompts, self.params)
            synchronize()
            ended = time.perf_counter()
        if rollouts.failed:
            raise RuntimeError(f"{len(rollouts.failed)} of {len(rollouts)} failed: {rollouts.failed[0].error}")
        if self._warm_ups < _MOST_WARM_UPS and (shapes(self.pipe) != before or not (before or self._warm_ups)):
            self._warm_ups += 1
            return
        rounds = [rollout.num_rounds - 1 for rollout in rollouts]
        tokens = sum(len(rollout.token_ids) for rollout in rollouts)
        first, *intervals = received.intervals
        self.runs.append(
            {
                "tokens_per_second": tokens / (ended - started),
                "tokens_a_round": (tokens - len(rollouts)) / max(sum(rounds), 1),
                "ms_a_round": 1e3 * statistics.median(received.intervals),
                "host_ms_a_round": 1e3 * statistics.median(received.host),
                "ms_to_first": 1e3 * first,
                "ms_of_slowest": 1e3 * max(intervals, default=first),
                "ms_behind_last": 1e3 * (ended - received.last),
            }
        )

    def warm_up(self) -> None:
        """Run until one counts, and forget it."""
        while not self.runs:
            self.run()
        self.runs.clear()

    @property
    def rate(self) -> float:
        """Tokens a second, the median."""
        return statistics.median(run["tokens_per_second"] for run in self.runs)

    def figures(self) -> dict[str, Any]:
        """All that was noted: of every run its rate and where it may have been held up, and the medians of the rest."""
        if not self.runs:
            return dict(self.shares)
        every = ("tokens_per_second", "ms_to_first", "ms_of_slowest", "ms_behind_last")
        medians = {
            name: statistics.median(run[name] for run in self.runs)
            for name in ("tokens_a_round", "ms_a_round", "host_ms_a_round")
        }
        return {name: [run[name] for run in self.runs] for name in every} | medians | self.shares

    def time_rounds(self) -> None:
        """Note the share of a run in which the device was in a round's or a prompt's graph, by events."""
        spans = self._graph_spans(self.prompts, self.params)
        if len(spans) > 2:
            self.shares["in_rounds"] = share_of_later_half(spans)

    def profile(self) -> None:
        """Note how much of the time in graphs, as it was without the profiler, kernels and copies take.

        Of one wave of prompts: the profiler loses records of long runs.
        """
        wave = self.prompts[: self.pipe.state.options.max_batch]
        params = dataclasses.replace(self.params, max_new_tokens=PROFILED_TOKENS)
        for _ in range(2):  # the first meets new shapes
            in_graphs = covered(self._graph_spans(wave, params))
        with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as profiler:
            self._generate(wave, params)
            synchronize()
        device = torch.autograd.DeviceType.CUDA
        spans = [(e.time_range.start, e.time_range.end) for e in profiler.events() if e.device_type == device]
        if not spans or not in_graphs:
            raise RuntimeError(f"spans={len(spans)}, in_graphs={in_graphs}, expected the device to have been seen")
        self.shares["kernels_in_rounds"] = covered(spans) / 1e3 / in_graphs

    def _graph_spans(self, prompts: Sequence[Any], params: SamplingParams) -> list[tuple[float, float]]:
        """When the graphs of a run began and ended, in ms."""
        with graph_events() as events:
            self._generate(prompts, params)
            synchronize()
        return [(events[0][0].elapsed_time(start), events[0][0].elapsed_time(end)) for start, end in events]

    def _generate(self, prompts: Sequence[Any], params: SamplingParams) -> Rollouts:
        """Each prompt by coins of its own: by the same ones all would be accepted or rejected together."""
        seeded = [dataclasses.replace(params, seed=seed) for seed in range(len(prompts))]
        return self.pipe.generate(prompts, seeded)


def share_of_later_half(spans: Iterable[tuple[float, float]]) -> float:
    """How much of the time in the later half is within a span. What is captured and loaded is in the first."""
    found = list(spans)
    first, last = min(start for start, _ in found), max(stop for _, stop in found)
    middle = first + (last - first) / 2
    return covered(found, middle) / (last - middle)


def covered(spans: Iterable[tuple[float, float]], begin: float = -math.inf) -> float:
    """How much time from `begin` on is within a span."""
    busy, end = 0.0, begin
    for start, stop in sorted(spans):
        busy += max(stop - max(start, end), 0)
        end = max(end, stop)
    return busy


def shapes(pipe: SpeculativePipeline) -> tuple[int, int] | None:
    """Shapes that its graphs have met and captured; None without graphs."""
    graphs = [] if pipe._engine is None else pipe._engine.graphs
    return (sum(g.num_shapes for g in graphs), sum(g.num_captured for g in graphs)) if graphs else None


def synchronize() -> None:
    """Wait for the device, if there is one."""
    if torch.cuda.is_available():
        torch.cuda.synchronize()


class HeldMemory:
    """Device memory that torch's and CuPy's allocators took since this was made, in bytes, at most."""

    def __init__(self) -> None:
        self._torch, self._cupy = self._now()
        if torch.cuda.is_available():
            torch.cuda.reset_peak_memory_stats()

    def peak(self) -> int:
        """0 without a device."""
        if not torch.cuda.is_available():
            return 0
        _, of_cupy = self._now()
        return torch.cuda.max_memory_reserved() - self._torch + of_cupy - self._cupy

    @staticmethod
    def _now() -> tuple[int, int]:
        if not torch.cuda.is_available():
            return 0, 0
        import cupy

        gc.collect()
        torch.cuda.synchronize()
        torch.cuda.empty_cache()
        return torch.cuda.memory_reserved(), cupy.get_default_memory_pool().total_bytes()


class receiving:
    """When the host got each round's results, and how long it had been at other things before, in seconds."""

    def __enter__(self) -> receiving:
        self.intervals: list[float] = []
        self.host: list[float] = []
        self._receive, self.last = Ticket.receive, time.perf_counter()

        def receive(ticket: Ticket) -> Any:
            asked = time.perf_counter()
            results = self._receive(ticket)
            got = time.perf_counter()
            self.intervals.append(got - self.last)
            self.host.append(asked - self.last)
            self.last = got
            return results

        Ticket.receive = receive  # type: ignore[method-assign]
        return self

    def __exit__(self, *_: object) -> None:
        Ticket.receive = self._receive  # type: ignore[method-assign]


class graph_events:
    """Events before and behind all that runs by `Graphs.run`, in order."""

    def __enter__(self) -> list[tuple[Any, Any]]:
        self._run = Graphs.run
        found: list[tuple[Any, Any]] = []

        def run(graphs: Graphs, key: Any, body: Callable[[], None]) -> None:
            start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
            start.record()
            self._run(graphs, key, body)
            end.record()
            found.append((start, end))

        Graphs.run = run  # type: ignore[method-assign]
        return found

    def __exit__(self, *_: object) -> None:
        Graphs.run = self._run  # type: ignore[method-assign]

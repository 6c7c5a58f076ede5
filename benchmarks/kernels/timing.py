"""Times of work on a GPU in microseconds: medians of events."""

from __future__ import annotations

import contextlib
import statistics
import time
import warnings
from collections.abc import Callable, Iterator, Sequence

import torch

from benchmarks.kernels.cases import L2_BYTES

Call = Callable[[], object]
_COPY_BYTES = 1 << 30


class Timer:
    """Measures on a stream of its own, which torch and CuPy share inside `active()`."""

    def __init__(self, replays: int, seconds: float = 0.1):
        """At most `replays` repeats of a measurement, and no more (beyond 3) once `seconds` are over."""
        self.replays, self.seconds = replays, seconds
        self.stream = torch.cuda.Stream()
        self._evicting = torch.zeros(8 * L2_BYTES // 4, device="cuda")
        torch.cuda.synchronize()

    @contextlib.contextmanager
    def active(self) -> Iterator[None]:
        """Makes the stream the current one of both libraries."""
        import cupy

        with torch.cuda.stream(self.stream), cupy.cuda.ExternalStream(self.stream.cuda_stream):
            yield

    def graph(self, calls: Sequence[Call]) -> float:
        """Of one call, with all calls in one graph. The memory that they write to must be theirs or torch's."""
        for call in calls:
            call()  # compiles, and allocates for good
        self.stream.synchronize()
        graph = torch.cuda.CUDAGraph()
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", message=".*CUDA Graph is empty.*")
            with torch.cuda.graph(graph, stream=self.stream):
                for call in calls:
                    call()
        try:
            graph.replay()
            return self._median(graph.replay, evict=True) / max(len(calls), 1)
        finally:
            self.stream.synchronize()
            graph.reset()

    def eager(self, calls: Sequence[Call]) -> float:
        """Of one call, launched one after the other."""

        def every() -> None:
            for call in calls:
                call()

        every()
        return self._median(every, evict=False) / len(calls)

    def copy_rate(self) -> float:
        """Bytes a second, read and written, of a copy on the device: the runtime's, or a kernel's if that is faster.

        In a graph the runtime may give its copies to the copy engine, which is slower than the memory.
        """
        source = torch.zeros(_COPY_BYTES // 4, device="cuda")
        target = torch.empty_like(source)
        ways: list[Call] = [lambda: target.copy_(source), lambda: torch.neg(source, out=target)]
        return 2 * _COPY_BYTES / (min(self.graph([way] * 4) for way in ways) * 1e-6)

    def _median(self, work: Call, evict: bool) -> float:
        times: list[float] = []
        deadline = time.monotonic() + self.seconds
        while len(times) < self.replays and (len(times) < 3 or time.monotonic() < deadline):
            start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
            if evict:
                self._evicting.sum()
            start.record()
            work()
            end.record()
            end.synchronize()
            times.append(start.elapsed_time(end) * 1e3)
        return statistics.median(times)

"""CUDA graphs of rounds: captured at the second use of a shape, the least used given up beyond a bound."""

from __future__ import annotations

import gc
from collections import OrderedDict
from collections.abc import Callable, Hashable, Iterator
from contextlib import contextmanager
from typing import Any

import torch

MOST_GRAPHS = 48
"""Graphs that are kept. Their memory is one pool: rounds run one after another."""


class Graphs:
    """Runs device work by key: plainly the first time, which compiles and allocates, as a graph from the second on.

    Args:
        most: Graphs kept.
    """

    def __init__(self, most: int = MOST_GRAPHS):
        self.most = most
        self.num_captured = 0
        self._graphs: OrderedDict[Hashable, Any] = OrderedDict()
        self._seen: set[Hashable] = set()
        self._pool: Any = None

    @property
    def num_shapes(self) -> int:
        """Keys that have run, and whose graph hasn't been given up."""
        return len(self._seen)

    def run(self, key: Hashable, body: Callable[[], None]) -> None:
        """Queue the work on torch's current stream, which must not be the default one.

        body: the same device work at every call with this key, on the same memory, with no synchronisation.
        """
        graph = self._graphs.get(key)
        if graph is None:
            if key not in self._seen:
                body()
                self._seen.add(key)
                return
            graph = self._capture(body)
            self._graphs[key] = graph
            if len(self._graphs) > self.most:
                torch.cuda.current_stream().synchronize()  # it may be running
                dropped, _ = self._graphs.popitem(last=False)
                self._seen.discard(dropped)
        self._graphs.move_to_end(key)
        graph.replay()

    def clear(self) -> None:
        """Give all up, with their memory."""
        torch.cuda.current_stream().synchronize()
        self._graphs.clear()
        self._seen.clear()
        self._pool = None

    def _capture(self, body: Callable[[], None]) -> Any:
        if self._pool is None:
            self._pool = torch.cuda.graph_pool_handle()
        graph = torch.cuda.CUDAGraph()
        stream = torch.cuda.current_stream()
        # Relaxed, and without the garbage collector: a kernel loaded at its first use and memory given back meanwhile
        # are no part of the graph and must not end it.
        capture = torch.cuda.graph(graph, pool=self._pool, stream=stream, capture_error_mode="relaxed")
        with _uncollected(), _own_workspaces(), capture:
            body()
        self.num_captured += 1
        return graph


@contextmanager
def _own_workspaces() -> Iterator[None]:
    """Let cuBLAS work in the graph's own memory inside the block.

    torch keeps cuBLAS's workspaces for all who use a stream, and gives them up when somebody else (the CUDA graphs of
    `torch.compile`, say) asks for it: a graph that works in one would write to memory that is no longer its own.
    """
    torch._C._cuda_clearCublasWorkspaces()
    try:
        yield
    finally:
        torch._C._cuda_clearCublasWorkspaces()


@contextmanager
def _uncollected() -> Iterator[None]:
    """Leave garbage where it is inside the block."""
    was = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was:
            gc.enable()

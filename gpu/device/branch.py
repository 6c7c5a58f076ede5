"""Kernels beside others in a CUDA graph that is being captured: a branch that leaves the stream and comes back to it.

Its blocks are started before those of the stream's own kernels. Outside a graph there is none: more launches from
Python would cost more than they save.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from functools import cache
from typing import Any, NamedTuple

from gpu.device.instructions import SIMULATED


class _Branch(NamedTuple):
    stream: Any
    begun: Any
    ended: Any


@cache
def _branch_of(device: int) -> _Branch:
    import cupy

    events = (cupy.cuda.Event(disable_timing=True) for _ in range(2))
    return _Branch(cupy.cuda.Stream(non_blocking=True, priority=-1), *events)


def _current() -> tuple[Any, _Branch]:
    import cupy

    return cupy.cuda.get_current_stream(), _branch_of(cupy.cuda.runtime.getDevice())


def can_branch() -> bool:
    """Whether CuPy's current stream is being captured. Ask it once before any capture: it makes what branches need."""
    if SIMULATED:
        return False
    stream, _ = _current()
    return stream.is_capturing()


@contextmanager
def branch() -> Iterator[None]:
    """What is queued inside runs behind what the current stream holds so far, beside what is queued next, to `join`."""
    if SIMULATED:
        yield
        return
    stream, own = _current()
    own.begun.record(stream)
    own.stream.wait_event(own.begun)
    with own.stream:
        yield
    own.ended.record(own.stream)


def join() -> None:
    """What is queued on the current stream from now on runs behind the branch."""
    if SIMULATED:
        return
    stream, own = _current()
    stream.wait_event(own.ended)

"""How many threads the kernels' host twins run on in a round.

Numba's threads and torch's are two pools, and a pool's threads spin for a while behind each parallel loop (GNU OpenMP:
300,000 turns, up to 16 ms on an Intel Xeon). So a filter that takes a millisecond on two threads keeps a core from the
forward behind it for longer than it saved.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import numba

FEW_LOGITS = 1 << 22
"""Up to so many the filter, even without a top_k, takes some milliseconds on one thread."""


@contextmanager
def threads_for(num_logits: int) -> Iterator[None]:
    """One thread within, for a round of up to FEW_LOGITS; for more, as many as before."""
    most = numba.get_num_threads()
    if num_logits > FEW_LOGITS or most == 1:
        yield
        return
    numba.set_num_threads(1)
    try:
        yield
    finally:
        numba.set_num_threads(most)

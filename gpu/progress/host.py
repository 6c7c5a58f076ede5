"""advance on the host."""

from typing import Any

from numba import njit

from gpu.progress.step import step


@njit(nogil=True, cache=True)
def _advance(
    phase_of, anchor, start, generated, remaining, num_drafts, num_committed, status, tokens, width, phase, max_drafts
):
    for b in range(phase_of.size):
        if phase_of[b] == phase:
            committed, left, next_phase, drafts = step(num_committed[b], width, status[b], remaining[b], max_drafts)
            if committed > 0:
                anchor[b] = tokens[b * width + committed - 1]
            start[b] += committed
            generated[b] += committed
            remaining[b], phase_of[b], num_drafts[b] = left, next_phase, drafts


def advance(arguments: tuple[Any, ...], phase: int, max_drafts: int) -> None:
    """advance of NumPy arrays, in the kernel's order."""
    *others, tokens = arguments
    _advance(*others, tokens.reshape(-1), tokens.shape[1], phase, max_drafts)

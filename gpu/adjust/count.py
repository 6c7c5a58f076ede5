"""What a round committed, counted in the slots' words, where they are: the next round sees it without the host."""

import numpy as np
from numba import njit

from gpu.adjust.words import ONE_MORE
from gpu.arrays import Array, on_device
from gpu.checks import check_array
from gpu.progress.record import DECODING, FIRST
from gpu.verification import Verdict


def count_committed(words: Array, verdict: Verdict, phases: Array, phase: int) -> None:
    """Count the committed tokens of the slots in this phase in their words, in place.

    words: int32 [B, V], of a `SlotHistory`; verdict: of the same B slots, tokens outside 0..V-1 are skipped; phases:
    int32 [B], before the slots are moved on by `advance`; phase: FIRST or DECODING. All arrays contiguous, NumPy's or
    CuPy's. ValueError for anything else. On a device this is one launch, without synchronisation.
    """
    if phase not in (FIRST, DECODING):
        raise ValueError(f"phase={phase}, expected FIRST ({FIRST}) or DECODING ({DECODING})")
    if on_device(verdict.tokens):
        from gpu.adjust import count_device

        count_device.count_committed(words, verdict, phases, phase)
        return
    batch, width = verdict.tokens.shape
    if check_array("words", words, np.int32, (batch, np.shape(words)[-1])) is not words or not words.flags.writeable:
        raise ValueError("words=a view, expected a C-contiguous array that can be written")
    tokens = check_array("verdict.tokens", verdict.tokens, np.int32, (batch, width))
    num_committed = check_array("verdict.num_committed", verdict.num_committed, np.int32, (batch,))
    _count(words, tokens, num_committed, check_array("phases", phases, np.int32, (batch,)), phase)


@njit(nogil=True, cache=True)
def _count(words, tokens, num_committed, phases, phase):
    for b in range(tokens.shape[0]):
        if phases[b] == phase:
            for i in range(min(num_committed[b], tokens.shape[1])):
                if 0 <= tokens[b, i] < words.shape[1]:
                    words[b, tokens[b, i]] += ONE_MORE

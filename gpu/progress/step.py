"""One slot's move, for both compilers."""

import numpy as np
from numba import njit

from gpu import status as statuses
from gpu.progress.record import DECODING, IDLE

_OK = np.uint8(statuses.OK)


@njit(nogil=True)
def step(num_committed, width, status, remaining, max_drafts):
    """Tokens committed (int64, within 0..width), what remains, the new phase and the next round's drafts."""
    committed = min(max(np.int64(num_committed), np.int64(0)), np.int64(width))
    left = np.int64(np.int64(remaining) - committed)
    if status == _OK and committed > 0 and left > 0:
        return committed, left, np.int32(DECODING), np.int32(min(np.int64(max_drafts), np.int64(left - 1)))
    return committed, left, np.int32(IDLE), np.int32(0)

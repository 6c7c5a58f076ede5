"""The penalty of one token, for both compilers."""

import numpy as np
from numba import njit

from gpu.instructions import product


@njit(nogil=True, error_model="numpy")
def penalise(x, count, repetition, frequency, presence):
    """A logit (float32) after the three penalties; each step is rounded before the next."""
    if repetition != np.float32(1.0):
        x = np.float32(x / repetition) if x > np.float32(0.0) else product(x, repetition)
    if count > 0:
        x = np.float32(x - product(frequency, np.float32(count)))
        x = np.float32(x - presence)
    return x

"""The adjustment of one logit, for both compilers."""

import numpy as np
from numba import njit

from gpu.adjust.words import COUNT_SHIFT, ENDING, IN_PROMPT
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


@njit(nogil=True)
def is_neutral(repetition, frequency, presence):
    """Whether penalties leave every logit its bits."""
    return repetition == np.float32(1.0) and frequency == 0 and presence == 0


@njit(nogil=True, error_model="numpy")
def adjust_token(x, word, num_drafted, bias, early, neutral, repetition, frequency, presence):
    """A logit (float32) by its token's word and bias; `num_drafted` times it is among the drafts before the row."""
    count = np.int32(np.int32(word >> np.int32(COUNT_SHIFT)) + np.int32(num_drafted))
    if not neutral and (count > 0 or word & np.int32(IN_PROMPT)):
        x = penalise(x, count, repetition, frequency, presence)
    if bias != 0:
        x = np.float32(x + bias)
    if early and word & np.int32(ENDING) and x < np.float32(np.inf):
        x = np.float32(-np.inf)
    return x

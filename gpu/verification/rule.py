"""The numbers of both rules, for the host and for a device: float64, each operation rounded, so the same bits anywhere.

verify.py states the rules. Kernel helpers.
"""

from typing import Any

import numpy as np
from numba import njit

from gpu.instructions import product


def verifies_block(draft_probs: Any, threshold_single: float, threshold_acc: float) -> bool:
    """Whether drafts with these laws are verified as a block."""
    return draft_probs is not None and threshold_single == threshold_acc == 1.0


@njit(nogil=True)
def ratio_of(mass, draft_prob, total):
    """How much likelier the policy makes a draft than its law, mass / (draft_prob * total); draft_prob above 0."""
    return np.float64(mass) / product(np.float64(draft_prob), np.float64(total))


@njit(nogil=True)
def next_scale(scale, ratio):
    """The scale of the row behind a draft."""
    return min(1.0, product(scale, ratio))


@njit(nogil=True)
def residual_weight(mass, draft_prob, total, scale):
    """trunc(max(0, scale * mass - draft_prob * total)); -1 if the draft_prob isn't a probability."""
    if not draft_prob >= 0:
        return np.int64(-1)
    residual = product(scale, np.float64(mass)) - product(np.float64(draft_prob), np.float64(total))
    return np.int64(residual) if residual > 0 else np.int64(0)


@njit(nogil=True)
def bound_of(left, scale, total):
    """What the coin of a row must be below, for a row whose residual at its scale sums to `left`.

    left: -1 where the row's law isn't one.
    """
    mass = np.float64(left)
    whole = mass + product(1.0 - scale, np.float64(total))
    if left < 0 or not whole > 0.0:
        return np.float64(scale)
    return min(np.float64(scale), mass / whole)


@njit(nogil=True)
def is_below(uniform, bound):
    """Whether a coin is below a bound in [0, 1]; one out of range, which a device may find, counts as the nearest."""
    return bound >= 1.0 or max(uniform, 0.0) < bound

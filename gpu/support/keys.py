"""A window of keys in slots of equal width: what a search by counting tallies, and narrows to one of its slots."""

from typing import Any, NamedTuple

import numpy as np
from numba import cuda


class Keys(NamedTuple):
    """The keys low..high, uint32; a slot holds 2^shift of them."""

    low: Any
    high: Any
    shift: Any


@cuda.jit(device=True)
def keys_between(low, high, level):
    """These keys in 2^level slots."""
    length = np.int32(32 - cuda.clz(np.int32(np.uint32(high - low))))
    return Keys(np.uint32(low), np.uint32(high), np.uint32(max(np.int32(length - level), np.int32(0))))


@cuda.jit(device=True)
def slot_of(keys, key):
    """Where a key of the window is counted."""
    return np.int32(np.uint32(key - keys.low) >> keys.shift)


@cuda.jit(device=True)
def keys_in_slot(keys, slot, level):
    """Those of one slot, in 2^level slots again."""
    low = np.uint32(keys.low + np.uint32(np.uint32(slot) << keys.shift))
    high = np.uint32(low + np.uint32(np.uint32(np.uint32(1) << keys.shift) - np.uint32(1)))
    shift = np.uint32(keys.shift - np.uint32(level)) if keys.shift > np.uint32(level) else np.uint32(0)
    return Keys(low, min(keys.high, high), shift)

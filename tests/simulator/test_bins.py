"""The bins of stored maxima in the simulator: of every stored key there is."""

import numpy as np
import pytest
from numba import cuda

from gpu.support.bins import BINS, bins_of


def binned(dtype):
    """The bin of each stored key; the least key of each bin, and of BINS."""
    _, bin_of, least_of = bins_of(dtype)
    slots, least = np.zeros(1 << 16, np.int32), np.zeros(BINS + 1, np.uint32)

    @cuda.jit
    def fill(slots, least):
        for stored in range(slots.size):
            slots[stored] = bin_of(np.uint32(stored))
        for slot in range(least.size):
            least[slot] = least_of(np.int32(slot))

    fill[1, 1](slots, least)
    return slots, least


@pytest.mark.parametrize("dtype", ["float32", "float16", "bfloat16"])
def test_bins_are_in_the_order_of_the_keys(dtype):
    slots, least = binned(dtype)
    assert slots.min() >= 0
    assert slots.max() < BINS
    assert (np.diff(slots) >= 0).all()
    used = np.unique(slots)
    np.testing.assert_array_equal(least[used], np.searchsorted(slots, used))
    assert (np.diff(least.astype(np.int64)) >= 0).all()
    assert least[BINS] == 1 << 16


@pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
def test_16_bins_an_octave_where_logits_lie(dtype):
    slots, _ = binned(dtype)
    octave = bins_of(dtype).octave
    for exponent in (-6, 0, 3, 9):
        first = 0x8000 + (((1 << 14) >> octave) - 1 + exponent << octave)  # 2^exponent
        assert len(np.unique(slots[first : first + (1 << octave)])) == 16
        assert len(np.unique(slots[0xFFFF - first - (1 << octave) + 1 : 0xFFFF - first + 1])) == 16
    assert len(np.unique(slots[0x8000 : 0x8000 + (1 << octave)])) == 1

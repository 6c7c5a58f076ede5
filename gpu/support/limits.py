"""What bounds each row of a batch, as kernels read it."""

from typing import Any, NamedTuple

import numpy as np
from numba import cuda, float32, int32

from gpu.device.launch import pointer_to, record_of
from gpu.weights import GREEDY_TEMPERATURE


class Filter(NamedTuple):
    """What bounds the rows, as kernels take it; their temperatures are the Rows'."""

    top_k: Any  # int32 [R], 0: none
    top_p: Any  # float32 [R]
    min_p: Any  # float32 [R]
    joint: Any  # int32: whether the filter order is


FILTER = record_of(Filter, pointer_to(int32), pointer_to(float32), pointer_to(float32), int32)


class Limits(NamedTuple):
    """The bounds of one row."""

    temperature: Any
    k: Any  # int32; 0: no finite top_k
    top_p: Any
    min_p: Any
    greedy: Any  # bool
    good: Any  # bool: nobody has checked the values before


@cuda.jit(device=True)
def limits_of(bounds, rows, index, vocabulary):
    """The bounds of a row."""
    temperature, k = rows.temperature[index], bounds.top_k[index]
    top_p, min_p = bounds.top_p[index], bounds.min_p[index]
    greedy = temperature < GREEDY_TEMPERATURE or k == 1
    if greedy or k >= vocabulary:
        k = np.int32(0)
    good = temperature >= 0 and temperature < np.inf and k >= 0 and top_p > 0 and min_p >= 0 and min_p < 1
    return Limits(temperature, k, top_p, min_p, greedy, good)

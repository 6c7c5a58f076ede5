"""The law that a draft was drawn from, on a device: dense probabilities, or the draft's logits (gpu/draft_law.py).

A law's format has a name: that of a dtype for probabilities, `by_logits(dtype)` for logits.
"""

from functools import lru_cache
from typing import Any, NamedTuple

import numpy as np
from numba import cuda, float32, float64, int32, int64

from gpu.device.launch import pointer_to, record_of
from gpu.device.rows import LOGITS
from gpu.device.vectors import element_of
from gpu.draft_law import entry_of, probability

_LOGITS = " logits"


class Laws(NamedTuple):
    """The laws of all drafts as kernels take them. Of dense ones only the values are read."""

    values: Any  # Logits: probabilities or logits [B, W - 1, V or n]
    drawn: Any  # int64 [B * (W - 1)]
    maximum: Any
    cutoff: Any
    scale: Any
    share: Any
    places: Any  # int32: of tokens or entries
    how: Any


LAWS = record_of(
    Laws, LOGITS, pointer_to(int64), pointer_to(float32), pointer_to(float32), pointer_to(float32),
    pointer_to(float64), pointer_to(int32), int32,
)  # fmt: skip


def by_logits(dtype: str) -> str:
    """The name of the format of laws by logits of this dtype."""
    return dtype + _LOGITS


def is_by_logits(name: str | None) -> bool:
    """Whether a format's values are logits."""
    return name is not None and name.endswith(_LOGITS)


@lru_cache
def law_of(name: str | None) -> Any:
    """A device function (laws, row, at, token) -> a draft's probability of a token, for a format.

    at: `row_start` of the row's values. None: for kernels whose requests have no laws, where nobody asks.
    """
    element = element_of((name or "float32").removesuffix(_LOGITS))

    @cuda.jit(device=True)
    def dense(laws, row, at, token):
        return np.float64(element(laws.values.words, np.int64(at + token)))

    @cuda.jit(device=True)
    def from_logits(laws, row, at, token):
        entry = entry_of(token, row, laws.places, laws.values.vocabulary, laws.how)
        x = np.float32(-np.inf)
        if entry >= 0:
            x = element(laws.values.words, np.int64(at + entry))
        return probability(
            entry, x, laws.drawn[row], laws.maximum[row], laws.cutoff[row], laws.scale[2 * row],
            laws.scale[2 * row + 1], laws.share[row],
        )  # fmt: skip

    return from_logits if is_by_logits(name) else dense

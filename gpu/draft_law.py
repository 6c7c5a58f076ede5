"""The laws that drafts were drawn from, as kernels ask for them: the draft's probability of one token. Kernel helpers.

A law is dense (a probability a token), or known by the draft's logits: an entry of logit x has

    probability = float32(weight(x) * share),   share = 1 / total in float64; 0 below the cutoff

with the weights of gpu/weights.py that the draft was drawn by. A draft that was chosen has probability 1. Where a draft
proposes among some tokens only, `places` says which entry a token is: a table over the vocabulary, or the entries'
tokens in ascending order, a row a draft.
"""

from typing import NamedTuple

import numpy as np
from numba import njit

from gpu.arrays import Array
from gpu.instructions import product
from gpu.logit_rows import load
from gpu.weights import weight

DENSE, BY_TOKEN, BY_TABLE, BY_SEARCH = range(4)  # how a token's value is found: `DraftLaws.how`
_MINUS_INF = np.float32(-np.inf)


class DraftLaws(NamedTuple):
    """The laws of R drafts on the host, as its kernels take them; `starts` is empty where there are none."""

    values: Array  # probabilities or logits, flat as gpu/logit_rows.py has them
    starts: Array  # int64 [R]
    size: int  # values a draft
    drawn: Array  # int64 [R]: the entry that was drawn; this and the next are those of a Drawn, empty if DENSE
    maximum: Array
    cutoff: Array
    scale: Array
    share: Array
    places: Array  # int32, flat
    how: int


_NONE, _NOWHERE = np.empty(0, np.float32), np.empty(0, np.int64)


def dense_laws(values: np.ndarray, starts: np.ndarray, size: int) -> DraftLaws:
    """Laws that are probabilities, `size` a draft."""
    return DraftLaws(
        values, starts, size, _NOWHERE, _NONE, _NONE, _NONE, np.empty(0, np.float64), np.empty(0, np.int32), DENSE
    )  # fmt: skip


NO_LAWS = dense_laws(_NONE, _NOWHERE, 0)


@njit(nogil=True)
def entry_of(token, row, places, size, how):
    """The entry of a token in a draft's row, -1 if it has none."""
    if how == BY_TOKEN:
        return np.int64(token)
    if how == BY_TABLE:
        return np.int64(places[token])
    low = np.int64(row) * np.int64(size)
    first, high = low, np.int64(low + size)
    while low < high:
        middle = np.int64((low + high) >> 1)
        if places[middle] < token:
            low = np.int64(middle + 1)
        else:
            high = middle
    if low < first + size and places[low] == token:
        return np.int64(low - first)
    return np.int64(-1)


@njit(nogil=True)
def probability(entry, x, drawn, maximum, cutoff, c_hi, c_lo, share):
    """Of an entry with logit x, -inf for entry -1, under one draft's numbers. NaN where it has no law."""
    if c_hi == np.float32(0.0):
        return np.float64(1.0) if entry == drawn else np.float64(0.0)
    mass = np.int64(0)
    if x >= cutoff:
        mass = weight(x, maximum, c_hi, c_lo)
    return np.float64(np.float32(product(np.float64(mass), share)))


@njit(nogil=True)
def draft_probability(laws, row, token):
    """The draft's probability of a token on the host."""
    if laws.how == DENSE:
        return np.float64(load(laws.values, laws.starts[row] + token))
    entry = entry_of(token, row, laws.places, laws.size, laws.how)
    x = load(laws.values, laws.starts[row] + entry) if entry >= 0 else _MINUS_INF
    return probability(
        entry, x, laws.drawn[row], laws.maximum[row], laws.cutoff[row], laws.scale[2 * row], laws.scale[2 * row + 1],
        laws.share[row],
    )  # fmt: skip

"""What the filter hands on: the kept set of every row."""

from dataclasses import dataclass
from typing import NamedTuple

import numpy as np

from gpu.arrays import Array


class SupportArrays(NamedTuple):
    """A Support as kernels take it: the same memory, u64 viewed as int64."""

    status: Array
    maximum: Array
    cutoff: Array
    total: Array
    size: Array  # count
    argmax: Array
    greedy: Array
    token_ids: Array
    weights: Array
    temperature: Array


@dataclass(frozen=True)
class Walk:
    """A coarse view of the rows on a device, so that their readers skip what they don't need."""

    maxima: Array  # uint16 [R, stride]: the order key of the largest logit of each granule, cut to 16 bits
    segments: Array  # int64 [R, S]: kept weight of each 32 granules, of a row that carries no entries
    entry_logits: Array  # float32 [R, capacity]: of the support's token_ids, where those are defined
    log_scales: Array  # float64 [R, 2]: 1 / temperature and log of the total, of rows that verification has seen
    chunk_largest: Array  # uint32 [R, chunks]: the largest key of each chunk
    counts: Array  # int32 [R, BINS]: of the maxima; zero between calls
    scanned: Array  # int64 [R]: how many chunks have been scanned; zero between calls
    answered: Array  # int64 [R]: of gpu/verification/chain.py; zero between calls
    # Of gpu/verification/block.py: Told, float64 [R] zero between calls, float64, int64 and float32 [R].
    ratios: Array
    bounds: Array
    residuals: Array
    draft_logprobs: Array
    no_min_p: Array  # float32 [R]: zeros, for a call without min_p
    # Of rows that are weighed whole: see gpu/support/whole.py.
    parts: Array  # int64 [R, chunks, 4]
    sums: Array  # int64 [R, 10]: zero between calls
    tally: Array  # int32 [R, TALLIED]: zero between calls
    inside: Array  # int32 [R, 2, room]
    listed: Array  # int32 [R + 1]: 0 between calls
    estimates: Array  # float32 [R, chunks]
    known: Array  # int32 [R, chunks + 1]: of gpu/capture/spread.py; zero between calls


@dataclass(frozen=True)
class Support:
    """The kept set of R rows, filled by select_support.

    Arrays are NumPy's, or CuPy's where the logits are. A row whose count exceeds the capacity carries no entries;
    verify_chain, capture_masks and top_logprobs walk its logits again with the same cutoff and weights, so they
    find the same numbers.
    """

    status: Array  # uint8 [R]: OK or INVALID; the other fields of an INVALID row are 0, -1 or NaN
    maximum: Array  # float32 [R]: the largest logit
    cutoff: Array  # float32 [R]: the smallest kept logit
    total: Array  # uint64 [R]: the weight of the kept set; 2^44 is the weight of the maximum
    count: Array  # int32 [R]: how many tokens are kept, also where that exceeds the capacity
    argmax: Array  # int32 [R]: the lowest token id with the largest logit
    greedy: Array  # bool [R]: singleton rows
    token_ids: Array  # int32 [R, capacity]: ascending; the first count are defined, if they fit
    weights: Array  # uint64 [R, capacity]: of token_ids
    temperature: Array  # float32 [R]: as given
    walk: Walk | None = None  # on a device: what a walk of a large support reads

    @property
    def capacity(self) -> int:
        return self.token_ids.shape[1]

    def arrays(self) -> SupportArrays:
        """The fields for a kernel."""
        return SupportArrays(
            self.status, self.maximum, self.cutoff, self.total.view(np.int64), self.count, self.argmax,
            self.greedy, self.token_ids, self.weights.view(np.int64), self.temperature,
        )  # fmt: skip


def check_host_support(support: Support) -> None:
    """ValueError if the support was made of device arrays."""
    if support.walk is not None:
        raise ValueError("support=device arrays, expected a Support that select_support made of these NumPy logits")


def walk_of(support: Support) -> Walk:
    """What a support of device arrays has for walks; ValueError if it was made of host arrays."""
    if support.walk is None:
        raise ValueError("support=host arrays, expected a Support that select_support made of these CuPy logits")
    return support.walk


def check_support(support: Support, num_rows: int) -> None:
    """ValueError unless the support has this many rows."""
    if support.status.shape != (num_rows,):
        got = support.status.size
        raise ValueError(f"support rows={got}, expected {num_rows}, one for each row of logits")

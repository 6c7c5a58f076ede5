"""How many of its drafts a request has verified, chosen by the draft's confidences.

A verify row costs time, and a draft that will be rejected wastes it. A length may depend on the drafts only so far:
the event "draft k is verified" may depend on the drafts before k, never on draft k or a later one, for the row that
would test draft k draws its token afresh if it is the last. Confidence c_k is made from the tokens before draft k
(`model_loaders.drafts.Drafted`), so a rule may look at c_0..c_k to decide on draft k, and not at c_{k+1}, which has
seen draft k. Both rules here keep to that, and it is enough for drafts that are verified one by one and for those that
are verified as a block: a block's proof goes from its last rows to the first, and which row is the last is known from
the drafts before it (`gpu/verification/verify.py`). `tests/test_lengths.py` and `tests/test_blocks.py` enumerate it.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from numbers import Real
from typing import Any

import numpy as np
import torch

from pipeline.errors import InvalidRequest


@dataclass(frozen=True)
class ConfidenceThreshold:
    """Stop before the first draft whose confidence is below `threshold`, a number from 0 (all drafts) to 1.

    A request's length depends on its own drafts only, so its tokens don't depend on the batch.
    """

    threshold: float
    rule: str = field(default="confidence threshold", init=False)

    def __post_init__(self) -> None:
        value = self.threshold
        if isinstance(value, bool) or not isinstance(value, Real) or not 0 <= value <= 1:
            raise InvalidRequest(f"threshold={value!r}, expected a number from 0 to 1")

    def __call__(self, confidence: np.ndarray, most: np.ndarray) -> np.ndarray:
        """Drafts to verify, int32 [B], of confidence [B, D]; at most int [B] `most`."""
        sure = np.logical_and.accumulate(confidence >= self.threshold, axis=1)
        return np.minimum(sure.sum(axis=1), most).astype(np.int32)


@dataclass(frozen=True)
class ThroughputSchedule:
    """Admit drafts of the whole batch while the expected tokens a second go up.

    Draft k of a request survives with probability a_k = c_0 ... c_k. Drafts are taken in descending a_k (equal ones:
    smaller k, then smaller slot), each adding a_k tokens and one verify row; the first that doesn't raise
    ``expected tokens / seconds(rows)`` ends it. Because a request's a_k descend and the search never looks past the
    draft in question, whether draft k is admitted depends on nothing that has seen it. (The best of all stopping
    points would: it isn't exact.)

    The law of every request is kept, but which sample of it comes out depends on the batch's other requests.

    Attributes:
        rows, seconds: The cost curve: what a forward over so many verify rows takes, in any unit of time; rows ascend,
            seconds don't descend. Between points it is linear, beyond the last by the last slope. See `measure_cost`.
    """

    rows: Sequence[int]
    seconds: Sequence[float]
    rule: str = field(default="throughput schedule", init=False)

    def __post_init__(self) -> None:
        rows, seconds = np.asarray(self.rows, dtype=float), np.asarray(self.seconds, dtype=float)
        if rows.ndim != 1 or len(rows) < 2 or rows.shape != seconds.shape:
            raise InvalidRequest(
                f"rows={self.rows!r}, seconds={self.seconds!r}, expected two lists of one length, 2 or more"
            )
        if not (np.isfinite(rows).all() and rows[0] >= 1 and (np.diff(rows) > 0).all()):
            raise InvalidRequest(f"rows={self.rows!r}, expected ascending numbers of at least 1")
        if not (np.isfinite(seconds).all() and seconds[0] > 0 and (np.diff(seconds) >= 0).all()):
            raise InvalidRequest(f"seconds={self.seconds!r}, expected positive numbers that don't descend")
        object.__setattr__(self, "rows", tuple(int(x) for x in rows))
        object.__setattr__(self, "seconds", tuple(float(x) for x in seconds))

    def cost(self, rows: int) -> float:
        """The time of a forward over so many rows."""
        if rows > self.rows[-1]:
            slope = (self.seconds[-1] - self.seconds[-2]) / (self.rows[-1] - self.rows[-2])
            return self.seconds[-1] + slope * (rows - self.rows[-1])
        return float(np.interp(rows, self.rows, self.seconds))

    def __call__(self, confidence: np.ndarray, most: np.ndarray) -> np.ndarray:
        """Drafts to verify, int32 [B], of confidence [B, D]; at most int [B] `most`."""
        batch, width = confidence.shape
        survival = np.cumprod(np.nan_to_num(confidence.astype(np.float64)), axis=1)
        slot, index = np.divmod(np.arange(batch * width), max(width, 1))
        order = np.lexsort((slot, index, -survival.ravel()))
        lengths = np.zeros(batch, dtype=np.int32)
        tokens, rows = float(batch), batch
        for b, k in zip(slot[order], index[order], strict=True):
            if k >= most[b]:
                continue
            more = tokens + survival[b, k]
            if more * self.cost(rows) <= tokens * self.cost(rows + 1):
                break
            tokens, rows = more, rows + 1
            lengths[b] = k + 1
        return lengths


DraftLengths = ConfidenceThreshold | ThroughputSchedule


def measure_cost(
    target: Any, num_drafts: int, max_batch: int, *, context: int = 64, repeats: int = 5
) -> ThroughputSchedule:
    """A schedule by the measured cost of this target on this machine: forwards over 1 to max_batch * (num_drafts + 1)
    rows.

    Args:
        target: `model_loaders.Target`.
        num_drafts: Of the draft that it will be used with.
        max_batch: Requests decoded at once.
        context: Tokens before the rows.
        repeats: Each point is the fastest of so many forwards.
    """
    width = num_drafts + 1
    cache = target.new_cache(max_batch, context + width)
    fastest: dict[int, float] = {}
    shapes = {(1, w) for w in range(1, width + 1)} | {(max_batch, w) for w in range(1, width + 1)}
    for batch, wide in sorted(shapes):
        ids = torch.zeros(batch, wide, dtype=torch.int64, device=target.device)
        positions = context + torch.arange(wide, device=target.device).expand(batch, -1)
        times = []
        for _ in range(repeats + 1):  # the first warms up
            started = time.perf_counter()
            target.forward(ids, positions, cache, kv_length=context + width)
            if target.device.type == "cuda":
                torch.cuda.synchronize(target.device)
            times.append(time.perf_counter() - started)
        fastest[batch * wide] = min([*times[1:], fastest.get(batch * wide, np.inf)])
    rows = sorted(fastest)
    # More rows can't be faster; where they were measured so, it was noise.
    return ThroughputSchedule(rows, np.maximum.accumulate([fastest[n] for n in rows]).tolist())

"""Capture: the support of every committed token, as it was used to verify.

Each committed row of a wanted request gives its kept token ids and their log-probabilities, up to the first row
that fails: one larger than max_support (OVERFLOW) or the one that made the request INVALID. A mask is complete or
absent, and who knows where the output ends decides whether the failing row belongs to it.
"""

from dataclasses import dataclass

import numpy as np

from gpu import status
from gpu.checks import check_array
from gpu.logit_rows import logit_rows
from gpu.packing import pack_masks
from gpu.support import Support, check_support
from gpu.verification import Verdict


@dataclass(frozen=True)
class Capture:
    """Masks of B requests in CSR, filled by capture_masks.

    Request b's committed token i has row r = row_start[b] + i and entries offsets[r]:offsets[r + 1].
    """

    status: np.ndarray  # uint8 [B]: OK, or OVERFLOW or INVALID of failed_row; OK for an unwanted request
    failed_row: np.ndarray  # int32 [B]: the first row (0..W-1) that has no mask though reached, else -1
    counts: np.ndarray  # int32 [B, W]: true support size of each committed row of a wanted request, else 0
    row_start: np.ndarray  # int64 [B+1]: rows before request b
    offsets: np.ndarray  # int64 [rows+1]: entries before each row
    token_ids: np.ndarray  # int32 [nnz]: ascending within a row
    logprobs: np.ndarray  # float32 [nnz]: under the row's policy


def capture_masks(
    logits: np.ndarray, support: Support, verdict: Verdict, wanted: np.ndarray, max_support: int
) -> Capture:
    """The masks of what `verdict` committed.

    logits [B, W, V] and support: as given to verify_chain. wanted bool [B]. max_support: the largest support
    that may be captured, at least 1. Nothing is read for an unwanted request. ValueError for wrong shapes.
    """
    batch, width = verdict.tokens.shape
    wanted = check_array("wanted", wanted, np.bool_, (batch,))
    if max_support < 1:
        raise ValueError(f"max_support={max_support}, expected at least 1")
    statuses, failed_row = np.full(batch, status.OK, np.uint8), np.full(batch, -1, np.int32)
    counts = np.zeros((batch, width), np.int32)
    row_start = np.zeros(batch + 1, np.int64)
    if not wanted.any():
        nothing = np.empty(0, np.int32), np.empty(0, np.float32)
        return Capture(statuses, failed_row, counts, row_start, np.zeros(1, np.int64), *nothing)
    rows = logit_rows(logits, 3)
    if logits.shape[:2] != (batch, width):
        raise ValueError(f"logits={logits.shape}, expected ({batch}, {width}, V), as in verdict.tokens")
    check_support(support, batch * width)
    committed = wanted[:, None] & (np.arange(width) < verdict.num_committed[:, None])
    counts[committed] = support.count.reshape(batch, width)[committed]
    invalid = wanted & (verdict.status == status.INVALID)
    statuses[invalid], failed_row[invalid] = status.INVALID, verdict.error_row[invalid]
    too_large = counts > max_support
    overflow = too_large.any(1)  # such a row is committed, so it comes before an INVALID one
    statuses[overflow], failed_row[overflow] = status.OVERFLOW, too_large.argmax(1)[overflow]
    packed = committed & ((failed_row < 0)[:, None] | (np.arange(width) < failed_row[:, None]))
    np.cumsum(packed.sum(1), out=row_start[1:])
    offsets = np.zeros(row_start[-1] + 1, np.int64)
    np.cumsum(counts[packed], out=offsets[1:])
    token_ids = np.empty(offsets[-1], np.int32)
    logprobs = np.empty(offsets[-1], np.float32)
    pack_masks(rows, support, np.flatnonzero(packed), offsets, token_ids, logprobs)
    return Capture(statuses, failed_row, counts, row_start, offsets, token_ids, logprobs)

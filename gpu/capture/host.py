"""Capture on the host: counts and offsets by NumPy, the entries by a kernel."""

import numpy as np

from gpu import status
from gpu.capture.packing import pack_masks
from gpu.capture.record import Capture
from gpu.checks import check_array
from gpu.logit_rows import logit_rows
from gpu.support import Support, check_host_support, check_support
from gpu.verification import Verdict


def capture(logits: np.ndarray, support: Support, verdict: Verdict, wanted: np.ndarray, max_support: int) -> Capture:
    """capture_masks of NumPy arrays."""
    batch, width = verdict.tokens.shape
    wanted = check_array("wanted", wanted, np.bool_, (batch,))
    statuses, failed_row = np.full(batch, status.OK, np.uint8), np.full(batch, -1, np.int32)
    counts = np.zeros((batch, width), np.int32)
    row_start = np.zeros(batch + 1, np.int64)
    if not wanted.any():
        nothing = np.empty(0, np.int32), np.empty(0, np.float32)
        return Capture(statuses, failed_row, counts, row_start, np.zeros(1, np.int64), *nothing)
    rows = logit_rows(logits, 3)
    if logits.shape[:2] != (batch, width):
        raise ValueError(f"logits={logits.shape}, expected ({batch}, {width}, V), as in verdict.tokens")
    check_host_support(support)
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

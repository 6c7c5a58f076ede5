"""The captured masks."""

from dataclasses import dataclass

from gpu.arrays import Array


@dataclass(frozen=True)
class Capture:
    """Masks of B requests in CSR, filled by capture_masks.

    Request b's committed token i has row r = row_start[b] + i and entries offsets[r]:offsets[r + 1].
    """

    status: Array  # uint8 [B]: OK, or OVERFLOW or INVALID of failed_row; OK for an unwanted request
    failed_row: Array  # int32 [B]: the first row (0..W-1) that has no mask though reached, else -1
    counts: Array  # int32 [B, W]: true support size of each committed row of a wanted request, else 0
    row_start: Array  # int64 [B+1]: rows before request b
    offsets: Array  # int64 [rows+1], on a device [B*W+1]: entries before each row
    token_ids: Array  # int32 [nnz], on a device [room]: ascending within a row
    logprobs: Array  # float32, likewise: under the row's policy
    progress: Array | None = None  # int64 [2B+1], on a device: what blocks tell each other; zero between calls

"""What verification decides."""

from dataclasses import dataclass

from gpu.arrays import Array


@dataclass(frozen=True)
class Verdict:
    """What a round commits for B requests of W rows, filled by verify_chain."""

    num_accepted: Array  # int32 [B]: drafts kept
    num_committed: Array  # int32 [B]: num_accepted + 1, but error_row if INVALID
    tokens: Array  # int32 [B, W]: committed tokens, -1 past num_committed
    logprobs: Array  # float32 [B, W]: of tokens under their rows' policies, NaN past num_committed
    status: Array  # uint8 [B]: OK or INVALID
    error_row: Array  # int32 [B]: the row (0..W-1) that made the request INVALID, else -1
    # float64 [B, W], where drafts were verified as a block: what each row's coin was held against (1 in row 0, which
    # has none), NaN behind the last row. None where they were verified one by one. On a device it is memory of the
    # Support, and doesn't travel in a RoundBuffer.
    bounds: Array | None = None

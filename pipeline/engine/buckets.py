"""The few shapes that rounds come in: each is captured once."""

from __future__ import annotations

KV_STEP = 64
"""Key lengths are multiples of it (`model_loaders.Target.forward` rounds up to them)."""


def slots_bucket(needed: int, most: int) -> int:
    """Slots that a round runs over: the next power of two of at least `needed`, at most `most`."""
    return min(1 << max(needed - 1, 0).bit_length(), most)


def kv_bucket(needed: int, most: int) -> int:
    """Keys that a round reads: at least `needed`, at most `most`; steps of a quarter to a half of the length.

    128, 192, 256, 384, 512, 768, 1,024, ...: short contexts don't pay for long ones, and a context that grows to
    4,096 meets eleven shapes.
    """
    length = 2 * KV_STEP
    while length < needed:
        length += length // 2 if length & (length - 1) == 0 else length // 3
    return min(length, most)


def top_bucket(wanted: int) -> int:
    """Log-probabilities that are taken of each row: the next power of two, 0 for none."""
    return 1 << (wanted - 1).bit_length() if wanted else 0

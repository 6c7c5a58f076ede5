"""Restriction to allowed tokens on the host: one row a thread."""

import numpy as np
from numba import njit, prange

from gpu.adjust.bits import BITS, name_of
from gpu.checks import check_array, check_range


@njit(nogil=True, parallel=True, cache=True)
def _restrict(logits, allowed, rows, magnitude, infinity, minus_infinity):
    width, vocabulary = logits.shape[1], logits.shape[2]
    for index in prange(logits.shape[0] * width):
        b, i = np.int64(index) // width, np.int64(index) % width  # prange counts in uint64
        if rows[b, i] < 0:
            continue
        mask = allowed[rows[b, i]]
        for word in range(mask.size):
            held = mask[word]
            if held == -1:
                continue
            first = word * 32
            for bit in range(min(32, vocabulary - first)):
                if not (held >> bit) & 1 and (logits[b, i, first + bit] & magnitude) < infinity:
                    logits[b, i, first + bit] = minus_infinity


def restrict(logits: np.ndarray, allowed: np.ndarray, rows: np.ndarray) -> None:
    """restrict_logits of NumPy arrays."""
    if not isinstance(logits, np.ndarray) or logits.ndim != 3:
        got = getattr(logits, "shape", type(logits).__name__)
        raise ValueError(f"logits={got}, expected a NumPy array of shape [B, W, V]")
    bits = BITS[name_of(logits.dtype)]
    batch, width, vocabulary = logits.shape
    num_masks = len(allowed) if isinstance(allowed, np.ndarray) else 0
    allowed = check_array("allowed", allowed, np.int32, (num_masks, -(-vocabulary // 32)))
    rows = check_array("rows", rows, np.int32, (batch, width))
    check_range("rows", rows, (rows >= -1) & (rows < num_masks), f"a mask below {num_masks}, or -1 for none")
    kind = bits.kind
    _restrict(
        logits.view(kind), allowed, rows, kind(bits.magnitude), kind(bits.infinity), kind(bits.minus_infinity)
    )  # fmt: skip

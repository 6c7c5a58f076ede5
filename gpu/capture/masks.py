"""Capture: the support of every committed token, as it was used to verify.

Each committed row of a wanted request gives its kept token ids and their log-probabilities, up to the first row
that fails: one larger than max_support (OVERFLOW) or the one that made the request INVALID. A mask is complete or
absent, and who knows where the output ends decides whether the failing row belongs to it.
"""

from gpu.arrays import Array, on_device
from gpu.capture import host
from gpu.capture.record import Capture
from gpu.support import Support
from gpu.verification import Verdict


def capture_masks(
    logits: Array, support: Support, verdict: Verdict, wanted: Array, max_support: int, *, out: Capture | None = None
) -> Capture:
    """The masks of what `verdict` committed.

    logits [B, W, V] and support: as given to verify_chain. wanted bool [B]. max_support: the largest support
    that may be captured, at least 1. Nothing is read for an unwanted request. ValueError for wrong shapes.

    On a device the arrays have a fixed size, room for every row at its largest, and `offsets` repeats the total past
    the last row; out: a Capture whose memory is used again, perhaps with less room. Offsets are true in any case: a
    row that ends beyond the room isn't written, and a call without `out` writes all again.
    """
    if max_support < 1:
        raise ValueError(f"max_support={max_support}, expected at least 1")
    if on_device(logits):
        from gpu.capture import device

        return device.capture(logits, support, verdict, wanted, max_support, out)
    if out is not None:
        raise ValueError("out=Capture, expected None for NumPy arrays: their masks have the size that they need")
    return host.capture(logits, support, verdict, wanted, max_support)

"""Rows restricted to allowed tokens, in place, from packed bitmasks: a grammar's, each row its own.

Bit t % 32 of word t // 32 of a mask is 1 where token t is allowed (the layout of xgrammar and llguidance). A logit
that isn't allowed becomes -inf; NaN and +inf stay, because a row that has one has no policy.
"""

from gpu.adjust import restrict_host
from gpu.arrays import Array, on_device


def restrict_logits(logits: Array, allowed: Array, rows: Array) -> None:
    """Restrict logits [B, W, V] (float32, float16, or bfloat16: ml_dtypes' or uint16 bits) in place.

    allowed int32 [N, ceil(V / 32)]: the masks. rows int32 [B, W]: the mask of a row, -1 for a row that stays as it is.
    ValueError for wrong shapes, dtypes or ranges.

    On a device all arrays are CuPy's, and rows aren't read before the launch: one outside 0..N-1 leaves its row alone.
    """
    if on_device(logits):
        from gpu.adjust import restrict_device

        restrict_device.restrict(logits, allowed, rows)
    else:
        restrict_host.restrict(logits, allowed, rows)

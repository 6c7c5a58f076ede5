"""The k most probable tokens of a row's policy: of an unfiltered row, over the full vocabulary."""

from gpu.arrays import Array, on_device
from gpu.support import Support
from gpu.top_tokens import host


def top_logprobs(
    logits: Array, support: Support, k: int, rows: Array, *, out: tuple[Array, Array] | None = None
) -> tuple[Array, Array]:
    """Ids int32 [N, k] and log-probabilities float32 [N, k] of the most probable tokens of `rows`.

    logits [R, V] or [B, W, V] with B*W = R, as given to select_support. rows int32 or int64 [N] in 0..R-1.
    Order: logit descending, token id ascending among equals. Padded with -1 and -inf where the support is
    smaller; an INVALID row is all padding. out: the two arrays to write to. ValueError for wrong shapes or ranges.

    On a device all arrays are CuPy's, k is at most 1024 (`gpu.MOST_TOP_ON_DEVICE`), the logits are the memory that
    select_support read, and the values of `rows` aren't checked: one out of range gives padding.
    """
    if k < 1:
        raise ValueError(f"k={k}, expected at least 1")
    if on_device(logits):
        from gpu.top_tokens import device

        return device.top(logits, support, k, rows, out)
    return host.top(logits, support, k, rows, out)

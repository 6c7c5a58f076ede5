"""A round: the policies of all rows, the verdicts of all requests, and the masks of what was committed."""

from gpu.arrays import Array, on_device
from gpu.capture import Capture, capture_masks
from gpu.support import FILTER_ORDERS, Support, select_support
from gpu.verification import Verdict, verify_chain


def run_round(
    logits: Array,
    temperature: Array,
    top_k: Array,
    top_p: Array,
    min_p: Array | None,
    draft_tokens: Array,
    num_drafts: Array,
    accept_uniforms: Array,
    draw_uniforms: Array,
    wanted: Array,
    max_support: int,
    draft_probs: Array | None = None,
    *,
    filter_order: str = "top_k_first",
    capacity: int,
    threshold_single: float = 1.0,
    threshold_acc: float = 1.0,
    whole_rows: bool = False,
    out: tuple[Support | None, Verdict | None, Capture | None] | None = None,
) -> tuple[Support, Verdict, Capture]:
    """select_support of logits [B, W, V] as [B*W, V], verify_chain, and capture_masks of what that committed.

    Arguments and results are theirs, bit for bit. On a device it is two launches, the one read of the logits and all
    the rest, or one for a few rows; with whole_rows there are four more. out: what an earlier call of the same shapes
    returned, whose memory is used again, None where there is none yet; CuPy arrays only. ValueError as theirs.
    """
    if logits.ndim != 3:
        raise ValueError(f"logits={logits.shape}, expected [B, W, V]")
    if on_device(logits):
        if filter_order not in FILTER_ORDERS:
            raise ValueError(f"filter_order={filter_order!r}, expected one of {FILTER_ORDERS}")
        for name, size in (("capacity", capacity), ("max_support", max_support)):
            if size < 1:
                raise ValueError(f"{name}={size}, expected at least 1")
        for name, value in (("threshold_single", threshold_single), ("threshold_acc", threshold_acc)):
            if not 0 < value <= 1:
                raise ValueError(f"{name}={value}, expected a number above 0 and at most 1")
        from gpu.rounds import device

        bounds = temperature, top_k, top_p, min_p, filter_order == "joint", capacity
        request = draft_tokens, num_drafts, accept_uniforms, draw_uniforms, draft_probs
        thresholds = float(threshold_single), float(threshold_acc)
        return device.run(logits, bounds, request, thresholds, wanted, max_support, whole_rows, out)
    if out is not None:
        raise ValueError(
            "out=(Support, Verdict, Capture), expected None for NumPy arrays: their masks have the size they need"
        )
    rows = logits.reshape(-1, logits.shape[-1])
    support = select_support(rows, temperature, top_k, top_p, min_p, filter_order=filter_order, capacity=capacity)
    verdict = verify_chain(
        logits, support, draft_tokens, num_drafts, accept_uniforms, draw_uniforms, draft_probs,
        threshold_single=threshold_single, threshold_acc=threshold_acc,
    )  # fmt: skip
    return support, verdict, capture_masks(logits, support, verdict, wanted, max_support)

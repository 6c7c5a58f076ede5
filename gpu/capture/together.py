"""Verification and capture of a round together: on a device in one launch, so that masks cost next to nothing."""

from gpu.arrays import Array, on_device
from gpu.capture.masks import capture_masks
from gpu.capture.record import Capture
from gpu.support import Support
from gpu.verification import Verdict, verify_chain


def verify_and_capture(
    logits: Array,
    support: Support,
    draft_tokens: Array,
    num_drafts: Array,
    accept_uniforms: Array,
    draw_uniforms: Array,
    wanted: Array,
    max_support: int,
    draft_probs: Array | None = None,
    *,
    out: tuple[Verdict, Capture] | None = None,
) -> tuple[Verdict, Capture]:
    """verify_chain, then capture_masks of what it committed; the same numbers, arguments and errors as theirs.

    out: what an earlier call of the same shapes returned, whose memory is used again (CuPy arrays only).
    """
    if max_support < 1:
        raise ValueError(f"max_support={max_support}, expected at least 1")
    coins = draft_tokens, num_drafts, accept_uniforms, draw_uniforms
    if on_device(logits):
        from gpu.capture import device

        return device.verify_and_capture(logits, support, *coins, wanted, max_support, draft_probs, (1.0, 1.0), out)
    if out is not None:
        raise ValueError("out=(Verdict, Capture), expected None for NumPy arrays: their masks have the size they need")
    verdict = verify_chain(logits, support, *coins, draft_probs)
    return verdict, capture_masks(logits, support, verdict, wanted, max_support)

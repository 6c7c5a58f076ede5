"""Chain verification on a device: one launch, no synchronisation."""

import numpy as np

from gpu.arrays import Array
from gpu.device.launch import pointer
from gpu.device.memory import check_device, device_logits, empty
from gpu.device.policy import support_arguments
from gpu.support import Support, check_support
from gpu.verification.chain import verify_kernel
from gpu.verification.record import Verdict


def allocate(batch: int, width: int) -> Verdict:
    """Room for a verdict."""
    return Verdict(
        num_accepted=empty((batch,), np.int32),
        num_committed=empty((batch,), np.int32),
        tokens=empty((batch, width), np.int32),
        logprobs=empty((batch, width), np.float32),
        status=empty((batch,), np.uint8),
        error_row=empty((batch,), np.int32),
    )


def verify(
    logits: Array,
    support: Support,
    draft_tokens: Array,
    num_drafts: Array,
    accept_uniforms: Array,
    draw_uniforms: Array,
    draft_probs: Array | None,
    threshold_single: float,
    threshold_acc: float,
    out: Verdict | None,
) -> Verdict:
    """verify_chain of CuPy arrays."""
    rows = device_logits(logits, 3)
    batch, width = logits.shape[:2]
    check_support(support, batch * width)
    check_device("draft_tokens", draft_tokens, np.int32, (batch, width - 1))
    check_device("num_drafts", num_drafts, np.int32, (batch,))
    check_device("accept_uniforms", accept_uniforms, np.float64, (batch, width))
    check_device("draw_uniforms", draw_uniforms, np.float64, (batch, width))
    if draft_probs is not None and draft_probs.shape != (batch, width - 1, rows.vocabulary):
        raise ValueError(f"draft_probs={draft_probs.shape}, expected shape {(batch, width - 1, rows.vocabulary)}")
    proposal = device_logits(draft_probs, 3, "draft_probs") if draft_probs is not None and width > 1 else None
    kernel = verify_kernel(rows.form.name, proposal.form.name if proposal else None)
    if not 1 <= width <= kernel.threads:
        raise ValueError(f"width={width}, expected 1..{kernel.threads} rows a request on a device")
    if out is None:
        out = allocate(batch, width)
    elif out.tokens.shape != (batch, width):
        raise ValueError(f"out={out.tokens.shape}, expected a Verdict of an earlier call with the same shapes")
    if batch == 0:
        return out
    of_proposal = (rows.words, 0, 0, 0)
    if proposal:
        of_proposal = (proposal.words, proposal.skew, proposal.request_step, proposal.row_step)
    kernel.launch(
        (batch,),
        *rows.arguments, *support_arguments(support),
        pointer(draft_tokens), pointer(num_drafts), pointer(accept_uniforms), pointer(draw_uniforms), *of_proposal,
        threshold_single, threshold_acc,
        pointer(out.num_accepted), pointer(out.num_committed), pointer(out.tokens), pointer(out.logprobs),
        pointer(out.status), pointer(out.error_row),
    )  # fmt: skip
    return out

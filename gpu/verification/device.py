"""Verification on a device: one launch, no synchronisation."""

from dataclasses import replace

import numpy as np

from gpu.arrays import Array, on_device
from gpu.device.launch import pointer
from gpu.device.memory import DeviceLogits, check_device, device_logits, empty
from gpu.draft_law import DENSE
from gpu.proposal.record import LogitsLaw
from gpu.support import Support, check_support
from gpu.support.policy import rows_argument
from gpu.support.record import walk_of
from gpu.verification.block import Told
from gpu.verification.chain import THREADS, Requests, Verdicts, verify_kernel
from gpu.verification.law import Laws, by_logits
from gpu.verification.record import Verdict
from gpu.verification.rule import verifies_block


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


def verdicts_argument(verdict: Verdict) -> Verdicts:
    """A verdict as the argument of a kernel."""
    return Verdicts(
        pointer(verdict.num_accepted), pointer(verdict.num_committed), pointer(verdict.tokens),
        pointer(verdict.logprobs), pointer(verdict.status), pointer(verdict.error_row),
    )  # fmt: skip


def laws_argument(draft_probs: Array | LogitsLaw | None, rows: DeviceLogits, unread: Array) -> tuple[Laws, str | None]:
    """The laws as the argument of a kernel, and their format; None where there are none, and nothing is read."""
    if not isinstance(draft_probs, LogitsLaw):
        dense = None if draft_probs is None else device_logits(draft_probs, 3, "draft_probs")
        u = pointer(unread)
        return Laws((dense or rows).argument, u, u, u, u, u, u, DENSE), dense.form.name if dense else None
    of_draft = device_logits(draft_probs.logits, 3, "draft_probs.logits")
    parts = {
        name: pointer(check_device(f"draft_probs.{name}", values, dtype, shape))
        for name, (values, dtype, shape) in draft_probs.parts().items()
    }
    laws = Laws(
        of_draft.argument, parts["drawn"], parts["maximum"], parts["cutoff"], parts["scale"], parts["share"],
        parts.get("token_ids", parts.get("entry_of", pointer(unread))), draft_probs.how,
    )  # fmt: skip
    return laws, by_logits(of_draft.form.name)


def requests_argument(
    rows: DeviceLogits,
    logits: Array,
    support: Support,
    draft_tokens: Array,
    num_drafts: Array,
    accept_uniforms: Array,
    draw_uniforms: Array,
    draft_probs: Array | LogitsLaw | None,
    threshold_single: float,
    threshold_acc: float,
    out: Verdict | None,
) -> tuple[Verdict, Requests, str | None, bool]:
    """Room for the verdict, what verification reads as the argument of a kernel, the format of the laws, whether the
    drafts are verified as a block."""
    batch, width = logits.shape[:2]
    check_support(support, batch * width)
    check_device("draft_tokens", draft_tokens, np.int32, (batch, width - 1))
    check_device("num_drafts", num_drafts, np.int32, (batch,))
    check_device("accept_uniforms", accept_uniforms, np.float64, (batch, width))
    check_device("draw_uniforms", draw_uniforms, np.float64, (batch, width))
    expected = (batch, width - 1, rows.vocabulary)
    if draft_probs is not None and getattr(draft_probs, "shape", None) != expected:
        got = getattr(draft_probs, "shape", type(draft_probs).__name__)
        raise ValueError(f"draft_probs={got}, expected a CuPy array of shape {expected}, or a LogitsLaw of that shape")
    if not 1 <= width <= THREADS:
        raise ValueError(f"width={width}, expected 1..{THREADS} rows a request on a device")
    if out is None:
        out = allocate(batch, width)
    elif out.tokens.shape != (batch, width) or not on_device(out.tokens):
        raise ValueError(f"out={out.tokens.shape}, expected a Verdict of an earlier call with the same shapes")
    laws, proposal_name = laws_argument(draft_probs if width > 1 else None, rows, num_drafts)
    as_block = width > 1 and verifies_block(draft_probs, threshold_single, threshold_acc)
    walk = walk_of(support)
    told = Told(
        pointer(walk.ratios), pointer(walk.bounds), pointer(walk.residuals), pointer(walk.draft_logprobs)
    )  # fmt: skip
    requests = Requests(
        pointer(draft_tokens), pointer(num_drafts), pointer(accept_uniforms), pointer(draw_uniforms),
        laws, told, threshold_single, threshold_acc,
    )  # fmt: skip
    out = replace(out, bounds=walk.bounds.reshape(batch, width) if as_block else None)
    return out, requests, proposal_name, as_block


def verify(
    logits: Array,
    support: Support,
    draft_tokens: Array,
    num_drafts: Array,
    accept_uniforms: Array,
    draw_uniforms: Array,
    draft_probs: Array | LogitsLaw | None,
    threshold_single: float,
    threshold_acc: float,
    out: Verdict | None,
) -> Verdict:
    """verify_chain of CuPy arrays."""
    rows = device_logits(logits, 3)
    out, requests, proposal_name, as_block = requests_argument(
        rows, logits, support, draft_tokens, num_drafts, accept_uniforms, draw_uniforms, draft_probs,
        threshold_single, threshold_acc, out,
    )  # fmt: skip
    if logits.shape[0]:
        of_rows = rows_argument(support)
        verify_kernel(rows.form.name, proposal_name, as_block).launch(
            (rows.num_rows,),
            rows.argument, of_rows, requests, verdicts_argument(out), pointer(walk_of(support).answered),
        )  # fmt: skip
    return out

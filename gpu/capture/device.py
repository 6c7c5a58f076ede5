"""Capture on a device: one launch, no synchronisation, into room that the caller can keep."""

import numpy as np

from gpu.arrays import Array, on_device
from gpu.capture.kernel import capture_kernel
from gpu.capture.pack import Captures
from gpu.capture.record import Capture
from gpu.device.launch import pointer
from gpu.device.memory import check_device, device_logits, empty, zeros
from gpu.support import Support, check_support
from gpu.support.policy import rows_argument
from gpu.verification import Verdict
from gpu.verification.device import verdicts_argument


def new_progress(batch: int) -> Array:
    """What the blocks of a launch tell each other: see gpu/capture/request.py."""
    return zeros((2 * batch + 1,), np.int64)


def allocate(batch: int, width: int, room: int) -> Capture:
    """A Capture on the device with room for this many entries."""
    return Capture(
        status=empty((batch,), np.uint8),
        failed_row=empty((batch,), np.int32),
        counts=empty((batch, width), np.int32),
        row_start=empty((batch + 1,), np.int64),
        offsets=empty((batch * width + 1,), np.int64),
        token_ids=empty((room,), np.int32),
        logprobs=empty((room,), np.float32),
        progress=new_progress(batch),
    )


def captures_argument(wanted: Array, max_support: int, out: Capture) -> Captures:
    """A capture as the argument of a kernel."""
    return Captures(
        pointer(wanted), max_support, out.token_ids.size, pointer(out.status), pointer(out.failed_row),
        pointer(out.counts), pointer(out.row_start), pointer(out.offsets), pointer(out.token_ids),
        pointer(out.logprobs), pointer(out.progress),
    )  # fmt: skip


def check_capture(out: Capture | None, batch: int, width: int, room: int) -> Capture:
    """`out` if it fits, or a new one."""
    if out is None:
        return allocate(batch, width, room)
    if out.counts.shape != (batch, width) or out.offsets.shape != (batch * width + 1,) or not on_device(out.counts):
        raise ValueError(f"out={out.counts.shape}, expected a Capture for {batch} requests of {width} rows")
    return out


def capture(
    logits: Array, support: Support, verdict: Verdict, wanted: Array, max_support: int, out: Capture | None
) -> Capture:
    """capture_masks of CuPy arrays."""
    rows = device_logits(logits, 3)
    batch, width = verdict.tokens.shape
    check_device("wanted", wanted, np.bool_, (batch,))
    check_device("verdict.tokens", verdict.tokens, np.int32, (batch, width))
    if logits.shape[:2] != (batch, width):
        raise ValueError(f"logits={logits.shape}, expected ({batch}, {width}, V), as in verdict.tokens")
    check_support(support, batch * width)
    out = check_capture(out, batch, width, batch * width * min(max_support, rows.vocabulary))
    if batch == 0:
        return out
    capture_kernel(rows.form.name).launch(
        (batch * width,),
        rows.argument, rows_argument(support), batch, verdicts_argument(verdict),
        captures_argument(wanted, max_support, out),
    )  # fmt: skip
    return out

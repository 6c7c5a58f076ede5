"""A round on a device: two launches, five where rows are weighed whole; no synchronisation."""

import numpy as np

from gpu.arrays import Array
from gpu.capture import Capture
from gpu.capture import device as capture
from gpu.capture.request import MAX_WIDTH
from gpu.capture.spread import spread_kernel
from gpu.device.branch import branch, can_branch, join
from gpu.device.launch import pointer
from gpu.device.memory import DeviceLogits, check_device, device_logits
from gpu.rounds.kernel import round_kernel
from gpu.support import Support
from gpu.support import device as support_device
from gpu.support.policy import rows_argument
from gpu.support.whole import whole_argument
from gpu.verification import Verdict
from gpu.verification import device as verification

# Rows and bytes of logits from which on a graph's round is one of two halves: the first half's filter, whose blocks
# wait for memory rather than use it, runs while the second half is read. Of 256 rows of 248,320 that should hide about
# 10 us of 65, a gap of 1.5 us between the scans deducted.
_MANY_ROWS, _MANY_BYTES = 128, 64 << 20


def _in_halves(rows: DeviceLogits) -> bool:
    num_bytes = rows.num_rows * rows.vocabulary * 16 // rows.form.lanes
    return rows.num_rows >= _MANY_ROWS and num_bytes >= _MANY_BYTES and can_branch()


def run(
    logits: Array,
    bounds: tuple[Array, Array, Array, Array | None, bool, int],
    request: tuple[Array, Array, Array, Array, Array | None],
    thresholds: tuple[float, float],
    wanted: Array,
    max_support: int,
    whole_rows: bool,
    out: tuple[Support | None, Verdict | None, Capture | None] | None,
) -> tuple[Support, Verdict, Capture]:
    """run_round of CuPy arrays: up to MAX_WIDTH rows a request one launch behind the filter's first, else three."""
    rows = device_logits(logits, 3)
    batch, width, _ = logits.shape
    support, verdict, masks = out or (None, None, None)
    check_device("wanted", wanted, np.bool_, (batch,))
    if width > MAX_WIDTH or batch == 0:
        flat = logits.reshape(batch * width, rows.vocabulary)
        support = support_device.select(flat, *bounds, whole_rows, support)
        verdict = verification.verify(logits, support, *request, *thresholds, verdict)
        return support, verdict, capture.capture(logits, support, verdict, wanted, max_support, masks)
    support, marks, of_filter = support_device.filter_arguments(rows, *bounds, support)
    verdict, requests, proposal_name = verification.requests_argument(
        rows, logits, support, *request, *thresholds, verdict
    )
    masks = capture.check_capture(masks, batch, width, batch * width * min(max_support, rows.vocabulary))
    of_rows, whole = rows_argument(support), whole_argument(support_device.walk_of(support))
    captures = capture.captures_argument(wanted, max_support, masks)

    def finish(begin: int, end: int) -> None:
        round_kernel(rows.form.name, proposal_name, whole_rows).launch(
            (end - begin,),
            rows.argument, marks, of_filter, of_rows, *((whole,) if whole_rows else ()), begin, batch, requests,
            verification.verdicts_argument(verdict), captures,
        )  # fmt: skip

    half = batch // 2 * width if not whole_rows and _in_halves(rows) else 0
    if half:  # behind all checks: a scan that nothing follows would spoil the next
        support_device.scan(rows, marks, 0, half)
        with branch():
            finish(0, half)
    support_device.scan(rows, marks, half)
    if whole_rows:
        support_device.weigh(rows, marks, of_filter, of_rows, whole)
    if half:
        join()
    finish(half, rows.num_rows)
    if whole_rows and masks.token_ids.size > support.capacity:  # else no row without entries has room
        spread_kernel(rows.form.name).launch(
            (batch * width * marks.chunks,),
            rows.argument, of_rows, marks.chunks, captures, pointer(support_device.walk_of(support).known),
        )  # fmt: skip
    return support, verdict, masks

"""A round on a device: one or two launches, four more where rows may have to be weighed whole; it never waits."""

import numpy as np

from gpu.arrays import Array
from gpu.capture import Capture
from gpu.capture import device as capture
from gpu.capture.request import MAX_WIDTH
from gpu.capture.spread import spread_kernel
from gpu.device.launch import pointer, resident_blocks
from gpu.device.memory import check_device, device_logits
from gpu.rounds.kernel import round_kernel
from gpu.support import Support
from gpu.support import device as support_device
from gpu.support.policy import rows_argument
from gpu.support.record import walk_of
from gpu.support.whole import whole_argument
from gpu.verification import Verdict
from gpu.verification import device as verification


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
    """run_round of CuPy arrays: up to MAX_WIDTH rows a request in one kernel, else in three."""
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
    verdict, requests, proposal_name, as_block = verification.requests_argument(
        rows, logits, support, *request, *thresholds, verdict
    )
    masks = capture.check_capture(masks, batch, width, batch * width * min(max_support, rows.vocabulary))
    of_rows, whole = rows_argument(support), whole_argument(walk_of(support))
    # Behind all checks: a scan that nothing follows would spoil the next.
    begun = support_device.Start(False, (rows.num_rows,))
    if whole_rows:
        support_device.weigh_rows(rows, marks, of_filter, of_rows, whole)
    else:
        begun = support_device.start(rows, marks)
    captures = capture.captures_argument(wanted, max_support, masks)
    round_kernel(rows.form.name, proposal_name, as_block, whole_rows, begun.scans).launch(
        begun.grid,
        rows.argument, marks, of_filter, of_rows, *((whole,) if whole_rows else ()), batch, requests,
        verification.verdicts_argument(verdict), captures,
    )  # fmt: skip
    if whole_rows and masks.token_ids.size > support.capacity:  # else no row without entries has room
        spread_kernel(rows.form.name).launch(
            (min(rows.num_rows * marks.chunks, resident_blocks()),),
            rows.argument, of_rows, marks.chunks, captures, pointer(walk_of(support).known), rows.num_rows,
        )  # fmt: skip
    return support, verdict, masks

"""The draw on a device: one or two launches, three more where rows may have to be weighed whole; it never waits."""

from dataclasses import replace

import numpy as np

from gpu.arrays import Array, on_device
from gpu.device.launch import pointer
from gpu.device.memory import check_device, device_logits, empty
from gpu.proposal.kernel import Drafts, draw_kernel
from gpu.proposal.record import Drawn
from gpu.support import Support
from gpu.support import device as support_device
from gpu.support.gather import CANDIDATES
from gpu.support.policy import rows_argument
from gpu.support.record import walk_of
from gpu.support.whole import whole_argument


def _allocate(index: Array, support: Support) -> Drawn:
    shape = index.shape
    return Drawn(
        index=index,
        maximum=empty(shape, np.float32),
        cutoff=empty(shape, np.float32),
        scale=empty((*shape, 2), np.float32),
        share=empty(shape, np.float64),
        support=support,
    )


def draw(
    logits: Array,
    temperature: Array,
    top_k: Array,
    top_p: Array,
    min_p: Array,
    joint: bool,
    capacity: int,
    uniforms: Array,
    index: Array,
    first: int,
    whole_rows: bool,
    out: Drawn | None,
) -> Drawn:
    """draw_drafts of CuPy arrays."""
    rows = device_logits(logits, 3)
    check_device("index", index, np.int64, (logits.shape[0], index.shape[-1]))
    check_device("uniforms", uniforms, np.float64, index.shape)
    if out is not None and (out.share.shape != index.shape or not on_device(out.share)):
        raise ValueError(f"out={out.share.shape}, expected a Drawn of an earlier call with the same shapes")
    own = None if out is None else out.support
    support, marks, of_filter = support_device.filter_arguments(
        rows, temperature, top_k, top_p, min_p, joint, capacity, own
    )
    drawn = _allocate(index, support) if out is None else replace(out, index=index, support=support)
    if rows.num_rows == 0:
        return drawn
    drafts = Drafts(
        pointer(index), pointer(drawn.maximum), pointer(drawn.cutoff), pointer(drawn.scale),
        pointer(drawn.share), pointer(uniforms), index.shape[1], first,
    )  # fmt: skip
    whole_rows = whole_rows and rows.vocabulary > CANDIDATES  # a block sees so few at a glance
    of_rows, whole = rows_argument(support), whole_argument(walk_of(support))
    # Behind all checks: a scan that nothing follows would spoil the next.
    begun = support_device.Start(False, (rows.num_rows,))
    if whole_rows:
        support_device.weigh_rows(rows, marks, of_filter, of_rows, whole)
    else:
        begun = support_device.start(rows, marks)
    draw_kernel(rows.form.name, whole_rows, begun.scans).launch(
        begun.grid, rows.argument, marks, of_filter, of_rows, *((whole,) if whole_rows else ()), drafts
    )
    return drawn

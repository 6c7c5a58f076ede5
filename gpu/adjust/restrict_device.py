"""Restriction to allowed tokens on a device: one launch, no synchronisation."""

import numpy as np

from gpu.adjust.bits import BITS, name_of
from gpu.adjust.device import in_place
from gpu.adjust.restrict_kernel import WORDS, restrict_kernel
from gpu.arrays import Array
from gpu.device.launch import pointer
from gpu.device.memory import check_device, device_logits


def restrict(logits: Array, allowed: Array, rows: Array) -> None:
    """restrict_logits of CuPy arrays."""
    view, name = device_logits(logits, 3), name_of(logits.dtype)
    batch, width, vocabulary = logits.shape
    num_words = -(-vocabulary // 32)
    check_device("allowed", allowed, np.int32, (len(allowed), num_words))
    check_device("rows", rows, np.int32, (batch, width))
    if logits.size == 0 or len(allowed) == 0:
        return
    restrict_kernel(name).launch(
        (batch * width, -(-num_words // WORDS)),
        in_place(logits, view, BITS[name].kind), view.request_step, view.row_step, width, vocabulary,
        pointer(allowed), num_words, len(allowed), pointer(rows),
    )  # fmt: skip

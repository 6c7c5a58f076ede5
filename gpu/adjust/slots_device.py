"""Penalties, biases and bans of slots on a device: one launch, no synchronisation."""

import numpy as np

from gpu.adjust.device import check_drafts, check_penalties, in_place
from gpu.adjust.record import SlotHistory
from gpu.adjust.slots_kernel import slots_kernel
from gpu.arrays import Array, on_device
from gpu.device.launch import pointer
from gpu.device.memory import check_device, device_logits


def adjust(
    logits: Array,
    draft_tokens: Array,
    num_drafts: Array,
    history: SlotHistory,
    repetition_penalty: Array | None,
    frequency_penalty: Array | None,
    presence_penalty: Array | None,
    out: Array,
) -> None:
    """adjust_logits of CuPy arrays with a SlotHistory."""
    view = device_logits(logits, 3)
    batch, width, vocabulary = logits.shape
    check_drafts(draft_tokens, num_drafts, batch, width)
    given, penalties = check_penalties(
        batch, repetition_penalty, frequency_penalty, presence_penalty, pointer(num_drafts)
    )  # fmt: skip
    fields = [
        pointer(check_device(f"history.{name}", value, dtype, shape))
        for name, value, dtype, shape in (
            ("words", history.words, np.int32, (batch, vocabulary)),
            ("bias", history.bias, np.float32, (batch, vocabulary)),
            ("generated", history.generated, np.int64, (batch,)),
            ("min_new_tokens", history.min_new_tokens, np.int64, (batch,)),
        )
    ]
    if not on_device(out) or out.dtype != np.float32 or out.shape != logits.shape:
        got = f"{out.dtype}{list(out.shape)}" if hasattr(out, "dtype") else type(out).__name__
        raise ValueError(f"out={got}, expected a CuPy array float32{list(logits.shape)}")
    written = device_logits(out, 3, "out")
    if logits.size == 0:
        return
    target = in_place(out, written, np.float32, "out")
    kernel = slots_kernel(view.form.name)
    kernel.launch(
        (-(-vocabulary // kernel.threads), batch),
        view.words, view.skew, view.request_step, view.row_step, target, written.request_step, written.row_step,
        width, vocabulary, pointer(draft_tokens), pointer(num_drafts), given, *fields, *penalties,
    )  # fmt: skip

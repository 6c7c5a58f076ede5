"""Penalties and bias on a device: one launch, no synchronisation."""

from typing import Any

import numpy as np

from gpu.adjust.kernel import HAS_BIAS, HAS_FREQUENCY, HAS_HISTORY, HAS_PRESENCE, HAS_REPETITION, adjust_kernel
from gpu.adjust.record import History, LogitBias
from gpu.arrays import Array
from gpu.device.instructions import SIMULATED
from gpu.device.launch import pointer
from gpu.device.memory import DeviceLogits, check_device, device_logits


def in_place(logits: Array, view: DeviceLogits, kind: type, name: str = "logits") -> Any:
    """The logits as a kernel of elements of this type writes them. ValueError for rows that share memory."""
    if any(step == 0 and length > 1 for step, length in zip(logits.strides, logits.shape, strict=True)):
        raise ValueError(f"{name}.strides={logits.strides}, expected rows of their own: they are written")
    if not SIMULATED:
        return logits.data.ptr
    span = (logits.shape[0] - 1) * view.request_step + (view.width - 1) * view.row_step + view.vocabulary
    size = logits.dtype.itemsize
    return np.lib.stride_tricks.as_strided(np.asarray(logits), (span,), (size,)).view(kind)


def _entries(name: str, ids: Array, **others: tuple[Array, type]) -> list[Any]:
    """Pointers to arrays of one length, and that length."""
    check_device(f"{name}.token_ids", ids, np.int32, (ids.size,))
    for field, (value, dtype) in others.items():
        check_device(f"{name}.{field}", value, dtype, (ids.size,))
    return [pointer(ids), *(pointer(value) for value, _ in others.values()), ids.size]


def check_drafts(draft_tokens: Array, num_drafts: Array, batch: int, width: int) -> None:
    """ValueError unless both are as `adjust_logits` takes them."""
    check_device("draft_tokens", draft_tokens, np.int32, (batch, width - 1))
    check_device("num_drafts", num_drafts, np.int32, (batch,))


def check_penalties(
    batch: int, repetition: Array | None, frequency: Array | None, presence: Array | None, nothing: Any
) -> tuple[int, list[Any]]:
    """Which of the three there are, as bits, and their pointers, `nothing` in place of one that isn't."""
    given, pointers = 0, []
    for bit, name, values in (
        (HAS_REPETITION, "repetition_penalty", repetition),
        (HAS_FREQUENCY, "frequency_penalty", frequency),
        (HAS_PRESENCE, "presence_penalty", presence),
    ):
        if values is not None:
            check_device(name, values, np.float32, (batch,))
            given |= bit
        pointers.append(nothing if values is None else pointer(values))
    return given, pointers


def adjust(
    logits: Array,
    draft_tokens: Array,
    num_drafts: Array,
    history: History | None,
    repetition_penalty: Array | None,
    frequency_penalty: Array | None,
    presence_penalty: Array | None,
    logit_bias: LogitBias | None,
) -> None:
    """adjust_logits of CuPy arrays."""
    if logits.dtype != np.float32:
        raise ValueError(f"logits.dtype={logits.dtype}, expected float32")
    view = device_logits(logits, 3)
    batch, width, vocabulary = logits.shape
    check_drafts(draft_tokens, num_drafts, batch, width)
    nothing = pointer(num_drafts)  # what isn't given isn't read
    given, penalties = check_penalties(batch, repetition_penalty, frequency_penalty, presence_penalty, nothing)
    seen = [nothing, nothing, nothing, 0]
    if history is not None:
        check_device("history.offsets", history.offsets, np.int64, (batch + 1,))
        check_device("history.in_prompt", history.in_prompt, np.bool_, (history.token_ids.size,))
        seen = [
            pointer(history.offsets),
            *_entries("history", history.token_ids, output_counts=(history.output_counts, np.int32)),
        ]
        given |= HAS_HISTORY
    biases = [nothing, nothing, nothing, 0]
    if logit_bias is not None:
        check_device("logit_bias.offsets", logit_bias.offsets, np.int64, (batch + 1,))
        biases = [
            pointer(logit_bias.offsets),
            *_entries("logit_bias", logit_bias.token_ids, values=(logit_bias.values, np.float32)),
        ]
        given |= HAS_BIAS
    if given in (0, HAS_HISTORY) or logits.size == 0:
        return
    adjust_kernel().launch(
        (batch * width,),
        in_place(logits, view, np.float32), view.request_step, view.row_step, width, vocabulary, pointer(draft_tokens),
        pointer(num_drafts), given, *seen, *penalties, *biases,
    )  # fmt: skip

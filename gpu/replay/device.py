"""Replay on a device: one launch a function, no synchronisation; nothing of [N, V] is allocated."""

from typing import Any

import numpy as np

from gpu.arrays import Array, on_device
from gpu.device.instructions import SIMULATED
from gpu.device.launch import pointer
from gpu.device.memory import check_device, empty
from gpu.replay.kernel import backward_kernel, log_softmax_kernel, sums_kernel

_VIEWS = {"float32": np.float32, "float64": np.float64, "float16": np.int16, "bfloat16": np.uint16}


def _rows(name: str, array: Array) -> tuple[str, tuple[Any, int, int]]:
    """The dtype's name, and what a kernel takes of [N, V]: pointer, elements from a row to the next, V."""
    if not on_device(array) or array.ndim != 2:
        got = getattr(array, "shape", type(array).__name__)
        raise ValueError(f"{name}={got}, expected a CuPy array of shape [R, V]")
    kind = "bfloat16" if array.dtype == np.uint16 else array.dtype.name
    if kind not in _VIEWS:
        raise ValueError(
            f"{name}.dtype={array.dtype}, expected float32, float64, float16, bfloat16, or uint16 with bfloat16 bits"
        )
    num_rows, vocabulary = array.shape
    size = array.dtype.itemsize
    row_step, token_step = array.strides
    row_step = row_step if num_rows > 1 else 0
    if (vocabulary > 1 and token_step != size) or row_step < 0 or row_step % size:
        raise ValueError(
            f"{name}.strides={array.strides}, expected adjacent tokens and forward rows: "
            f"pass cupy.ascontiguousarray({name})"
        )
    row_step //= size
    if not SIMULATED:
        return kind, (array.data.ptr, row_step, vocabulary)
    span = (num_rows - 1) * row_step + vocabulary if array.size else 0
    flat = np.lib.stride_tricks.as_strided(np.asarray(array).view(_VIEWS[kind]), (span,), (size,))
    return kind, (flat, row_step, vocabulary)


def _supports(token_ids: Array, offsets: Array, temperature: Array, num_rows: int) -> tuple[Any, ...]:
    """What a kernel takes of the supports."""
    num_entries = np.size(token_ids)
    check_device("token_ids", token_ids, np.int32, (num_entries,))
    check_device("offsets", offsets, np.int64, (num_rows + 1,))
    check_device("temperature", temperature, np.float64, (num_rows,))
    return pointer(token_ids), pointer(offsets), num_entries, pointer(temperature)


def _result(out: Array | None, shape: tuple[int, ...]) -> Array:
    return empty(shape, np.float64) if out is None else check_device("out", out, np.float64, shape)


def support_log_softmax(
    logits: Array, token_ids: Array, offsets: Array, temperature: Array, out: Array | None
) -> Array:
    """support_log_softmax of CuPy arrays."""
    kind, rows = _rows("logits", logits)
    supports = _supports(token_ids, offsets, temperature, len(logits))
    entries = _result(out, token_ids.shape)
    if token_ids.size:
        log_softmax_kernel(kind).launch((len(logits),), *rows, *supports, pointer(entries))
    return entries


def support_log_softmax_backward(
    entries: Array, grad_entries: Array, token_ids: Array, offsets: Array, temperature: Array, grad_logits: Array
) -> None:
    """support_log_softmax_backward of CuPy arrays."""
    kind, rows = _rows("grad_logits", grad_logits)
    if not grad_logits.flags.c_contiguous:
        raise ValueError("grad_logits=a view, expected a C-contiguous array that can be written")
    supports = _supports(token_ids, offsets, temperature, len(grad_logits))
    check_device("entries", entries, np.float64, token_ids.shape)
    check_device("grad_entries", grad_entries, np.float64, token_ids.shape)
    if token_ids.size:
        backward_kernel(kind).launch(
            (len(grad_logits),), *rows, *supports, pointer(entries), pointer(grad_entries)
        )  # fmt: skip


def row_sums(entries: Array, offsets: Array, out: Array | None) -> Array:
    """row_sums of CuPy arrays."""
    num_entries, num_rows = np.size(entries), np.size(offsets) - 1
    check_device("entries", entries, np.float64, (num_entries,))
    check_device("offsets", offsets, np.int64, (num_rows + 1,))
    sums = _result(out, (num_rows,))
    if num_rows:
        sums_kernel().launch((num_rows,), pointer(entries), pointer(offsets), num_entries, pointer(sums))
    return sums

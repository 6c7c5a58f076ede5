"""The most probable tokens on a device: one launch, no synchronisation."""

import numpy as np

from gpu.arrays import Array, on_device
from gpu.device.launch import pointer
from gpu.device.memory import check_device, device_logits, empty
from gpu.support import Support, check_support
from gpu.support.marks import marks_argument
from gpu.support.policy import rows_argument
from gpu.top_tokens.kernel import top_kernel
from gpu.top_tokens.limit import MOST_ON_DEVICE


def top(logits: Array, support: Support, k: int, rows: Array, out: tuple[Array, Array] | None) -> tuple[Array, Array]:
    """top_logprobs of CuPy arrays. The values of `rows` aren't read; one out of range gives padding."""
    view = device_logits(logits, 3 if logits.ndim == 3 else 2)
    check_support(support, view.num_rows)
    walk = support.walk
    if walk is None or walk.maxima.shape[1] < view.num_granules:
        raise ValueError(f"support.walk={walk}, expected a Support that select_support made of these CuPy logits")
    if k > MOST_ON_DEVICE:
        raise ValueError(f"k={k}, expected at most {MOST_ON_DEVICE} on a device")
    if not on_device(rows) or rows.dtype not in (np.int32, np.int64) or rows.ndim != 1:
        got = f"{rows.dtype}{list(rows.shape)}" if hasattr(rows, "dtype") else type(rows).__name__
        raise ValueError(f"rows={got}, expected a CuPy array int32 or int64 [N]")
    check_device("rows", rows, rows.dtype, rows.shape)
    shape = rows.size, k
    if out is None:
        out = empty(shape, np.int32), empty(shape, np.float32)
    top_ids = check_device("out[0]", out[0], np.int32, shape)
    top_values = check_device("out[1]", out[1], np.float32, shape)
    if rows.size == 0:
        return top_ids, top_values
    top_kernel(view.form.name, rows.dtype == np.int64).launch(
        (rows.size,),
        view.argument, rows_argument(support), marks_argument(walk), pointer(rows), view.num_rows, k,
        pointer(top_ids), pointer(top_values),
    )  # fmt: skip
    return top_ids, top_values

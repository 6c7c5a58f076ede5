"""What the one read of the logits leaves behind: a mark of every granule."""

from typing import Any, NamedTuple

from numba import int32, int64, types

from gpu.device.launch import pointer, pointer_to, record_of
from gpu.device.memory import view16
from gpu.support.record import Walk


class Marks(NamedTuple):
    """A Walk as kernels take it."""

    maxima: Any  # [R, stride]: the key of each granule's largest element, cut to 16 bits; as words
    halves: Any  # the same memory, one by one
    chunk_largest: Any  # [R, chunks]: the largest key of each chunk of a row
    counts: Any  # [R, BINS]: of the maxima; zero between calls
    scanned: Any  # [R]: how many chunks have been; zero between launches
    chunks: Any
    stride: Any


MARKS = record_of(
    Marks,
    pointer_to(types.uint32), pointer_to(types.uint16), pointer_to(types.uint32), pointer_to(int32),
    pointer_to(int64), int32, int32,
)  # fmt: skip


def marks_argument(walk: Walk) -> Marks:
    """A walk as the argument of a kernel."""
    return Marks(
        view16(walk.maxima), pointer(walk.maxima), pointer(walk.chunk_largest), pointer(walk.counts),
        pointer(walk.scanned), walk.chunk_largest.shape[1], walk.maxima.shape[1],
    )  # fmt: skip

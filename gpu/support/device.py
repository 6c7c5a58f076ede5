"""The filter on a device: one or two launches, three more where rows may have to be weighed whole; it never waits."""

from dataclasses import replace
from typing import Any, NamedTuple

import numpy as np

from gpu.arrays import Array
from gpu.device.block import WARP
from gpu.device.launch import pointer, resident_blocks
from gpu.device.memory import DeviceLogits, check_device, device_logits, empty, zeros
from gpu.support.bins import BINS
from gpu.support.limits import Filter
from gpu.support.marks import Marks, marks_argument
from gpu.support.narrow import narrow_kernel
from gpu.support.pick import pick_kernel
from gpu.support.pick_whole import pick_whole_kernel
from gpu.support.policy import Rows, rows_argument
from gpu.support.record import Support, Walk, walk_of
from gpu.support.scan import LOADS, scan_kernel
from gpu.support.settle import settle_kernel
from gpu.support.weigh import weigh_kernel
from gpu.support.whole import PARTS, SUMS, Whole, room_for, whole_argument
from gpu.support.window import TALLIED

_CHUNKS_A_PIECE = 4


def _fits(out: Support, num_rows: int, capacity: int, chunks: int, stride: int, segments: int) -> bool:
    walk = out.walk
    return (
        walk is not None
        and out.token_ids.shape == (num_rows, capacity)
        and walk.maxima.shape == (num_rows, stride)
        and walk.chunk_largest.shape == (num_rows, chunks)
        and walk.segments.shape == (num_rows, segments)
    )


def _allocate(
    num_rows: int, vocabulary: int, capacity: int, temperature: Array, chunks: int, stride: int, segments: int
) -> Support:
    return Support(
        status=empty((num_rows,), np.uint8),
        maximum=empty((num_rows,), np.float32),
        cutoff=empty((num_rows,), np.float32),
        total=empty((num_rows,), np.uint64),
        count=empty((num_rows,), np.int32),
        argmax=empty((num_rows,), np.int32),
        greedy=empty((num_rows,), np.bool_),
        token_ids=empty((num_rows, capacity), np.int32),
        weights=empty((num_rows, capacity), np.uint64),
        temperature=temperature,
        walk=Walk(
            maxima=empty((num_rows, stride), np.uint16),
            segments=empty((num_rows, segments), np.int64),
            entry_logits=empty((num_rows, capacity), np.float32),
            log_scales=empty((num_rows, 2), np.float64),
            chunk_largest=empty((num_rows, chunks), np.uint32),
            counts=zeros((num_rows, BINS), np.int32),
            scanned=zeros((num_rows,), np.int64),
            answered=zeros((num_rows,), np.int64),
            ratios=zeros((num_rows,), np.float64),
            bounds=empty((num_rows,), np.float64),
            residuals=empty((num_rows,), np.int64),
            draft_logprobs=empty((num_rows,), np.float32),
            no_min_p=zeros((num_rows,), np.float32),
            parts=empty((num_rows, chunks, PARTS), np.int64),
            sums=zeros((num_rows, SUMS), np.int64),
            tally=zeros((num_rows, TALLIED), np.int32),
            inside=empty((num_rows, 2, room_for(vocabulary)), np.int32),
            listed=zeros((num_rows + 1,), np.int32),
            estimates=empty((num_rows, chunks), np.float32),
            known=zeros((num_rows, chunks + 1), np.int32),
        ),
    )


def filter_arguments(
    rows: DeviceLogits,
    temperature: Array,
    top_k: Array,
    top_p: Array,
    min_p: Array | None,
    joint: bool,
    capacity: int,
    out: Support | None,
) -> tuple[Support, Marks, Filter]:
    """Room for the support, and what the kernels read as their arguments; launches nothing."""
    num_rows = rows.num_rows
    check_device("temperature", temperature, np.float32, (num_rows,))
    check_device("top_k", top_k, np.int32, (num_rows,))
    check_device("top_p", top_p, np.float32, (num_rows,))
    if min_p is not None:
        check_device("min_p", min_p, np.float32, (num_rows,))
    chunk = LOADS * scan_kernel(rows.form.name).threads // 2
    chunks = -(-rows.num_granules // chunk)
    stride, segments = chunks * chunk, -(-rows.num_granules // WARP)
    if out is None:
        out = _allocate(num_rows, rows.vocabulary, capacity, temperature, chunks, stride, segments)
    elif not _fits(out, num_rows, capacity, chunks, stride, segments):
        raise ValueError(
            f"out={out.token_ids.shape}, expected a Support of an earlier call with the same shapes and dtype"
        )
    out = replace(out, temperature=temperature)
    walk = walk_of(out)
    bounds = Filter(
        pointer(top_k), pointer(top_p), pointer(walk.no_min_p if min_p is None else min_p), int(joint)
    )  # fmt: skip
    return out, marks_argument(walk), bounds


class Start(NamedTuple):
    """How the kernel is launched that goes on with each row."""

    scans: bool  # it scans them too
    grid: tuple[int]


def start(rows: DeviceLogits, marks: Marks, *estimating: Any) -> Start:
    """Launch the scan, unless all of its blocks run at once: then the next kernel scans. The last kernel must follow.

    estimating: the three more arguments of a scan that estimates.
    """
    num_blocks = rows.num_rows * marks.chunks
    if num_blocks <= resident_blocks():
        return Start(True, (num_blocks,))
    scan_kernel(rows.form.name, bool(estimating)).launch((num_blocks,), rows.argument, marks, *estimating)
    return Start(False, (rows.num_rows,))


def weigh_rows(rows: DeviceLogits, marks: Marks, bounds: Filter, of_rows: Rows, whole: Whole) -> None:
    """Launch all but the last kernel where rows may have to be weighed whole; the last must follow."""
    begun = start(rows, marks, bounds, of_rows, whole)
    settle_kernel(rows.form.name, begun.scans).launch(begun.grid, rows.argument, marks, bounds, of_rows, whole)
    # As a rule there is nothing to do, and each block that leaves takes 2 ns: fewer where there are enough.
    chunks_a_piece = _CHUNKS_A_PIECE if rows.num_rows * marks.chunks > 6 * resident_blocks() else 1
    grid = (rows.num_rows * -(-marks.chunks // chunks_a_piece),)
    weigh_kernel(rows.form.name).launch(grid, rows.argument, marks, bounds, of_rows, whole, chunks_a_piece)
    narrow_kernel(rows.form.name).launch(grid, rows.argument, marks, of_rows, whole, chunks_a_piece)


def select(
    logits: Array,
    temperature: Array,
    top_k: Array,
    top_p: Array,
    min_p: Array | None,
    joint: bool,
    capacity: int,
    whole_rows: bool,
    out: Support | None,
) -> Support:
    """select_support of CuPy arrays."""
    rows = device_logits(logits, 2)
    out, marks, bounds = filter_arguments(rows, temperature, top_k, top_p, min_p, joint, capacity, out)
    if rows.num_rows:
        of_rows = rows_argument(out)
        if whole_rows:
            whole = whole_argument(walk_of(out))
            weigh_rows(rows, marks, bounds, of_rows, whole)
            pick_whole_kernel(rows.form.name).launch((rows.num_rows,), rows.argument, marks, bounds, of_rows, whole)
        else:
            begun = start(rows, marks)
            pick_kernel(rows.form.name, begun.scans).launch(begun.grid, rows.argument, marks, bounds, of_rows)
    return out

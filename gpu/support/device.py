"""The filter on a device: two launches, no synchronisation."""

from dataclasses import replace

import numpy as np

from gpu.arrays import Array
from gpu.device.block import WARP
from gpu.device.launch import pointer
from gpu.device.memory import check_device, device_logits, empty, view16, zeros
from gpu.device.vectors import BINS
from gpu.support.pick import pick_kernel
from gpu.support.record import Support, Walk
from gpu.support.scan import LOADS, scan_kernel


def _fits(out: Support, num_rows: int, capacity: int, chunks: int, stride: int, segments: int) -> bool:
    walk = out.walk
    return (
        walk is not None
        and out.token_ids.shape == (num_rows, capacity)
        and walk.maxima.shape == (num_rows, stride)
        and walk.chunk_largest.shape == (num_rows, chunks)
        and walk.segments.shape == (num_rows, segments)
    )


def _allocate(num_rows: int, capacity: int, temperature: Array, chunks: int, stride: int, segments: int) -> Support:
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
            chunk_largest=empty((num_rows, chunks), np.uint32),
            counts=zeros((num_rows, BINS), np.int32),
            no_min_p=zeros((num_rows,), np.float32),
        ),
    )


def select(
    logits: Array,
    temperature: Array,
    top_k: Array,
    top_p: Array,
    min_p: Array | None,
    joint: bool,
    capacity: int,
    out: Support | None,
) -> Support:
    """select_support of CuPy arrays."""
    rows = device_logits(logits, 2)
    num_rows = rows.num_rows
    check_device("temperature", temperature, np.float32, (num_rows,))
    check_device("top_k", top_k, np.int32, (num_rows,))
    check_device("top_p", top_p, np.float32, (num_rows,))
    if min_p is not None:
        check_device("min_p", min_p, np.float32, (num_rows,))
    scan, pick = scan_kernel(rows.form.name), pick_kernel(rows.form.name)
    chunk = LOADS * scan.threads // 2
    chunks = -(-rows.num_granules // chunk)
    stride, segments = chunks * chunk, -(-rows.num_granules // WARP)
    if out is None:
        out = _allocate(num_rows, capacity, temperature, chunks, stride, segments)
    elif not _fits(out, num_rows, capacity, chunks, stride, segments):
        raise ValueError(
            f"out={out.token_ids.shape}, expected a Support of an earlier call with the same shapes and dtype"
        )
    walk = out.walk
    assert walk is not None
    if min_p is None:
        min_p = walk.no_min_p
    if num_rows == 0:
        return replace(out, temperature=temperature)
    scan.launch(
        (chunks * num_rows,),
        *rows.arguments, chunks, pointer(walk.maxima), pointer(walk.chunk_largest), pointer(walk.counts),
    )  # fmt: skip
    pick.launch(
        (num_rows,),
        *rows.arguments, chunks, stride, view16(walk.maxima), pointer(walk.chunk_largest), pointer(walk.counts),
        pointer(temperature), pointer(top_k), pointer(top_p), pointer(min_p), int(joint), capacity,
        walk.segments.shape[1], pointer(out.status), pointer(out.maximum), pointer(out.cutoff), pointer(out.total),
        pointer(out.count), pointer(out.argmax), pointer(out.greedy), pointer(out.token_ids), pointer(out.weights),
        pointer(walk.segments),
    )  # fmt: skip
    return replace(out, temperature=temperature)

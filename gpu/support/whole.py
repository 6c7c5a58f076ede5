"""What is known of rows as a whole, for those that no finite top_k bounds: many blocks a row find it, one uses it.

Where the caller says that such rows may be there, the scan estimates what they weigh (gpu/support/estimate.py), and
three more kernels run between it and the pick:

0  settle   every row whose kept set is certain by that, and found among its largest: they are done; the others that are
            to be weighed are listed
1  weigh    mass, number, least and first of what is kept of each piece, and of the row; for a row with top_p a tally of
            every other logit by its distance from the maximum, from which follows a window in the order of the keys
            that should hold the crossing
2  narrow   of rows with a window: the mass and the number above it, and the elements in it

The pick then finds the crossing among these few. Where the window doesn't hold it (the tally is only a guess), or holds
more elements than fit, the pick walks the row itself: what comes out is the same. Masses and numbers are integers, so
no order of adding them up matters.
"""

from typing import Any, NamedTuple

import numpy as np
from numba import cuda, float32, int32, int64

from gpu.device.block import WARP
from gpu.device.instructions import warp_max_u32
from gpu.device.launch import pointer, pointer_to, record_of
from gpu.support.gather import CANDIDATES
from gpu.support.record import Walk

PARTS = 4  # of a piece of a row, int64: mass, number, least key, first token with the largest logit
# Of a row, int64, zero between calls: the same four of the row (mass 0: not weighed, SETTLED: there is no need);
TOTAL, COUNT, LEAST, FIRST = range(PARTS)
SETTLED = -1
# the window's keys (LOW 0: none), the mass and the number above it, the number in it; blocks that are done.
LOW, HIGH, ABOVE, NUM_ABOVE, NUM_INSIDE, DONE = range(PARTS, PARTS + 6)
SUMS = PARTS + 6


class Whole(NamedTuple):
    """The part of a Walk for these, as kernels take it."""

    parts: Any  # int64 [R, pieces, PARTS]
    sums: Any  # int64 [R, SUMS]
    tally: Any  # int32 [R, TALLIED]: zero between calls
    inside: Any  # int32 [R, 2, room]: keys and ids of the elements in the window
    listed: Any  # int32 [R + 1]: how many rows are to be weighed, and which, in any order; 0 between calls
    estimates: Any  # float32 [R, chunks]: of rows that need their mass, what a chunk weighs in units of its largest
    room: Any


WHOLE = record_of(
    Whole,
    pointer_to(int64), pointer_to(int64), pointer_to(int32), pointer_to(int32), pointer_to(int32),
    pointer_to(float32), int32,
)  # fmt: skip


def whole_argument(walk: Walk) -> Whole:
    """The argument of a kernel."""
    return Whole(
        pointer(walk.parts), pointer(walk.sums), pointer(walk.tally), pointer(walk.inside), pointer(walk.listed),
        pointer(walk.estimates), walk.inside.shape[2],
    )  # fmt: skip


def room_for(vocabulary: int) -> int:
    """How many elements of a window are kept a row: the pick has their keys where else it has keys and ids."""
    return min(2 * CANDIDATES, vocabulary)


class Piece(NamedTuple):
    """What a block takes of a row that is to be weighed."""

    row: Any  # int32, -1: none
    number: Any  # int32: which piece
    pieces: Any  # int32: of a row
    chunks: Any  # int32: of a piece


@cuda.jit(device=True)
def piece_of(marks, whole, chunks):
    """This block's, of `chunks` chunks, or of one where there are blocks enough; what was listed last comes first."""
    rows = np.int32(whole.listed[0])
    if rows * marks.chunks <= cuda.gridDim.x:
        chunks = np.int32(1)
    pieces = np.int32((marks.chunks + chunks - 1) // chunks)
    at = np.int32(rows * pieces - 1 - cuda.blockIdx.x)
    if at < 0:
        return Piece(np.int32(-1), np.int32(0), pieces, chunks)
    row = np.int32(np.uint32(at) // np.uint32(pieces))
    return Piece(np.int32(whole.listed[1 + row]), np.int32(at - row * pieces), pieces, chunks)


@cuda.jit(device=True)
def top_of(marks, index):
    """The largest key of a row; every lane of the warp takes part."""
    top = np.uint32(0)
    for i in range(cuda.laneid, marks.chunks, WARP):
        top = max(top, np.uint32(marks.chunk_largest[np.int64(index) * marks.chunks + i]))
    return warp_max_u32(top)


class Place(NamedTuple):
    """Where a thread reads its vectors of a piece of a row: a warp takes some that follow each other, a lane each."""

    vector: Any  # int64: the first one, counted from the words
    left: Any  # int32: how many vectors further the row goes
    first: Any  # int32: the token id of its first element
    granule: Any  # int32: the first granule of the warp, counted from the row's first


@cuda.jit(device=True)
def place_of(start, head, piece, per_thread, lanes, vocabulary):
    """This thread's place in a piece of a row that begins at `start`, `head` elements behind a granule's boundary.

    per_thread: vectors.
    """
    of_warp = np.int32(
        np.int32(np.int32(piece * cuda.blockDim.x) // WARP + cuda.threadIdx.x // WARP) * per_thread * WARP
    )
    vector = np.int32(of_warp + cuda.laneid)
    num_granules = np.int32(np.int32(head + vocabulary + 2 * lanes - 1) // (2 * lanes))
    index = np.int64(np.int64(start - head) // np.int64(lanes) + vector)
    return Place(
        index, np.int32(2 * num_granules - 1 - vector), np.int32(vector * lanes - head), np.int32(of_warp // 2)
    )  # fmt: skip


@cuda.jit(device=True)
def further(place, vectors, lanes):
    """The place so many vectors behind, an even number."""
    return Place(
        np.int64(place.vector + vectors), np.int32(place.left - vectors), np.int32(place.first + vectors * lanes),
        np.int32(place.granule + vectors // 2),
    )  # fmt: skip


@cuda.jit(device=True)
def vector_of(words, i):
    """The i-th vector of load_four's."""
    a0, a1, a2, a3, b0, b1, b2, b3, c0, c1, c2, c3, d0, d1, d2, d3 = words
    low0, low1, low2, low3 = (b0, b1, b2, b3) if i & 1 else (a0, a1, a2, a3)
    high0, high1, high2, high3 = (d0, d1, d2, d3) if i & 1 else (c0, c1, c2, c3)
    return (high0, high1, high2, high3) if i & 2 else (low0, low1, low2, low3)

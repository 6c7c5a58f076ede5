"""Reading for kernels that filter a row as soon as its last chunk has been read, while other blocks go on reading.

A block takes a span, the next chunks of a row, reads it and adds what it found to the row's marks; then it takes a
ticket of the row. Who takes the last one filters the row, and whatever else is to be done with it. Then it ends, and
the next block of the grid reads in its place: so no code leads from the filter back to the reading, whose registers it
would take (tried: each load went to local memory first).

Bytes under way: at 4.24 TB/s and an estimated 0.8 us of latency 26 KB a multiprocessor. A block of 512 threads has two
chunks, 64 KB, under way as it reads and none as it takes its ticket; one of two can read while the other filters.

**What is written and read again in one kernel.** Marks (maxima, counts, largest keys) are written before a barrier,
behind which the first thread takes a ticket that releases and acquires on the whole device; so who has the last ticket
of a row finds all its marks behind the next barrier, in spite of what an L1 held before, by any load that is coherent.
`load_kept`, `stored_maximum`, `top_of` and the counts in `bound` are, and so are the reads of what a filter leaves for
its request. Loads by `ld.global.nc` wouldn't be: tests/test_ptx_kernels.py finds none.

**Waiting.** Who decides a request waits for what earlier ones pack (gpu/capture/request.py). A counter hands spans out
in the order of the rows, so each of those requests' has gone to a block that runs or has run; and a block that filters,
decides or waits holds no span that it hasn't handed in. Hence what the earliest request that isn't known yet still
lacks is being worked on by blocks that wait for nobody, and by induction none waits for ever, however few blocks a
device runs at a time.
"""

from functools import lru_cache
from typing import Any, NamedTuple

import numpy as np
from numba import cuda, int32, int64, void

from gpu.device.instructions import add_at, take_ticket, warp_max_u32
from gpu.device.launch import Kernel, multiprocessors, record_of
from gpu.device.rows import LOGITS
from gpu.support.gather import SCRATCHES, SHARED, WORK
from gpu.support.limits import FILTER
from gpu.support.marks import MARKS
from gpu.support.pick import SCRATCH64, pick_of
from gpu.support.policy import ROWS
from gpu.support.scan import scan_of

THREADS = 512
BLOCKS = 2  # a multiprocessor
SPAN = 4  # chunks: by estimate a ticket, a number and the first load take 3 us, each further chunk half of one
BOX = 2  # int32 of shared memory that one thread leaves for all
_NEXT, _LAST = 0, 1
_REGISTERS = 65536  # of a multiprocessor


class Spans(NamedTuple):
    """What a block takes at a time: a span of chunks in early rows; in later ones a chunk, so that all end together."""

    size: Any  # of a span, in chunks: at most WARP
    a_row: Any  # spans of an early row
    early_rows: Any
    early: Any  # spans of all early rows
    total: Any  # of spans and single chunks
    asked: Any  # how often a block will have asked for one, when all are done


SPANS = record_of(Spans, *[int32] * len(Spans._fields))


def spans_of(num_rows: int, chunks: int, readers: int, size: int = SPAN) -> tuple[tuple[int], Spans]:
    """The grid, so that `readers` blocks can read at a time, and what they take.

    A block ends with the row that it filters, and the next one of the grid reads in its place. So all but num_rows
    blocks end by asking in vain.
    """
    early_rows, a_row = max(num_rows - -(-readers // chunks), 0), -(-chunks // size)
    early = early_rows * a_row
    total = early + (num_rows - early_rows) * chunks
    in_vain = min(readers, total)
    return (num_rows + in_vain,), Spans(size, a_row, early_rows, early, total, total + in_vain)


def readers_at_once() -> int:
    """How many blocks the current device has room for."""
    return BLOCKS * multiprocessors()


def registers_for(threads: int, blocks: int) -> int:
    """Registers a thread, for so many blocks of so many threads a multiprocessor."""
    return _REGISTERS // (threads * blocks) // 8 * 8


@lru_cache
def read_of(name: str, threads: int) -> Any:
    """A device function for logits of this dtype: (logits, marks, spans, num_rows, shared, box) -> row, or -1.

    Reads until it has read the last of a row, which is the caller's then, or until there is nothing left. shared: int32
    [gather.SHARED], box: int32 [BOX].
    """
    clear, open_reading, fetch, keys_of, record, leave, add_up = scan_of(name, threads, WORK, SCRATCHES)

    @cuda.jit(device=True)
    def hand_out(marks, num_rows):
        return np.int32(add_at(marks.tickets, np.int64(num_rows), np.int64(1)))

    @cuda.jit(device=True)
    def following(chunk, further, end, none):
        # A chunk further on in the span; behind that, one where nothing is read.
        chunk = np.int32(chunk + further)
        return chunk if chunk < end else none

    @cuda.jit(device=True)
    def read(logits, marks, spans, num_rows, shared, box):
        first_thread, chunks = cuda.threadIdx.x == 0, np.int32(marks.chunks)
        row, finished = np.int32(0), False
        clear(shared)
        if first_thread:
            box[_NEXT] = hand_out(marks, num_rows)
        cuda.syncthreads()
        number = np.int32(box[_NEXT])
        while number < spans.total and not finished:
            of_row, size, before = np.int32(spans.a_row), np.int32(spans.size), np.int32(0)
            if number >= spans.early:
                number, of_row, size, before = np.int32(number - spans.early), chunks, np.int32(1), spans.early_rows
            whole_rows = np.int32(np.uint32(number) // np.uint32(of_row))
            row = np.int32(before + whole_rows)
            first = np.int32((number - whole_rows * of_row) * size)
            chunk, end = first, min(np.int32(first + size), chunks)
            reading = open_reading(logits, row)
            even = fetch(logits, reading, first)
            odd = fetch(logits, reading, following(first, 1, end, chunks))
            largest = np.uint32(0)
            while chunk < end:
                keys = keys_of(even, logits.vocabulary, reading, chunk)
                even = fetch(logits, reading, following(chunk, 2, end, chunks))
                largest = max(largest, record(keys, reading, chunk, marks, shared))
                if np.int32(chunk + 1) < end:
                    keys = keys_of(odd, logits.vocabulary, reading, np.int32(chunk + 1))
                    odd = fetch(logits, reading, following(chunk, 3, end, chunks))
                    largest = max(largest, record(keys, reading, np.int32(chunk + 1), marks, shared))
                chunk = np.int32(chunk + 2)
            leave(largest, shared)
            cuda.syncthreads()
            add_up(row, first, end, marks, shared)
            cuda.syncthreads()
            if first_thread:
                last = take_ticket(marks.tickets, np.int64(row)) == of_row - 1
                box[_LAST] = np.int32(1 if last else 0)
                if last:
                    marks.tickets[row] = np.int64(0)
                else:
                    box[_NEXT] = hand_out(marks, num_rows)
            cuda.syncthreads()
            number, finished = np.int32(box[_NEXT]), box[_LAST] != 0
        if finished:
            return np.int32(warp_max_u32(np.uint32(row)))  # known to be the same in every lane
        if first_thread and number == spans.asked - 1:  # nobody asks any more
            marks.tickets[num_rows] = np.int64(0)
        return np.int32(-1)

    return read


@lru_cache
def read_and_pick_kernel(name: str, threads: int = THREADS, blocks: int = BLOCKS) -> Kernel:
    """The filter in one kernel, for logits of this dtype; its grid is that of `spans_of`."""
    read, pick = read_of(name, threads), pick_of(name, threads)

    def read_and_pick(logits, marks, bounds, rows, spans, num_rows):
        shared = cuda.shared.array(SHARED, int32)
        scratch64 = cuda.shared.array(SCRATCH64, int64)
        box = cuda.shared.array(BOX, int32)
        row = read(logits, marks, spans, num_rows, shared, box)
        if row >= 0:
            pick(row, np.int64(0), np.uint32(0), np.float32(0.0), logits, marks, bounds, rows, shared, scratch64)

    signature = void(LOGITS, MARKS, FILTER, ROWS, SPANS, int32)
    return Kernel(read_and_pick, signature, threads, registers_for(threads, blocks))

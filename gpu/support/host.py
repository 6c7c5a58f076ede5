"""The filter on the host: one row a thread."""

from dataclasses import replace

import numba
import numpy as np
from numba import njit, prange

from gpu import status
from gpu.checks import check_array, check_range
from gpu.logit_rows import load, logit_rows
from gpu.support.bounds import certain_cutoff
from gpu.support.cutoffs import (
    BINS,
    BLOCK,
    CHUNK,
    block_maxima,
    collect,
    first_index,
    kept_mass,
    kth_largest,
    kth_largest_bound,
    min_p_cutoff,
    row_mass,
    tail_bound,
    top_p_cutoff,
)
from gpu.support.record import Support
from gpu.weights import (
    GREEDY_TEMPERATURE,
    KEY_MINUS_INF,
    KEY_PLUS_INF,
    LOWEST,
    ONE,
    cutoff_key,
    key_of,
    split_scale,
    value_of,
    weight,
)

_OK, _INVALID = np.uint8(status.OK), np.uint8(status.INVALID)


@njit(nogil=True)
def _emit(flat, start, vocabulary, block_keys, least, maximum, c_hi, c_lo, token_ids, weights):
    num = 0
    for block in range(block_keys.size):
        if block_keys[block] >= least:
            for index in range(block * BLOCK, min((block + 1) * BLOCK, vocabulary)):
                x = load(flat, start + index)
                if key_of(x) >= least:
                    token_ids[num] = index
                    weights[num] = weight(x, maximum, c_hi, c_lo)
                    num += 1


@njit(nogil=True)
def _singleton(out, row, maximum):
    out.greedy[row] = True
    out.cutoff[row] = maximum
    out.size[row] = 1
    out.total[row] = ONE
    out.token_ids[row, 0] = out.argmax[row]
    out.weights[row, 0] = ONE


@njit(nogil=True)
def _invalid(out, row):
    out.status[row] = _INVALID
    out.greedy[row] = False
    out.maximum[row] = np.float32(np.nan)
    out.cutoff[row] = np.float32(np.nan)
    out.size[row] = 0
    out.total[row] = 0
    out.argmax[row] = -1


@njit(nogil=True)
def _select_row(
    flat, start, vocabulary, row, top_k, top_p, min_p, joint, out,
    block_keys, key_scratch, candidates, bins, weight_chunk, bin_chunk,
):  # fmt: skip
    largest, smallest = block_maxima(flat, start, vocabulary, block_keys)
    if largest >= KEY_PLUS_INF or largest == KEY_MINUS_INF or smallest < KEY_MINUS_INF:
        _invalid(out, row)
        return
    maximum = value_of(largest) + np.float32(0.0)  # never -0.0
    temperature = out.temperature[row]
    out.status[row] = _OK
    out.greedy[row] = False
    out.maximum[row] = maximum
    out.argmax[row] = first_index(flat, start, vocabulary, block_keys, maximum)
    if temperature < GREEDY_TEMPERATURE or top_k == 1:
        _singleton(out, row, maximum)
        return
    c_hi, c_lo = split_scale(temperature)
    cutoff = LOWEST
    size = 0
    filtered = 0 < top_k < vocabulary
    if filtered:
        bound = kth_largest_bound(block_keys, top_k, key_scratch)
        size = collect(flat, start, vocabulary, block_keys, bound, candidates)
        if size >= top_k:  # else fewer are finite
            cutoff = kth_largest(candidates, size, top_k)
    certain = False
    if top_p < np.float32(1.0) and not filtered:
        certain, cutoff = certain_cutoff(
            flat, start, vocabulary, block_keys, maximum, temperature, c_hi, c_lo, top_p, candidates, bins,
            weight_chunk, bin_chunk,
        )  # fmt: skip
    if top_p < np.float32(1.0) and not certain:
        mass = np.int64(0)
        if joint or not filtered:
            mass = row_mass(flat, start, vocabulary, maximum, c_hi, c_lo)
        lowest = max(value_of(smallest), cutoff)
        if not filtered:
            bound = tail_bound(vocabulary, maximum, temperature, top_p)
            size = collect(flat, start, vocabulary, block_keys, bound, candidates)
            lowest = max(lowest, value_of(bound))
        cutoff = top_p_cutoff(
            candidates[:size], cutoff, lowest, maximum, c_hi, c_lo, top_p, mass, bins, weight_chunk, bin_chunk
        )
    cutoff = max(cutoff, min_p_cutoff(maximum, temperature, min_p))
    least = cutoff_key(cutoff)
    if least <= smallest:  # everything is kept
        count, least_kept = np.int64(vocabulary), smallest
        total = row_mass(flat, start, vocabulary, maximum, c_hi, c_lo)
    else:
        count, total, least_kept = kept_mass(flat, start, vocabulary, block_keys, least, maximum, c_hi, c_lo)
    out.cutoff[row] = value_of(least_kept) + np.float32(0.0)  # never -0.0
    out.size[row] = count
    out.total[row] = total
    if count <= out.token_ids.shape[1]:
        _emit(
            flat, start, vocabulary, block_keys, least, maximum, c_hi, c_lo,
            out.token_ids[row], out.weights[row],
        )  # fmt: skip


@njit(nogil=True, parallel=True, cache=True)
def _select(flat, starts, vocabulary, top_k, top_p, min_p, joint, out, threads):
    num_blocks = (vocabulary + BLOCK - 1) // BLOCK
    keys = np.empty((2, threads, num_blocks), np.int32)
    candidates = np.empty((threads, vocabulary + 1), np.float32)
    bins = np.empty((threads, BINS), np.int64)
    weight_chunk = np.empty((threads, CHUNK), np.int64)
    bin_chunk = np.empty((threads, CHUNK), np.int32)
    for index in prange(starts.size):
        row = np.int64(index)  # prange counts in uint64
        thread = numba.get_thread_id()
        _select_row(
            flat, starts[row], vocabulary, row, top_k[row], top_p[row], min_p[row], joint, out,
            keys[0, thread], keys[1, thread], candidates[thread], bins[thread],
            weight_chunk[thread], bin_chunk[thread],
        )  # fmt: skip


def _allocate(num_rows: int, capacity: int, temperature: np.ndarray) -> Support:
    return Support(
        status=np.empty(num_rows, np.uint8),
        maximum=np.empty(num_rows, np.float32),
        cutoff=np.empty(num_rows, np.float32),
        total=np.empty(num_rows, np.uint64),
        count=np.empty(num_rows, np.int32),
        argmax=np.empty(num_rows, np.int32),
        greedy=np.empty(num_rows, np.bool_),
        token_ids=np.empty((num_rows, capacity), np.int32),
        weights=np.empty((num_rows, capacity), np.uint64),
        temperature=temperature,
    )


def select(
    logits: np.ndarray,
    temperature: np.ndarray,
    top_k: np.ndarray,
    top_p: np.ndarray,
    min_p: np.ndarray | None,
    joint: bool,
    capacity: int,
    out: Support | None,
) -> Support:
    """select_support of NumPy arrays."""
    rows = logit_rows(logits, 2)
    num_rows = logits.shape[0]
    temperature = check_array("temperature", temperature, np.float32, (num_rows,))
    top_k = check_array("top_k", top_k, np.int32, (num_rows,))
    top_p = check_array("top_p", top_p, np.float32, (num_rows,))
    good = (temperature >= 0) & np.isfinite(temperature)
    check_range("temperature", temperature, good, "a finite number of at least 0")
    check_range("top_k", top_k, top_k >= 0, "at least 0 (0 for unbounded)")
    check_range("top_p", top_p, (top_p > 0) & (top_p <= 1), "a number in (0, 1]")
    if min_p is None:
        min_p = np.zeros(num_rows, np.float32)
    min_p = check_array("min_p", min_p, np.float32, (num_rows,))
    check_range("min_p", min_p, (min_p >= 0) & (min_p < 1), "a number in [0, 1)")
    if out is None:
        out = _allocate(num_rows, capacity, temperature)
    elif out.walk is not None or out.token_ids.shape != (num_rows, capacity):
        raise ValueError(f"out={out.token_ids.shape}, expected a Support of an earlier call with the same shapes")
    support = replace(out, temperature=temperature)
    _select(
        rows.flat, rows.starts, rows.vocabulary, top_k, top_p, min_p,
        joint, support.arrays(), numba.get_num_threads(),
    )  # fmt: skip
    return support

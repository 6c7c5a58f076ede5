"""Replay on the host: rows in parallel, all in float64."""

import numpy as np
from numba import njit, prange

from gpu.checks import check_array, check_csr, check_range
from gpu.logit_rows import element_rows, load
from gpu.replay.arithmetic import LANES, exp64, log1p64, logit_gradient, tree_sum
from gpu.replay.elements import write
from gpu.weights import GREEDY_TEMPERATURE

_GREEDY = float(GREEDY_TEMPERATURE)


@njit(nogil=True, error_model="numpy")
def _log_softmax_row(flat, start, token_ids, first, last, temperature, entries):
    if temperature < _GREEDY:
        for entry in range(first, last):
            entries[entry] = 0.0
        return
    maximum, top = -np.inf, first
    for entry in range(first, last):
        x = np.float64(load(flat, start + token_ids[entry]))
        entries[entry] = x
        if x > maximum:
            maximum, top = x, entry
    # The maximum's own exp is 1: kept apart, log1p gives a log-probability near 0 to its last digit.
    others = np.zeros(LANES)
    for entry in range(first, last):
        entries[entry] = (entries[entry] - maximum) / temperature
        if entry != top:
            others[(entry - first) % LANES] += exp64(entries[entry])
    log_total = log1p64(tree_sum(others))
    for entry in range(first, last):
        entries[entry] -= log_total


@njit(nogil=True, parallel=True, cache=True)
def _log_softmax(flat, starts, token_ids, offsets, temperature, entries):
    for index in prange(starts.size):
        r = np.int64(index)  # prange counts in uint64
        _log_softmax_row(flat, starts[r], token_ids, offsets[r], offsets[r + 1], temperature[r], entries)


@njit(nogil=True, error_model="numpy")
def _sum_row(entries, first, last):
    lanes = np.zeros(LANES)
    for entry in range(first, last):
        lanes[(entry - first) % LANES] += entries[entry]
    return tree_sum(lanes)


@njit(nogil=True, parallel=True, cache=True)
def _sums(entries, offsets, sums):
    for index in prange(sums.size):
        r = np.int64(index)
        sums[r] = _sum_row(entries, offsets[r], offsets[r + 1])


@njit(nogil=True, error_model="numpy")
def _backward_row(entries, grad_entries, token_ids, first, last, temperature, flat, start):
    if temperature < _GREEDY:
        return
    total = _sum_row(grad_entries, first, last)
    for entry in range(first, last):
        gradient = logit_gradient(grad_entries[entry], entries[entry], total, temperature)
        write(flat, start + token_ids[entry], gradient)


@njit(nogil=True, parallel=True, cache=True)
def _backward(entries, grad_entries, token_ids, offsets, temperature, flat, starts):
    for index in prange(starts.size):
        r = np.int64(index)
        _backward_row(
            entries, grad_entries, token_ids, offsets[r], offsets[r + 1], temperature[r], flat, starts[r]
        )  # fmt: skip


def support_log_softmax(logits, token_ids, offsets, temperature, out):
    """support_log_softmax of NumPy arrays."""
    rows = element_rows("logits", logits, 2, float64=True)
    token_ids, offsets, temperature = _check_supports(token_ids, offsets, temperature, *logits.shape)
    entries = _result(out, token_ids.shape)
    _log_softmax(rows.flat, rows.starts, token_ids, offsets, temperature, entries)
    return entries


def support_log_softmax_backward(entries, grad_entries, token_ids, offsets, temperature, grad_logits):
    """support_log_softmax_backward of NumPy arrays."""
    rows = element_rows("grad_logits", grad_logits, 2, float64=True)
    if not (grad_logits.flags.c_contiguous and grad_logits.flags.writeable):
        raise ValueError("grad_logits=a view, expected a C-contiguous array that can be written")
    token_ids, offsets, temperature = _check_supports(token_ids, offsets, temperature, *grad_logits.shape)
    entries = check_array("entries", entries, np.float64, token_ids.shape)
    grad_entries = check_array("grad_entries", grad_entries, np.float64, token_ids.shape)
    _backward(entries, grad_entries, token_ids, offsets, temperature, rows.flat, rows.starts)


def row_sums(entries, offsets, out):
    """row_sums of NumPy arrays."""
    entries = check_array("entries", entries, np.float64, (np.size(entries),))
    offsets = check_csr("offsets", offsets, np.size(offsets) - 1, entries.size)
    sums = _result(out, (offsets.size - 1,))
    _sums(entries, offsets, sums)
    return sums


def _result(out, shape):
    if out is None:
        return np.empty(shape, np.float64)
    if check_array("out", out, np.float64, shape) is not out or not out.flags.writeable:
        raise ValueError("out=a view, expected a C-contiguous array that can be written")
    return out


def _check_supports(token_ids, offsets, temperature, num_rows, vocabulary):
    token_ids = check_array("token_ids", token_ids, np.int32, (np.size(token_ids),))
    offsets = check_csr("offsets", offsets, num_rows, token_ids.size)
    check_range(
        "token_ids", token_ids, (token_ids >= 0) & (token_ids < vocabulary), f"an id in 0..{vocabulary - 1}"
    )  # fmt: skip
    temperature = check_array("temperature", temperature, np.float64, (num_rows,))
    check_range("temperature", temperature, (temperature >= 0) & (temperature < np.inf), "a finite number from 0")
    single = (temperature >= _GREEDY) | (np.diff(offsets) == 1)
    check_range("temperature", temperature, single, "at least 1e-5 where the support isn't a single token")
    return token_ids, offsets, temperature

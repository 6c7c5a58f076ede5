"""A row's policy on a device: a support as kernels take it, and the questions that readers ask of one row."""

from typing import Any, NamedTuple

import numpy as np
from numba import cuda, float32, float64, int32, int64, types

from gpu.device.launch import pointer, pointer_to, record_of
from gpu.support.record import Support, walk_of
from gpu.weights import GREEDY_TEMPERATURE, log_share, log_total, split_scale, weight


class Rows(NamedTuple):
    """A Support as kernels take it: pointers to the arrays of that name, and their lengths."""

    status: Any
    maximum: Any
    cutoff: Any
    total: Any
    count: Any
    argmax: Any
    greedy: Any
    temperature: Any
    token_ids: Any  # [R, capacity]
    weights: Any
    entry_logits: Any
    segments: Any  # int64 [R, num_segments]: masses of WARP granules each, of a row without entries
    log_scales: Any  # float64 [R, 2]: a LogScale, of rows that verification has seen
    capacity: Any
    num_segments: Any


ROWS = record_of(
    Rows,
    pointer_to(types.uint8), pointer_to(float32), pointer_to(float32), pointer_to(int64), pointer_to(int32),
    pointer_to(int32), pointer_to(types.uint8), pointer_to(float32), pointer_to(int32), pointer_to(int64),
    pointer_to(float32), pointer_to(int64), pointer_to(float64), int32, int32,
)  # fmt: skip


def rows_argument(support: Support) -> Rows:
    """A support as the argument of a kernel."""
    walk = walk_of(support)
    return Rows(
        pointer(support.status), pointer(support.maximum), pointer(support.cutoff), pointer(support.total),
        pointer(support.count), pointer(support.argmax), pointer(support.greedy), pointer(support.temperature),
        pointer(support.token_ids), pointer(support.weights), pointer(walk.entry_logits),
        pointer(walk.segments), pointer(walk.log_scales), support.capacity, walk.segments.shape[1],
    )  # fmt: skip


class Policy(NamedTuple):
    """One row of a support."""

    valid: Any  # bool
    greedy: Any  # bool
    count: Any  # int32
    argmax: Any  # int32
    total: Any  # int64
    cutoff: Any  # float32
    maximum: Any
    temperature: Any
    c_hi: Any
    c_lo: Any


@cuda.jit(device=True)
def open_policy(rows, row):
    """The policy of a row."""
    temperature = rows.temperature[row]
    c_hi, c_lo = split_scale(max(temperature, GREEDY_TEMPERATURE))  # a greedy row reads none
    return Policy(
        rows.status[row] == 0, rows.greedy[row] != 0, rows.count[row], rows.argmax[row], rows.total[row],
        rows.cutoff[row], rows.maximum[row], temperature, np.float32(c_hi), np.float32(c_lo),
    )  # fmt: skip


@cuda.jit(device=True)
def weight_under(policy, token, x):
    """The weight of a token with logit x, 0 outside the support."""
    if policy.greedy:
        return np.int64(policy.total) if token == policy.argmax else np.int64(0)
    if not x >= policy.cutoff:
        return np.int64(0)
    return np.int64(weight(x, policy.maximum, policy.c_hi, policy.c_lo))


class LogScale(NamedTuple):
    """What turns the logits of a row into log-probabilities."""

    inverse_temperature: Any  # float64
    log_of_total: Any  # float64


@cuda.jit(device=True)
def log_scale(policy):
    """The scale of a row."""
    return LogScale(1.0 / np.float64(max(policy.temperature, GREEDY_TEMPERATURE)), np.float64(log_total(policy.total)))


@cuda.jit(device=True)
def keep_log_scale(rows, row, scale):
    """Leave the scale of a row for who asks `kept_log_scale`; by one thread."""
    rows.log_scales[2 * np.int64(row)] = scale.inverse_temperature
    rows.log_scales[2 * np.int64(row) + 1] = scale.log_of_total


@cuda.jit(device=True)
def kept_log_scale(rows, row):
    """What `keep_log_scale` has left: two loads instead of a division and a logarithm."""
    return LogScale(rows.log_scales[2 * np.int64(row)], rows.log_scales[2 * np.int64(row) + 1])


@cuda.jit(device=True)
def log_probability_under(policy, x, scale):
    """The log-probability of a kept token with logit x."""
    if policy.greedy:
        return np.float32(0.0)
    return np.float32(log_share(x, policy.maximum, scale.inverse_temperature, scale.log_of_total))

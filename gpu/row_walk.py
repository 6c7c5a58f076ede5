"""The walk over a row's support in ascending token id: one for draws, captures, top log-probabilities.

It yields (token id, weight) in chunks, from the emitted entries where the support fits its capacity,
otherwise from the vocabulary with the row's cutoff; both give the same numbers. Kernel helpers.

Draw: the first id whose cumulative weight exceeds floor(u * total); weights are integers, so the sum is exact
and a token of weight 0 is never drawn. Should the rounding of u * total pass the end: the last id of positive
weight.
"""

import math

import numpy as np
from numba import njit

from gpu.draft_law import draft_probability
from gpu.instructions import product
from gpu.logit_rows import load
from gpu.weights import log_probability, split_scale, weight

WALK_CHUNK = 1024


@njit(nogil=True)
def num_chunks(support, row, vocabulary):
    """How many chunks the row's walk has: over its stored entries, or over the vocabulary where it has none."""
    size = support.size[row]
    if size > support.token_ids.shape[1]:
        size = vocabulary
    return (size + WALK_CHUNK - 1) // WALK_CHUNK


@njit(nogil=True)
def load_chunk(chunk, flat, start, vocabulary, support, row, ids, weights):
    """Fill ids int32 and weights int64 [WALK_CHUNK] with the entries of this chunk; return how many."""
    first = chunk * WALK_CHUNK
    count = support.size[row]
    if count <= support.token_ids.shape[1]:
        num = min(WALK_CHUNK, count - first)
        for i in range(num):
            ids[i] = support.token_ids[row, first + i]
            weights[i] = support.weights[row, first + i]
        return num
    c_hi, c_lo = split_scale(support.temperature[row])
    maximum, cutoff = support.maximum[row], support.cutoff[row]
    values = flat[start + first : start + min(first + WALK_CHUNK, vocabulary)]
    kept = np.int32(0)
    for i in range(values.size):
        x = load(values, i)
        ids[i] = np.int32(first + i)
        weights[i] = weight(x, maximum, c_hi, c_lo)
        kept += np.int32(1) if x >= cutoff else np.int32(0)
    if kept == values.size:
        return values.size
    num = 0
    for i in range(values.size):
        if load(values, i) >= cutoff:
            ids[num] = first + i
            weights[num] = weights[i]
            num += 1
    return num


@njit(nogil=True)
def weight_of(token, flat, start, support, row):
    """The weight of one token under the row's policy, 0 outside the support."""
    if support.greedy[row]:
        return support.total[row] if token == support.argmax[row] else np.int64(0)
    x = load(flat, start + token)
    c_hi, c_lo = split_scale(support.temperature[row])
    return weight(x, support.maximum[row], c_hi, c_lo) if x >= support.cutoff[row] else np.int64(0)


@njit(nogil=True)
def log_probability_of(token, flat, start, support, row):
    """The log-probability of a kept token."""
    if support.greedy[row]:
        return np.float32(0.0)
    x = load(flat, start + token)
    return log_probability(x, support.maximum[row], support.temperature[row], support.total[row])


@njit(nogil=True)
def _load_law(chunk, removed, laws, draft_row, scale, flat, start, vocabulary, support, row, ids, weights):
    """load_chunk, with `removed` or the draft's law taken out; -1 if that isn't a distribution."""
    num = load_chunk(chunk, flat, start, vocabulary, support, row, ids, weights)
    if draft_row < 0:
        for i in range(num):
            if ids[i] == removed:
                weights[i] = 0
        return num
    total = np.float64(support.total[row])
    bad = 0
    for i in range(num):
        draft_prob = draft_probability(laws, draft_row, ids[i])
        residual = product(scale, np.float64(weights[i])) - product(draft_prob, total)
        weights[i] = np.int64(residual) if residual > 0 else np.int64(0)
        bad += 0 if draft_prob >= 0 else 1
    return -1 if bad else num


@njit(nogil=True)
def _first_above(ids, weights, threshold):
    i, mass = 0, weights[0]
    while mass <= threshold:
        i += 1
        mass += weights[i]
    return ids[i]


@njit(nogil=True)
def _last_positive(ids, weights, num):
    i = num - 1
    while weights[i] == 0:
        i -= 1
    return ids[i]


@njit(nogil=True)
def total_left(removed, laws, draft_row, scale, flat, start, vocabulary, support, row, ids, weights):
    """The weight of what draw_token draws from; -1 if the draft's law isn't a distribution."""
    if draft_row < 0:
        total = support.total[row]
        return total - weight_of(removed, flat, start, support, row) if removed >= 0 else total
    total = np.int64(0)
    for chunk in range(num_chunks(support, row, vocabulary)):
        num = _load_law(chunk, removed, laws, draft_row, scale, flat, start, vocabulary, support, row, ids, weights)
        if num < 0:
            return np.int64(-1)
        for i in range(num):
            total += weights[i]
    return total


@njit(nogil=True)
def draw_token(uniform, left, removed, laws, draft_row, scale, flat, start, vocabulary, support, row, ids, weights):
    """A draw from a row's policy, changed in one of two ways.

    removed >= 0: without that token. draft_row >= 0: from trunc(max(0, scale * weight - draft_prob * total)) with the
    draft_probs of that row of the laws. left: `total_left` of the same; where nothing is left, from the policy itself.
    """
    total = left
    if total == 0:
        total, removed, draft_row = support.total[row], np.int32(-1), np.int64(-1)
    threshold = np.int64(math.floor(uniform * np.float64(total)))
    mass, last = np.int64(0), np.int32(-1)
    for chunk in range(num_chunks(support, row, vocabulary)):
        num = _load_law(chunk, removed, laws, draft_row, scale, flat, start, vocabulary, support, row, ids, weights)
        chunk_mass = np.int64(0)
        for i in range(num):
            chunk_mass += weights[i]
        if mass + chunk_mass > threshold:
            return _first_above(ids, weights, threshold - mass)
        mass += chunk_mass
        if chunk_mass > 0:
            last = _last_positive(ids, weights, num)
    return last

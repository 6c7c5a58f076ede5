"""The draw of one row by a block: inverse CDF in ascending token id, over its entries or, if it has none, over the row.

The law is the row's policy without a removed token, or the residual max(0, scale * weight - draft_prob * total) of a
proposal. Where nothing is left of it, the policy itself.
"""

import math
from functools import lru_cache
from typing import Any, NamedTuple

import numpy as np
from numba import cuda, njit

from gpu.device.block import WARP, block_of, warp_prefix64
from gpu.device.instructions import load_kept
from gpu.device.rows import row_start
from gpu.device.vectors import element_of, format_of, in_row
from gpu.support.policy import weight_under
from gpu.verification.law import is_by_logits, law_of
from gpu.verification.rule import residual_weight


class Law(NamedTuple):
    """What is drawn from."""

    removed: Any  # int32: a token that can't be drawn, or -1
    draft_row: Any  # int32: of the law whose probabilities are taken away, or -1 for none
    draft_at: Any  # int64: where the values of that one begin
    scale: Any  # float64: of the weights that they are taken from
    laws: Any  # Laws


class Draw(NamedTuple):
    """Ways to draw, for one dtype of logits, one format of laws and one block size.

    (row, its index, policy, uniform, law, rows, shared, scratch64) -> token id, and the weight of what was left of the
    law, int64; both -1 if the draft's law isn't a distribution. shared: int32 [4]. Every thread of the block takes
    part.
    """

    from_entries: Any  # of a row that carries its entries; `row` isn't read
    from_logits: Any  # of one that doesn't
    draw: Any  # of either
    sum_of_logits: Any  # (row, policy, law, scratch64) -> the weight left of a row without entries; -1 for a bad law
    from_sum: Any  # (row, index, policy, uniform, law, left, ...) -> token id, of such a row, where it is known


@cuda.jit(device=True)
def law_without(draft, draft_row, laws):
    """What is left where a draft has been refused: draft_row says which law it was drawn from, -1 for none.

    draft: -1 where there was no draft.
    """
    if draft_row < 0:
        return Law(np.int32(draft), np.int32(-1), np.int64(0), np.float64(1.0), laws)
    return law_of_row(draft_row, np.float64(1.0), laws)


@cuda.jit(device=True)
def law_of_row(draft_row, scale, laws):
    """What is left where that law has been taken from the weights at a scale; of the policy, for -1."""
    draft_at = row_start(laws.values, draft_row) if draft_row >= 0 else np.int64(0)
    return Law(np.int32(-1), np.int32(draft_row), np.int64(draft_at), np.float64(scale), laws)


@njit(nogil=True)
def draw_threshold(uniform, total):
    """The first id whose cumulative weight exceeds this is drawn; below the total, however u * total rounds.

    On a device nobody has checked the uniform: one out of range counts as the nearest in it, NaN as 0.
    """
    if not uniform > 0.0:
        return np.int64(0)
    if uniform >= 1.0:
        return np.int64(total - 1)
    return min(np.int64(math.floor(uniform * np.float64(total))), np.int64(total - 1))


@lru_cache
def draw_of(name: str, proposal_name: str | None, threads: int) -> Draw:
    """The ways for logits of this dtype and laws of this format (gpu/verification/law.py)."""
    form, block = format_of(name), block_of(threads)
    lanes, key_of, value_of = form.lanes, form.key, form.value
    prefix64, sum64 = block.prefix64, block.sum64
    element, draft_prob_of = element_of(name), law_of(proposal_name)
    warps, proposes = threads // WARP, proposal_name is not None

    @cuda.jit(device=True)
    def weight_left(token, mass, policy, law):
        # Of one kept token under the law; -1 for a bad proposal.
        if token == law.removed:
            return np.int64(0)
        if not proposes or law.draft_row < 0:
            return np.int64(mass)
        draft_prob = draft_prob_of(law.laws, law.draft_row, law.draft_at, token)
        return np.int64(residual_weight(mass, draft_prob, policy.total, law.scale))

    @cuda.jit(device=True)
    def granule_weight(row, granule, policy, law):
        # The weight left in a granule of the row, -1 for a bad proposal.
        own, bad = np.int64(0), False
        for half in range(2):
            w0, w1, w2, w3 = load_kept(row.words, np.int64(row.first_vector + 2 * granule + half))
            first = np.int32((2 * granule + half) * lanes - row.head)
            for lane in range(lanes):
                value = value_of(key_of(w0, w1, w2, w3, lane))
                if in_row(first, lane, row.vocabulary) and value >= policy.cutoff:
                    token = np.int32(first + lane)
                    left = weight_left(token, weight_under(policy, token, value), policy, law)
                    bad = bad or left < 0
                    own = np.int64(own + left)
        return np.int64(-1) if bad else own

    @cuda.jit(device=True)
    def granule_weight_in_turn(row, granule, policy, law):
        # The same, an element at a time: a law by logits is long, and would be there for each element of a granule.
        own, bad = np.int64(0), False
        start = np.int64(row.first_vector * lanes + row.head)
        first = np.int32(2 * granule * lanes - row.head)
        for token in range(max(first, np.int32(0)), min(np.int32(first + 2 * lanes), row.vocabulary)):
            value = element(row.words, np.int64(start + token))
            if value >= policy.cutoff:
                left = weight_left(token, weight_under(policy, token, value), policy, law)
                bad = bad or left < 0
                own = np.int64(own + left)
        return np.int64(-1) if bad else own

    weigh_granule = granule_weight_in_turn if is_by_logits(proposal_name) else granule_weight

    @cuda.jit(device=True)
    def find_in_granule(row, granule, threshold, policy, law):
        # The first token of the granule whose cumulative weight exceeds the threshold.
        mass, found = np.int64(0), np.int32(-1)
        for i in range(2 * lanes):
            w0, w1, w2, w3 = load_kept(row.words, np.int64(row.first_vector + 2 * granule + i // lanes))
            first = np.int32((2 * granule + i // lanes) * lanes - row.head)
            lane = i % lanes
            value = value_of(key_of(w0, w1, w2, w3, lane))
            if found < 0 and in_row(first, lane, row.vocabulary) and value >= policy.cutoff:
                token = np.int32(first + lane)
                mass = np.int64(mass + weight_left(token, weight_under(policy, token, value), policy, law))
                if mass > threshold:
                    found = token
        return found

    @cuda.jit(device=True)
    def among_entries(row, index, policy, uniform, law, rows, shared, scratch64):
        token_ids, weights, at = rows.token_ids, rows.weights, np.int64(index) * rows.capacity
        run = np.int32((policy.count + threads - 1) // threads)
        start = min(np.int32(cuda.threadIdx.x * run), np.int32(policy.count))
        end = min(np.int32(start + run), np.int32(policy.count))
        own, bad = np.int64(0), np.int32(0)
        for i in range(start, end):
            left = weight_left(token_ids[at + i], weights[at + i], policy, law)
            if left < 0:
                bad = np.int32(1)
            own = np.int64(own + left)
        if proposes and cuda.syncthreads_or(bad) != 0:
            return np.int32(-1), np.int64(-1)
        before, total = prefix64(own, scratch64)
        if total == 0:
            return np.int32(-2), np.int64(0)
        threshold = np.int64(draw_threshold(uniform, total))
        if before <= threshold < before + own:
            i, mass = start, before
            while True:
                mass = np.int64(mass + weight_left(token_ids[at + i], weights[at + i], policy, law))
                if mass > threshold:
                    break
                i = np.int32(i + 1)
            shared[0] = token_ids[at + i]
        cuda.syncthreads()
        return np.int32(shared[0]), np.int64(total)

    @cuda.jit(device=True)
    def by_segments(row, index, policy, uniform, law, rows, shared, scratch64):
        # The removed token's weight leaves its segment; then a warp walks the segment that holds the threshold.
        segments, at = rows.segments, np.int64(index) * rows.num_segments
        num_segments = np.int32((row.num_granules + WARP - 1) // WARP)
        removed_in, removed_weight = np.int32(-1), np.int64(0)
        if law.removed >= 0:
            index = np.int32(law.removed + row.head)
            granule = np.int32(index // (2 * lanes))
            removed_in = np.int32(granule // WARP)
            lane = np.int32(index % lanes)
            w0, w1, w2, w3 = load_kept(row.words, np.int64(row.first_vector + index // lanes))
            removed_weight = weight_under(policy, law.removed, value_of(key_of(w0, w1, w2, w3, lane)))
        run = np.int32((num_segments + threads - 1) // threads)
        start = min(np.int32(cuda.threadIdx.x * run), num_segments)
        end = min(np.int32(start + run), num_segments)
        own = np.int64(0)
        for i in range(start, end):
            own = np.int64(own + segments[at + i] - (removed_weight if i == removed_in else np.int64(0)))
        before, total = prefix64(own, scratch64)
        if total == 0:
            return np.int32(-2), np.int64(0)
        threshold = np.int64(draw_threshold(uniform, total))
        if before <= threshold < before + own:
            i, mass = start, before
            while True:
                part = np.int64(segments[at + i] - (removed_weight if i == removed_in else np.int64(0)))
                if mass + part > threshold:
                    break
                mass = np.int64(mass + part)
                i = np.int32(i + 1)
            shared[1] = i
            scratch64[warps] = np.int64(threshold - mass)
        cuda.syncthreads()
        if cuda.threadIdx.x < WARP:
            granule = np.int32(shared[1] * WARP + cuda.laneid)
            threshold = np.int64(scratch64[warps])
            own = np.int64(0)
            if granule < row.num_granules:
                own = weigh_granule(row, granule, policy, law)
            through = warp_prefix64(own)
            if through - own <= threshold < through:
                shared[0] = find_in_granule(row, granule, np.int64(threshold - through + own), policy, law)
        cuda.syncthreads()
        return np.int32(shared[0]), np.int64(total)

    @cuda.jit(device=True)
    def sum_of_granules(row, policy, law, scratch64):
        # The first pass over the row: the total, -1 for a bad law.
        own, bad = np.int64(0), np.int32(0)
        for granule in range(cuda.threadIdx.x, row.num_granules, threads):
            left = weigh_granule(row, granule, policy, law)
            if left < 0:
                bad = np.int32(1)
            own = np.int64(own + left)
        if cuda.syncthreads_or(bad) != 0:
            return np.int64(-1)
        return np.int64(sum64(own, scratch64))

    @cuda.jit(device=True)
    def among_granules(row, policy, uniform, law, total, shared, scratch64):
        # The second: the granule that holds the threshold.
        threshold, base = np.int64(draw_threshold(uniform, total)), np.int64(0)
        for begin in range(0, row.num_granules, threads):
            granule = np.int32(begin + cuda.threadIdx.x)
            own = np.int64(0)
            if granule < row.num_granules:
                own = weigh_granule(row, granule, policy, law)
            cuda.syncthreads()
            before, part = prefix64(own, scratch64)
            before = np.int64(before + base)
            if before <= threshold < before + own:
                shared[0] = find_in_granule(row, granule, np.int64(threshold - before), policy, law)
            base = np.int64(base + part)
            if base > threshold:
                break
        cuda.syncthreads()
        return np.int32(shared[0])

    @cuda.jit(device=True)
    def by_logits(row, index, policy, uniform, law, rows, shared, scratch64):
        if law.draft_row < 0:
            return by_segments(row, index, policy, uniform, law, rows, shared, scratch64)
        total = sum_of_granules(row, policy, law, scratch64)
        if total < 0:
            return np.int32(-1), np.int64(-1)
        if total == 0:
            return np.int32(-2), np.int64(0)
        return among_granules(row, policy, uniform, law, total, shared, scratch64), total

    @cuda.jit(device=True)
    def from_sum(row, index, policy, uniform, law, left, rows, shared, scratch64):
        if law.draft_row >= 0:
            return among_granules(row, policy, uniform, law, left, shared, scratch64)
        token, _ = by_segments(row, index, policy, uniform, law, rows, shared, scratch64)
        return token

    @cuda.jit(device=True)
    def by_either(row, index, policy, uniform, law, rows, shared, scratch64):
        if policy.count <= rows.capacity:
            return among_entries(row, index, policy, uniform, law, rows, shared, scratch64)
        return by_logits(row, index, policy, uniform, law, rows, shared, scratch64)

    def or_from_policy(way):
        # Where nothing is left of the law (-2), from the policy itself.
        @cuda.jit(device=True)
        def draw(row, index, policy, uniform, law, rows, shared, scratch64):
            nothing = False
            while True:
                token, left = way(row, index, policy, uniform, law, rows, shared, scratch64)
                if token != -2:
                    return token, np.int64(0) if nothing else left
                law = Law(np.int32(-1), np.int32(-1), np.int64(0), np.float64(1.0), law.laws)
                nothing = True
                cuda.syncthreads()

        return draw

    return Draw(
        or_from_policy(among_entries), or_from_policy(by_logits), or_from_policy(by_either), sum_of_granules, from_sum
    )

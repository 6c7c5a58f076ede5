"""Rounds of verification from a seed, for backends to agree on: rows of every landscape, drafts, coins, proposals."""

from dataclasses import dataclass

import numpy as np

from tests.backends import SUPPORT_FIELDS, assert_same, same_bits
from tests.strategies import LANDSCAPES, cast, landscape

POISONS = (np.nan, -np.nan, np.inf, "empty")
NAN_BITS = {"float32": np.float32(np.nan), "float16": np.float16(np.nan), "bfloat16": np.uint16(0x7FC0)}


@dataclass
class Round:
    """B requests of W rows. Filter arguments are those of B*W rows."""

    logits: np.ndarray  # [B, W, V]
    parameters: tuple  # temperature, top_k, top_p, min_p
    drafts: np.ndarray
    num_drafts: np.ndarray
    coins: tuple  # accept and draw uniforms
    wanted: np.ndarray

    @property
    def rows(self):
        return self.logits.reshape(-1, self.logits.shape[-1])


def make_round(seed, batch, width, size, dtype, num_poisoned=1, greedy=0.15):
    """A round in which the landscapes follow each other from row to row."""
    rng = np.random.default_rng(seed)
    num_rows = batch * width
    first = int(rng.integers(len(LANDSCAPES)))
    x = np.stack([landscape(LANDSCAPES[(first + r) % len(LANDSCAPES)], size, rng) for r in range(num_rows)])
    likely = np.where(rng.random(num_rows) < 0.7, x.argmax(1), rng.integers(size, size=num_rows))
    for row, poison in zip(rng.permutation(num_rows)[:num_poisoned], POISONS, strict=False):
        if poison == "empty":
            x[row] = -np.inf
        else:
            x[row, rng.integers(size)] = poison
    top_ks = [0, 0, 2, 5, 20, 64, 256, 1024, max(size - 1, 1), size, size + 10]
    temperature = rng.choice([1e-5, 0.1, 0.7, 1, 1, 2, 100, 1e6], num_rows)
    top_k = rng.choice(top_ks, num_rows)
    is_greedy = rng.random(num_rows) < greedy
    temperature[is_greedy & (rng.random(num_rows) < 0.5)] = 0
    top_k[is_greedy & (temperature > 0)] = 1
    draw = rng.random((batch, width))
    draw[rng.random((batch, width)) < 0.2] = 0
    draw[rng.random((batch, width)) < 0.2] = 1 - 2**-53
    drafts = likely.reshape(batch, width)[:, : width - 1].astype(np.int32)
    return Round(
        cast(x, dtype).reshape(batch, width, size),
        (
            temperature.astype(np.float32),
            top_k.astype(np.int32),
            rng.choice([1, 1, 0.999999, 0.95, 0.9, 0.5, 0.1, 1e-6], num_rows).astype(np.float32),
            rng.choice([0, 0, 0, 1e-6, 0.05, 0.5, 0.999], num_rows).astype(np.float32),
        ),
        drafts,
        (width - 1 - (rng.random(batch) < 0.3) * rng.integers(0, width, batch)).astype(np.int32),
        (rng.random((batch, width)) ** 2, draw),
        rng.random(batch) < 0.8,
    )


def make_proposal(seed, round_, support, dtype):
    """draft_probs [B, W-1, V]: near the policies, where residuals are small, or far from them; a few are bad."""
    batch, width, size = round_.logits.shape
    rng = np.random.default_rng(seed)
    draft_probs = rng.random((batch, width, size)).astype(np.float32) ** 4 + np.float32(1e-4)
    draft_probs /= draft_probs.sum(-1, keepdims=True)
    flat = draft_probs.reshape(-1, size)
    for row in np.flatnonzero((support.count > 0) & (support.count <= support.capacity))[::2]:
        kept = slice(support.count[row])
        flat[row] = 0
        flat[row, support.token_ids[row, kept]] = support.weights[row, kept] / support.total[row].astype(np.float64)
    if width > 1:
        bad = rng.integers(batch), rng.integers(width - 1), rng.integers(size)
        draft_probs[bad] = rng.choice([-1, np.nan, 0, np.inf])
        draft_probs[0, 0, round_.drafts[0, 0] % size] = rng.choice([0, 2, 1e-3])
    return cast(np.ascontiguousarray(draft_probs[:, : width - 1]), dtype)


def run_round(backend, round_, order, capacity, max_support, proposal=None, **thresholds):
    """The support, the verdict and the masks of a round."""
    support = backend.select_support(round_.rows, *round_.parameters, filter_order=order, capacity=capacity)
    verdict = backend.verify_chain(
        round_.logits, support, round_.drafts, round_.num_drafts, *round_.coins, proposal, **thresholds
    )
    capture = backend.capture_masks(round_.logits, support, verdict, round_.wanted, max_support)
    whole = backend.run_round(
        round_.logits,
        *round_.parameters,
        round_.drafts,
        round_.num_drafts,
        *round_.coins,
        round_.wanted,
        max_support,
        proposal,
        filter_order=order,
        capacity=capacity,
        **thresholds,
    )
    for got, want in zip(whole, (support, verdict, capture), strict=True):
        assert_same(got, want)
    return support, verdict, capture


def in_gaps(logits, before, behind):
    """The rows [R, V] as a view of a wider array in which NaN lies between them."""
    name = "bfloat16" if logits.dtype == np.uint16 else logits.dtype.name
    wide = np.full((len(logits), before + logits.shape[1] + behind), NAN_BITS[name])
    view = wide[:, before : before + logits.shape[1]]
    view[:] = logits
    return view


def assert_same_rows(some, whole, rows):
    """The rows of one support are these rows of another, bit for bit."""
    for name in SUPPORT_FIELDS:
        assert same_bits(getattr(some, name), getattr(whole, name)[rows]).all(), name
    for i, row in enumerate(rows):
        count = whole.count[row]
        if count <= min(some.capacity, whole.capacity):
            np.testing.assert_array_equal(some.token_ids[i, :count], whole.token_ids[row, :count])
            np.testing.assert_array_equal(some.weights[i, :count], whole.weights[row, :count])

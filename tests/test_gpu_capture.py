"""capture_masks, pack_masks and top_logprobs against the oracle."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from gpu import FILTER_ORDERS, INVALID, OK, OVERFLOW, pack_masks, top_logprobs
from gpu.logit_rows import logit_rows
from gpu.weights import LOWEST
from tests import naive
from tests.backends import HOST
from tests.cases import keeps_failures
from tests.strategies import fuzz, landscape, row_batches
from tests.test_gpu_verify import both, ints, rounds, select


def masks_of(capture, request):
    """[(ids, logprobs)] of one request."""
    rows = range(capture.row_start[request], capture.row_start[request + 1])
    spans = [slice(capture.offsets[r], capture.offsets[r + 1]) for r in rows]
    return [(capture.token_ids[span], capture.logprobs[span]) for span in spans]


@keeps_failures
def check_capture(backend, case, order, capacity, wanted, max_support):
    rows, batch, width, drafts, num_drafts, coins, proposal = case
    size = rows.logits.shape[1]
    logits = rows.logits.reshape(batch, width, size)
    support = backend.select_support(*rows.filter_arguments(), filter_order=order, capacity=min(capacity, size))
    verdict = backend.verify_chain(logits, support, drafts, num_drafts, *coins, proposal)
    wanted, max_support = np.resize(wanted, batch), min(max_support, size)
    capture = backend.capture_masks(logits, support, verdict, wanted, max_support)
    assert capture.offsets[0] == 0
    assert capture.offsets[-1] == capture.token_ids.size == capture.logprobs.size
    policies = [
        naive.policy(naive.decode(x), *map(float, parameters), filter_order=order)
        for x, *parameters in zip(*rows.filter_arguments(), strict=True)
    ]
    for b in range(batch):
        got = masks_of(capture, b)
        committed = verdict.num_committed[b]
        if not wanted[b]:
            assert capture.status[b] == OK
            assert capture.failed_row[b] == -1
            assert not got
            assert not capture.counts[b].any()
            continue
        for i, (ids, logprobs) in enumerate(got):  # what was used: same row, same number
            token = np.flatnonzero(ids == verdict.tokens[b, i])
            assert token.size == 1
            assert logprobs[token[0]] == verdict.logprobs[b, i]
            assert abs(np.exp(logprobs.astype(float)).sum() - 1) <= 2e-6
        own = policies[b * width : b * width + committed]
        if any(row.borderline for row in own):
            continue
        status, failed_row, want = naive.capture(own, committed, verdict.status[b], max_support)
        assert capture.status[b] == status
        assert capture.failed_row[b] == failed_row
        assert capture.counts[b].tolist() == [int(row.kept.sum()) for row in own] + [0] * (width - committed)
        assert len(got) == len(want)
        for (ids, logprobs), (want_ids, want_logprobs) in zip(got, want, strict=True):
            assert ids.tolist() == want_ids.tolist()
            assert np.abs(np.exp(logprobs.astype(float)) - np.exp(want_logprobs)).sum() <= 2e-6


@fuzz
@given(
    case=rounds(),
    order=st.sampled_from(FILTER_ORDERS),
    capacity=st.sampled_from([1, 8, 40000]),
    wanted=st.lists(st.booleans(), min_size=1, max_size=5),
    max_support=st.sampled_from([1, 4, 64, 40000]),
)
def test_capture_is_the_oracles(backend, case, order, capacity, wanted, max_support):
    check_capture(backend, case=case, order=order, capacity=capacity, wanted=wanted, max_support=max_support)


@fuzz
@given(
    rows=row_batches(),
    order=st.sampled_from(FILTER_ORDERS),
    k=st.integers(1, 40),
    capacity=st.integers(1, 40),
)
def test_top_logprobs_are_the_oracles(rows, order, k, capacity):
    support = HOST.select_support(*rows.filter_arguments(), filter_order=order, capacity=capacity)
    every = np.arange(len(rows.logits))[::-1]
    ids, values = top_logprobs(rows.logits, support, k, every.copy())
    for n, row in enumerate(every):
        x = naive.decode(rows.logits[row])
        want = naive.policy(x, *(float(a[row]) for a in rows.filter_arguments()[1:]), filter_order=order)
        if not want.valid:
            assert (ids[n] == -1).all()
            assert (values[n] == -np.inf).all()
        elif not want.borderline:
            want_ids, want_values = naive.top_logprobs(want, x, k)
            assert ids[n].tolist() == want_ids.tolist()
            want_values = np.where(want_ids >= 0, np.maximum(want_values, LOWEST), -np.inf)
            np.testing.assert_allclose(values[n], want_values, rtol=1e-7, atol=2e-6)


def test_selected_logprobs_and_captured_distributions_over_many_rows(backend):
    rng = np.random.default_rng(11)
    size, rows = 32001, 96
    x = np.stack([landscape("normal", size, rng) for _ in range(rows)])[:, None]
    parameters = [(1.0, 50, 0.95), (0.6, 1024, 1.0), (1.0, 0, 0.9), (1.5, 0, 1.0)]
    for temperature, top_k, top_p in parameters:
        support = select(backend, x, temperature, top_k, top_p)
        coins = rng.random((rows, 1)), rng.random((rows, 1))
        verdict = backend.verify_chain(x, support, np.empty((rows, 0), np.int32), np.zeros(rows, np.int32), *coins)
        capture = backend.capture_masks(x, support, verdict, np.ones(rows, bool), size)
        for b in range(rows):
            want = naive.policy(x[b, 0].astype(float), np.float32(temperature), top_k, np.float32(top_p))
            if want.borderline:
                continue
            assert abs(verdict.logprobs[b, 0] - want.logprobs[verdict.tokens[b, 0]]) <= 2e-6
            ((ids, logprobs),) = masks_of(capture, b)
            assert np.abs(np.exp(logprobs.astype(float)) - want.probs[ids]).sum() <= 2e-6


def test_an_overflow_fails_its_row_only(backend):
    rng = np.random.default_rng(12)
    x = np.stack([landscape("normal", 257, rng) for _ in range(6)]).reshape(3, 2, 257)
    x[1, 1] = 0.0  # a plateau: 257 ties at the top-k cutoff
    drafts = x.argmax(-1)[:, :1].astype(np.int32)
    support = select(backend, x, top_k=8, capacity=16)
    verdict = backend.verify_chain(x, support, drafts, ints(1, 1, 1), both(0.0, (3, 2)), both(0.5, (3, 2)))
    capture = backend.capture_masks(x, support, verdict, np.array([True, True, True]), 256)
    assert capture.status.tolist() == [OK, OVERFLOW, OK]
    assert capture.counts.tolist() == [[8, 8], [8, 257], [8, 8]]
    assert capture.failed_row.tolist() == [-1, 1, -1]
    assert capture.row_start.tolist() == [0, 2, 3, 5]
    assert capture.offsets.tolist() == [0, 8, 16, 24, 32, 40]
    complete = backend.capture_masks(x, support, verdict, np.array([False, True, False]), 257)
    assert [len(ids) for ids, _ in masks_of(complete, 1)] == [8, 257]


def test_the_first_failing_row_names_the_status(backend):
    """A row is INVALID or too large, never both; of two failing rows the first counts."""
    x = np.zeros((3, 2, 33), np.float32)
    x[0, 1, 0] = np.nan  # too large, then INVALID
    x[1, 0, 0] = np.nan  # INVALID at once, though its other logits tie
    x[2, 0, 5], x[2, 1, 0] = 100.0, np.inf  # a singleton by top_p, then INVALID
    support = select(backend, x, top_p=0.5)
    drafts = ints(3, 3, 5)[:, None]
    verdict = backend.verify_chain(x, support, drafts, ints(1, 1, 1), both(0.0, (3, 2)), both(0.5, (3, 2)))
    capture = backend.capture_masks(x, support, verdict, np.array([True, True, True]), 4)
    assert capture.status.tolist() == [OVERFLOW, INVALID, INVALID]
    assert capture.failed_row.tolist() == [0, 0, 1]
    assert capture.row_start.tolist() == [0, 0, 0, 1]
    assert capture.token_ids.tolist() == [5]


def test_nothing_wanted_is_nothing_done():
    x = np.zeros((2, 1, 33), np.float32)
    support = select(HOST, x)
    none = np.empty((2, 0), np.int32)
    verdict = HOST.verify_chain(x, support, none, ints(0, 0), both(0.0, (2, 1)), both(0.5, (2, 1)))
    capture = HOST.capture_masks(None, None, verdict, np.zeros(2, bool), 64)  # logits aren't even looked at
    assert capture.token_ids.size == 0
    assert capture.row_start.tolist() == [0, 0, 0]
    assert capture.offsets.tolist() == [0]


def test_log_probabilities_of_kept_tokens_are_finite():
    x = np.array([[[3e38, 0.0, -3e38, -np.inf]]], np.float32)
    ids, values = top_logprobs(x, select(HOST, x, temperature=1e-5), 4, np.array([0]))
    assert ids.tolist() == [[0, 1, 2, -1]]
    assert values.tolist() == [[0.0, LOWEST, LOWEST, -np.inf]]


def test_greedy_masks_are_singletons(backend):
    x = np.zeros((1, 1, 33), np.float32)
    support = select(backend, x, temperature=0.0)
    none = np.empty((1, 0), np.int32)
    verdict = backend.verify_chain(x, support, none, ints(0), both(0.0, (1, 1)), both(0.9, (1, 1)))
    ((ids, logprobs),) = masks_of(backend.capture_masks(x, support, verdict, np.array([True]), 1), 0)
    assert ids.tolist() == [0]
    assert logprobs.tolist() == [0.0]


def test_packing_into_larger_buffers():
    x = landscape("normal", 33, np.random.default_rng(13)).reshape(1, 33)
    support = select(HOST, x[None], top_k=5)
    ids, logprobs = np.full(20, -7, np.int32), np.full(20, -7, np.float32)
    pack_masks(logit_rows(x, 2), support, np.array([0]), np.array([0, 5]), ids, logprobs)
    assert ids[:5].tolist() == support.token_ids[0, :5].tolist()
    assert (ids[5:] == -7).all()
    with pytest.raises(ValueError, match="capacity=4, expected at least 5 entries"):
        pack_masks(logit_rows(x, 2), support, np.array([0]), np.array([0, 5]), ids[:4], logprobs)


def test_capture_changes_nothing(backend):
    x = landscape("normal", 257, np.random.default_rng(14)).reshape(1, 1, 257)
    support = select(backend, x, top_k=9)
    none = np.empty((1, 0), np.int32)
    arguments = none, ints(0), both(0.3, (1, 1)), both(0.7, (1, 1))
    before = x.copy()
    verdict = backend.verify_chain(x, support, *arguments)
    backend.capture_masks(x, support, verdict, np.array([True]), 64)
    np.testing.assert_array_equal(x, before)
    np.testing.assert_array_equal(backend.verify_chain(x, support, *arguments).tokens, verdict.tokens)

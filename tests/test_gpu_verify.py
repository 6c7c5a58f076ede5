"""verify_chain against the oracle."""

import numpy as np
import pytest
from hypothesis import assume, given
from hypothesis import strategies as st

from gpu import FILTER_ORDERS, INVALID, OK
from tests import naive
from tests.cases import keeps_failures
from tests.strategies import VOCABULARIES, alike, cast, fuzz, landscape, row_batches, unit


def select(backend, logits, temperature=1.0, top_k=0, top_p=1.0, capacity=None):
    """Support of float32 logits [B, W, V], one setting for all rows."""
    rows = logits.shape[0] * logits.shape[1]
    return backend.select_support(
        logits.reshape(rows, -1),
        np.full(rows, temperature, np.float32),
        np.full(rows, top_k, np.int32),
        np.full(rows, top_p, np.float32),
        capacity=capacity or logits.shape[2],
    )


def ints(*values):
    return np.array(values, np.int32)


def both(value, shape):
    return np.full(shape, value, np.float64)


@st.composite
def rounds(draw, vocabularies=VOCABULARIES):
    """Rows of B requests, drafts, uniforms and perhaps proposals."""
    kinds, width = draw(st.integers(1, 3)), draw(st.integers(1, 4))
    size = draw(st.sampled_from(vocabularies))
    copies = draw(alike(size))
    batch = kinds * copies
    rows = draw(row_batches(kinds=kinds * width, vocabularies=[size], copies=copies))
    rng = np.random.default_rng(draw(st.integers(0, 2**32)))
    likely = np.array([np.argmax(np.nan_to_num(naive.decode(row), nan=0)) for row in rows.logits])
    drafts = np.where(rng.random(batch * width) < 0.6, likely, rng.integers(size, size=batch * width))
    drafts = drafts.reshape(batch, width)[:, : width - 1].astype(np.int32)
    num_drafts = rng.integers(0, width, batch).astype(np.int32)
    chance = st.lists(unit, min_size=kinds * width, max_size=kinds * width)
    coins = []
    for _ in range(2):
        tossed = rng.random((batch, width))
        tossed[rng.random((batch, width)) < 0.1] = 0
        tossed[rng.random((batch, width)) < 0.1] = 1 - 2**-53
        tossed[:kinds] = np.array(draw(chance)).reshape(kinds, width)
        coins.append(tossed)
    proposal = None
    if draw(st.booleans()):
        proposal = rng.random((batch, width - 1, size)).astype(np.float32) ** 8 + np.float32(1e-6)
        if draw(st.booleans()):  # near the policies, and what is drawn from it: a block is kept by halves
            x = np.nan_to_num(naive.decode(rows.logits), nan=0, posinf=9, neginf=-99).reshape(batch, width, size)
            proposal = rng.random(proposal.shape).astype(np.float32) + np.float32(0.3)
            heat = np.maximum(rows.temperature.reshape(batch, width)[:, :1, None], 0.1)
            proposal *= np.exp(np.clip((x - x.max(-1, keepdims=True)) / heat, -20, 0))[:, :-1].astype(np.float32)
            proposal += np.float32(1e-9)
        proposal /= proposal.sum(-1, keepdims=True)
        if draw(st.booleans()):
            edges = proposal.cumsum(-1, dtype=np.float64)
            drafts = (edges < rng.random((batch, width - 1, 1))).sum(-1).clip(max=size - 1).astype(np.int32)
        if draw(st.booleans()) and proposal.size:
            proposal[rng.integers(batch), rng.integers(width - 1), rng.integers(size)] = 0
    return rows, batch, width, drafts, np.ascontiguousarray(num_drafts), coins, proposal


@keeps_failures
def check_verdict(backend, case, order):
    rows, batch, width, drafts, num_drafts, coins, proposal = case
    size = rows.logits.shape[1]
    support = backend.select_support(*rows.filter_arguments(), filter_order=order, capacity=size)
    logits = rows.logits.reshape(batch, width, size)
    verdict = backend.verify_chain(logits, support, drafts, num_drafts, *coins, proposal)
    policies = [
        naive.policy(naive.decode(x), *map(float, parameters), filter_order=order)
        for x, *parameters in zip(*rows.filter_arguments(), strict=True)
    ]
    for b in range(batch):
        own = policies[b * width : (b + 1) * width]
        want = naive.verify(
            own, drafts[b], num_drafts[b], coins[0][b], coins[1][b], None if proposal is None else proposal[b]
        )
        committed = verdict.num_committed[b]
        tokens = verdict.tokens[b, :committed].tolist()
        assert (verdict.tokens[b, committed:] == -1).all()
        assert np.isnan(verdict.logprobs[b, committed:]).all()
        assert verdict.num_accepted[b] == committed - (verdict.status[b] == OK)
        for i, token in enumerate(tokens):
            if not own[i].borderline:
                assert own[i].kept[token]
                assert abs(verdict.logprobs[b, i] - own[i].logprobs[token]) <= 2e-6
        if not want.borderline:
            assert tokens == want.tokens
            assert verdict.num_accepted[b] == want.num_accepted
            assert (verdict.status[b], verdict.error_row[b]) == (want.status, want.error_row)


@fuzz
@given(case=rounds(), order=st.sampled_from(FILTER_ORDERS))
def test_verdict_is_the_oracles(backend, case, order):
    check_verdict(backend, case=case, order=order)


@fuzz
@given(case=rounds(), order=st.sampled_from(FILTER_ORDERS), capacity=st.integers(1, 20), data=st.data())
def test_neither_batch_nor_capacity_changes_a_verdict(backend, case, order, capacity, data):
    rows, batch, width, drafts, num_drafts, coins, proposal = case
    size = rows.logits.shape[1]
    logits = rows.logits.reshape(batch, width, size)
    support = backend.select_support(*rows.filter_arguments(), filter_order=order, capacity=size)
    whole = backend.verify_chain(logits, support, drafts, num_drafts, *coins, proposal)
    b = data.draw(st.integers(0, batch - 1))
    one = slice(b * width, (b + 1) * width)
    small = backend.select_support(*(a[one] for a in rows.filter_arguments()), filter_order=order, capacity=capacity)
    alone = backend.verify_chain(
        logits[b : b + 1],
        small,
        drafts[b : b + 1],
        num_drafts[b : b + 1],
        *(coin[b : b + 1] for coin in coins),
        None if proposal is None else proposal[b : b + 1],
    )
    for name in ("num_accepted", "num_committed", "tokens", "logprobs", "status", "error_row"):
        np.testing.assert_array_equal(getattr(alone, name)[0], getattr(whole, name)[b])


@fuzz
@given(uniform=unit, seed=st.integers(0, 2**32), size=st.sampled_from([33, 257, 32001]))
def test_a_filter_that_keeps_all_changes_no_token(backend, uniform, seed, size):
    x = landscape("normal", size, np.random.default_rng(seed)).reshape(1, 1, size)
    none = np.empty((1, 0), np.int32)
    coins = both(uniform, (1, 1)), both(uniform, (1, 1))
    filtered = select(backend, x, top_k=size - 1)
    assume(filtered.count[0] == size - 1)
    lowest = x.argmin()
    with_filter = backend.verify_chain(x, filtered, none, ints(0), *coins)
    assert with_filter.tokens[0, 0] != lowest
    unfiltered = [select(backend, x, capacity=capacity) for capacity in (size, 1)]
    tokens = [backend.verify_chain(x, support, none, ints(0), *coins).tokens for support in unfiltered]
    np.testing.assert_array_equal(*tokens)


@pytest.mark.parametrize("with_proposal", [False, True])
def test_a_token_of_probability_0_is_never_committed(backend, with_proposal):
    x = np.array([-np.inf, -1000.0, 2.0, -np.inf, 1.0, 0.0, -1000.0, -np.inf], np.float32)
    x = np.tile(x, (1, 2, 1))
    support = select(backend, x, top_k=7)
    assert support.token_ids[0, : support.count[0]].tolist() == [1, 2, 4, 5, 6]
    proposal = np.full((1, 1, 8), 0.125, np.float32) if with_proposal else None
    for draft in range(8):
        for uniform in (0.0, 1e-300, 0.5, 1 - 2**-53):
            coins = both(0.0, (1, 2)), both(uniform, (1, 2))
            verdict = backend.verify_chain(x, support, ints(draft)[None], ints(1), *coins, proposal)
            assert set(verdict.tokens[0, : verdict.num_committed[0]]) <= {2, 4, 5}
            assert verdict.num_accepted[0] == (draft in (2, 4, 5))
            assert np.isfinite(verdict.logprobs[0, : verdict.num_committed[0]]).all()


def test_ends_of_the_inverse_cdf(backend):
    x = np.array([-np.inf, 0.0, 0.0, -200.0], np.float32).reshape(1, 1, 4)
    none = np.empty((1, 0), np.int32)
    for uniform, token in ((0.0, 1), (0.499999, 1), (0.5, 2), (1 - 2**-53, 2)):
        for capacity in (4, 1):
            coins = both(uniform, (1, 1)), both(uniform, (1, 1))
            assert (
                backend.verify_chain(x, select(backend, x, capacity=capacity), none, ints(0), *coins).tokens[0, 0]
                == token
            )


def test_a_certain_draft_is_accepted(backend):
    x = np.array([[[0.0, -np.inf], [0.0, 0.0]]], np.float32)
    for uniform in (0.0, 1 - 2**-53):
        coins = both(uniform, (1, 2)), both(uniform, (1, 2))
        assert backend.verify_chain(x, select(backend, x), ints(0)[None], ints(1), *coins).num_accepted[0] == 1


def test_target_only_rejection_excludes_the_draft(backend):
    x = np.array([[[2.0, 1.0, 0.0], [0.0, 0.0, 0.0]]], np.float32)
    for uniform in np.linspace(0, 1, 50, endpoint=False):
        coins = both(1 - 2**-53, (1, 2)), both(uniform, (1, 2))
        verdict = backend.verify_chain(x, select(backend, x), ints(0)[None], ints(1), *coins)
        assert verdict.num_accepted[0] == 0
        assert verdict.tokens[0, 0] == (1 if uniform < np.e / (np.e + 1) else 2)
        assert verdict.logprobs[0, 0] == pytest.approx(
            naive.policy(x[0, 0].astype(float), 1, 0, 1).logprobs[verdict.tokens[0, 0]], abs=2e-6
        )


def test_a_residual_of_0_draws_from_the_target(backend):
    x = np.array([[[0.0, 0.0, 0.0, 0.0], [0.0] * 4]], np.float32)
    proposal = np.full((1, 1, 4), np.float32(0.25) * np.float32(1 + 1e-6), np.float32)
    coins = both(1 - 2**-53, (1, 2)), np.array([[0.6, 0.6]])
    verdict = backend.verify_chain(x, select(backend, x), ints(3)[None], ints(1), *coins, proposal)
    assert verdict.num_accepted[0] == 0
    assert verdict.tokens[0, 0] == 2


def test_greedy_rows_take_the_argmax(backend):
    x = landscape("ties", 257, np.random.default_rng(7)).reshape(1, 1, 257).repeat(3, 1)
    best = int(x[0, 0].argmax())
    proposal = np.full((1, 2, 257), 1 / 257, np.float32)
    for draft_probs in (None, proposal):
        for first, kept in ((best, 2), (best - 1, 0)):
            for uniform in (0.0, 1 - 2**-53):
                coins = both(uniform, (1, 3)), both(uniform, (1, 3))
                support = select(backend, x, temperature=0.0, capacity=1)
                verdict = backend.verify_chain(x, support, ints(first, best)[None], ints(2), *coins, draft_probs)
                assert verdict.num_accepted[0] == kept
                assert set(verdict.tokens[0, : kept + 1].tolist()) == {best}
                assert (verdict.logprobs[0, : kept + 1] == 0).all()


def test_errors_end_their_request_only(backend):
    rng = np.random.default_rng(8)
    x = np.stack([landscape("normal", 33, rng) for _ in range(12)]).reshape(4, 3, 33)
    drafts = x.argmax(-1)[:, :2].astype(np.int32)
    proposal = np.full((4, 2, 33), 1 / 33, np.float32)
    x[0, 1, 4] = np.nan
    proposal[1, 0, drafts[1, 0]] = 0
    proposal[2, 1, drafts[2, 1]] = np.nan
    coins = both(0.0, (4, 3)), both(0.3, (4, 3))
    verdict = backend.verify_chain(x, select(backend, x), drafts, ints(2, 2, 2, 2), *coins, proposal)
    assert verdict.status.tolist() == [INVALID, INVALID, INVALID, OK]
    assert verdict.error_row.tolist() == [1, 0, 1, -1]
    assert verdict.num_committed.tolist() == [1, 0, 1, 3]
    drafts[3, 1] = 33
    drafts[2, 0] = -1
    x[1, 2] = np.inf  # never reached: only one draft
    verdict = backend.verify_chain(x, select(backend, x), drafts, ints(2, 1, 2, 2), *coins)
    assert verdict.error_row.tolist() == [1, -1, 0, 1]


def test_rows_past_the_drafts_are_never_read(backend):
    x = landscape("normal", 33, np.random.default_rng(9)).reshape(1, 1, 33).repeat(4, 1)
    x[0, 2:] = np.nan
    coins = both(0.0, (1, 4)), both(0.5, (1, 4))
    drafts = ints(int(x[0, 0].argmax()), -1, -1)[None]
    verdict = backend.verify_chain(x, select(backend, x), drafts, ints(1), *coins)
    assert verdict.status[0] == OK
    assert verdict.num_committed[0] == 2


def test_strided_requests_and_half_types(backend):
    rng = np.random.default_rng(10)
    x = np.stack([landscape("ties", 257, rng) for _ in range(12)]).reshape(3, 4, 257)
    drafts = x.argmax(-1)[:, :2].astype(np.int32)
    coins = rng.random((3, 3)), rng.random((3, 3))
    arguments = drafts, ints(2, 2, 2), *coins
    want = backend.verify_chain(np.ascontiguousarray(x[:, 1:]), select(backend, x[:, 1:]), *arguments)
    for dtype in ("float32", "float16", "bfloat16"):  # small integers are exact in all
        y = cast(x, dtype)[:, 1:]
        support = backend.select_support(
            y.reshape(9, 257),
            np.ones(9, np.float32),
            np.zeros(9, np.int32),
            np.ones(9, np.float32),
            capacity=9,
        )
        got = backend.verify_chain(y, support, *arguments)
        np.testing.assert_array_equal(got.tokens, want.tokens)
        np.testing.assert_array_equal(got.logprobs, want.logprobs)

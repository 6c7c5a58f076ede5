"""select_support against the oracle."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from gpu import FILTER_ORDERS, INVALID, OK
from tests import naive
from tests.cases import keeps_failures
from tests.strategies import cast, fuzz, landscape, row_batches


def select(backend, logits, temperature=1.0, top_k=0, top_p=1.0, min_p=None, order="top_k_first", capacity=None):
    """One setting for all rows of float32 logits [R, V]."""
    logits = np.atleast_2d(logits)
    rows = len(logits)
    return backend.select_support(
        logits,
        np.full(rows, temperature, np.float32),
        np.full(rows, top_k, np.int32),
        np.full(rows, top_p, np.float32),
        None if min_p is None else np.full(rows, min_p, np.float32),
        filter_order=order,
        capacity=capacity or logits.shape[1],
    )


def kept(support, row=0):
    assert support.count[row] <= support.capacity
    return support.token_ids[row, : support.count[row]].tolist()


def probabilities(support, row=0):
    return support.weights[row, : support.count[row]].astype(float) / float(support.total[row])


def log(probs):
    return np.log(np.array(probs, np.float64)).astype(np.float32)


def assert_matches_oracle(logits, arguments, order, support):
    for row in range(len(logits)):
        values = naive.decode(logits[row])
        want = naive.policy(values, *(float(a[row]) for a in arguments), filter_order=order)
        assert support.status[row] == (OK if want.valid else INVALID)
        if not want.valid:
            assert support.count[row] == 0
            assert support.argmax[row] == -1
            continue
        assert support.argmax[row] == np.flatnonzero(values == values.max())[0]
        assert support.greedy[row] == want.greedy
        assert support.maximum[row] == values.max()
        if want.borderline:
            continue
        assert kept(support, row) == np.flatnonzero(want.kept).tolist()
        assert support.cutoff[row] == values[want.kept].min()
        weights = support.weights[row, : support.count[row]]
        assert int(support.total[row]) == sum(map(int, weights))
        assert np.abs(probabilities(support, row) - want.probs[want.kept]).sum() <= 2e-6


@keeps_failures
def check_support(backend, rows, order):
    support = backend.select_support(*rows.filter_arguments(), filter_order=order, capacity=rows.logits.shape[1])
    assert_matches_oracle(rows.logits, rows.filter_arguments()[1:], order, support)


@fuzz
@given(rows=row_batches(), order=st.sampled_from(FILTER_ORDERS))
def test_support_is_the_oracles(backend, rows, order):
    check_support(backend, rows=rows, order=order)


@fuzz
@given(rows=row_batches(), order=st.sampled_from(FILTER_ORDERS), data=st.data())
def test_a_row_depends_on_itself_only(backend, rows, order, data):
    size = rows.logits.shape[1]
    whole = backend.select_support(*rows.filter_arguments(), filter_order=order, capacity=size)
    pick = np.array(data.draw(st.lists(st.integers(0, len(rows.logits) - 1), min_size=1, max_size=4)))
    lead = data.draw(st.integers(0, 3))
    wide = np.zeros((len(pick), 2, lead + size + 3), rows.logits.dtype)
    strided = wide[:, 1, lead : lead + size]
    strided[:] = rows.logits[pick]
    some = backend.select_support(
        strided, *(a[pick] for a in rows.filter_arguments()[1:]), filter_order=order, capacity=size
    )
    for name in ("status", "maximum", "cutoff", "total", "count", "argmax", "greedy"):
        np.testing.assert_array_equal(getattr(some, name), getattr(whole, name)[pick])
    for i, row in enumerate(pick):
        assert kept(some, i) == kept(whole, row)
        np.testing.assert_array_equal(probabilities(some, i), probabilities(whole, row))


@fuzz
@given(rows=row_batches(), capacity=st.integers(1, 40), order=st.sampled_from(FILTER_ORDERS))
def test_capacity_changes_no_number(backend, rows, capacity, order):
    size = rows.logits.shape[1]
    large = backend.select_support(*rows.filter_arguments(), filter_order=order, capacity=size)
    small = backend.select_support(*rows.filter_arguments(), filter_order=order, capacity=capacity)
    for name in ("status", "maximum", "cutoff", "total", "count", "argmax", "greedy"):
        np.testing.assert_array_equal(getattr(small, name), getattr(large, name))
    for row in np.flatnonzero(large.count <= capacity):
        assert kept(small, row) == kept(large, row)


@pytest.mark.parametrize("size", [151936, 248320, 262144])
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("order", FILTER_ORDERS)
def test_full_size_vocabularies(backend, size, dtype, order):
    rng = np.random.default_rng(size)
    kinds = ("normal", "ties", "holes", "flat")
    settings = [(0.7, 64, 0.95, 0.0), (1.0, 1024, 0.9, 0.0), (1.0, 0, 0.95, 0.0), (1.3, 0, 1.0, 0.01)]
    logits = cast(np.stack([landscape(kind, size, rng) for kind in kinds for _ in settings]), dtype)
    columns = np.array(settings * len(kinds)).T
    arguments = [column.astype(kind) for column, kind in zip(columns, ("f4", "i4", "f4", "f4"), strict=True)]
    support = backend.select_support(logits, *arguments, filter_order=order, capacity=size)
    assert_matches_oracle(logits, arguments, order, support)


@pytest.mark.parametrize("dtype", ["float32", "float16", "bfloat16"])
@pytest.mark.parametrize("scale", [1e-6, 1e-3, 1.0, 300.0, 2000.0])
def test_logits_of_any_size(backend, scale, dtype):
    """Candidates are found in bins that are fine where logits lie as a rule, and coarse elsewhere."""
    x = landscape("normal", 40000, np.random.default_rng(3)) * np.float32(scale)
    logits = np.stack([cast(row, dtype) for row in (x, -np.abs(x), np.float32(scale) * 10 + x)])
    arguments = [np.full(3, value, kind) for value, kind in ((scale, np.float32), (64, np.int32), (0.9, np.float32))]
    arguments.append(np.zeros(3, np.float32))
    support = backend.select_support(logits, *arguments, filter_order="top_k_first", capacity=200)
    assert_matches_oracle(logits, arguments, "top_k_first", support)
    assert (support.status == OK).all()


def test_the_orders_differ(backend):
    probs = [0.35, 0.25, 0.20, 0.05, 0.03] + [0.012] * 10
    assert kept(select(backend, log(probs), top_k=4, top_p=0.82, order="joint")) == [0, 1, 2, 3]
    assert kept(select(backend, log(probs), top_k=4, top_p=0.82)) == [0, 1, 2]
    joint = select(backend, log([0.5, 0.3, 0.2]), top_k=2, top_p=0.55, order="joint")
    assert kept(joint) == [0, 1]
    np.testing.assert_allclose(probabilities(joint), [0.625, 0.375], atol=1e-6)
    assert kept(select(backend, log([0.5, 0.3, 0.2]), top_k=2, top_p=0.55)) == [0]


def test_ties_survive_both_cutoffs(backend):
    assert kept(select(backend, log([0.4, 0.2, 0.2, 0.1, 0.1]), top_k=2)) == [0, 1, 2]
    assert kept(select(backend, log([0.1, 0.2, 0.4, 0.2, 0.1]), top_p=0.5)) == [1, 2, 3]
    assert kept(select(backend, np.zeros(1000, np.float32), top_k=5, top_p=0.1)) == list(range(1000))
    assert kept(select(backend, np.array([-0.0, 0.0, -0.0, -1.0], np.float32), top_k=2)) == [0, 1, 2]


@pytest.mark.parametrize("order", FILTER_ORDERS)
@pytest.mark.parametrize("size", [257, 5000])
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_both_zeros_are_one_value(backend, dtype, size, order):
    """The k-th largest logit is a zero: zeros of either sign count, and weigh in the mass that top_p cuts."""
    rng = np.random.default_rng(size)
    logits = rng.choice(np.array([0.0, -0.0, 1.5, -2.0], np.float32), (6, size), p=[0.3, 0.3, 0.1, 0.3])
    logits[3:] = np.minimum(logits[3:], -0.0)  # and the largest is one
    logits[4, logits[4] == 0] = -0.0
    logits = cast(logits, dtype)
    k, top_p = np.full(6, size // 4, np.int32), np.array([0.5, 0.75, 1.0] * 2, np.float32)
    arguments = np.ones(6, np.float32), k, top_p, np.zeros(6, np.float32)
    support = backend.select_support(logits, *arguments, filter_order=order, capacity=size)
    assert_matches_oracle(logits, arguments, order, support)


@pytest.mark.parametrize("top_p", [0.1, 0.5, 0.9, 0.95, 0.999])
@pytest.mark.parametrize("order", FILTER_ORDERS)
def test_the_crossing_token_is_kept(backend, top_p, order):
    x = landscape("normal", 5000, np.random.default_rng(1))
    probs = naive.policy(x.astype(float), 1.0, 0, 1.0).probs
    ids = kept(select(backend, x, top_p=top_p, order=order))
    assert probs[ids].sum() >= np.float32(top_p)
    assert probs[ids].sum() - probs[ids].min() < np.float32(top_p)


@pytest.mark.parametrize("order", FILTER_ORDERS)
def test_top_p_1_is_the_identity_beside_rows_that_filter(backend, order):
    x = np.stack([landscape("steep", 32001, np.random.default_rng(2))] * 3)
    x[:, 7] = x.max() - 300  # far below any float32 mass
    one, k, p = np.ones(3, np.float32), np.zeros(3, np.int32), np.array([1.0, 0.5, 0.999999], np.float32)
    support = backend.select_support(x, one, k, p, filter_order=order, capacity=32001)
    assert kept(support, 0) == list(range(32001))
    assert support.total[0] == support.weights[0].sum()
    alone = select(backend, x[0])
    np.testing.assert_array_equal(alone.weights[0], support.weights[0])
    assert alone.total[0] == support.total[0]


def test_top_p_just_below_1(backend):
    x = landscape("normal", 151936, np.random.default_rng(3))
    top_p = np.float32(0.999999)
    want = naive.policy(x.astype(float), 1.0, 0, top_p)
    # Thousands of tiny tokens lie within rounding of the cutoff, so masses are compared.
    ids = kept(select(backend, x, top_p=top_p))
    whole = naive.policy(x.astype(float), 1.0, 0, 1.0).probs
    assert abs(len(ids) - want.kept.sum()) <= 0.01 * want.kept.sum()
    assert whole[ids].sum() >= top_p - 1e-7


def test_top_k_of_the_vocabulary_or_more_keeps_all(backend):
    x = landscape("normal", 257, np.random.default_rng(4))
    for top_k in (0, 257, 258, 2**31 - 1):
        assert kept(select(backend, x, top_k=top_k)) == list(range(257))
    assert len(kept(select(backend, x, top_k=256))) == 256


def test_holes_and_one_hot(backend):
    x = np.full(33, -np.inf, np.float32)
    x[[5, 20]] = [1.0, 2.0]
    for arguments in ({}, {"top_k": 3}, {"top_p": 0.99999}, {"top_k": 32, "top_p": 0.99999}):
        assert kept(select(backend, x, **arguments)) == [5, 20]
    x[5] = -np.inf
    support = select(backend, x, top_p=0.5)
    assert kept(support) == [20]
    assert support.total[0] == 1 << 44


def test_bad_rows_leave_their_neighbours_alone(backend):
    rng = np.random.default_rng(5)
    x = np.stack([landscape("normal", 257, rng) for _ in range(6)])
    clean = select(backend, x, top_k=10, top_p=0.9)
    x[0, 3], x[2, 256], x[3] = np.nan, np.inf, -np.inf
    x[5, 0] = -np.nan
    support = select(backend, x, top_k=10, top_p=0.9)
    assert support.status.tolist() == [INVALID, OK, INVALID, INVALID, OK, INVALID]
    for row in (1, 4):
        assert kept(support, row) == kept(clean, row)
        assert support.total[row] == clean.total[row]
    assert select(backend, x, temperature=0.0).status.tolist() == support.status.tolist()


def test_greedy_rows(backend):
    x = np.array([[1.0, 3.0, 3.0, 2.0], [0.0, -0.0, 0.0, -1.0]], np.float32)
    for arguments in ({"temperature": 0.0}, {"temperature": 9e-6}, {"top_k": 1}):
        support = select(backend, x, **arguments)
        assert support.greedy.all()
        assert [kept(support, row) for row in (0, 1)] == [[1], [0]]
    assert not select(backend, x, temperature=1e-5).greedy.any()
    assert kept(select(backend, x, temperature=1e-5, top_k=2)) == [1, 2]  # not greedy: the tie survives


def test_kept_tokens_of_vanishing_weight_stay(backend):
    x = np.array([0.0, -100.0, -50.0, -np.inf], np.float32)
    support = select(backend, x, top_k=3)
    assert kept(support) == [0, 1, 2]
    assert support.weights[0, :3].tolist() == [1 << 44, 0, 0]


def test_min_p_is_an_intersection_applied_last(backend):
    x = log([0.5, 0.25, 0.125, 0.0625, 0.0625])
    assert kept(select(backend, x, min_p=0.3)) == [0, 1]
    assert kept(select(backend, x, top_k=1, min_p=0.3)) == [0]
    assert kept(select(backend, x, top_p=0.8, min_p=0.1)) == [0, 1, 2]
    assert kept(select(backend, x, min_p=0.0)) == [0, 1, 2, 3, 4]
    x = np.array([0.0, np.log(0.5)], np.float32)  # float32 log 0.5 lies above the float64 one: kept
    assert kept(select(backend, x, min_p=0.5)) == ([0, 1] if float(x[1]) >= np.log(0.5) else [0])


def test_read_only_logits(backend):
    x = landscape("normal", 257, np.random.default_rng(6))[None]
    want = kept(select(backend, x, top_k=9))
    x.setflags(write=False)
    assert kept(select(backend, x, top_k=9)) == want


@fuzz
@given(
    size=st.sampled_from([33, 1000, 32001]),
    peaks=st.integers(1, 40),
    height=st.sampled_from([0.0, 6.0, 12.0, 14.0, 16.0, 20.0, 40.0]),
    spread=st.sampled_from([0.0, 0.5, 3.0]),
    holes=st.sampled_from([0.0, 0.5, 0.999]),
    temperature=st.sampled_from([0.3, 1.0, 2.0, 1e30]),
    rank=st.integers(0, 45),
    ulps=st.sampled_from([-1, 0, 1]),
    seed=st.integers(0, 2**32),
)
def test_the_crossing_is_exact_where_the_mass_is_only_bounded(
    backend, size, peaks, height, spread, holes, temperature, rank, ulps, seed
):
    """Rows of a few likely tokens over a tail, in integers: kept is what has less than top_p * Z above it.

    top_p is the mass down to some token, or one float32 beside it, so that any slack in a bound decides wrongly.
    """
    rng = np.random.default_rng(seed)
    x = rng.normal(size=size).astype(np.float32) * np.float32(spread)
    x[rng.random(size) < holes] = -np.inf
    x[rng.choice(size, min(peaks, size), replace=False)] = height - rng.exponential(2.0, min(peaks, size))
    whole = select(backend, x, temperature)
    weights = np.zeros(size, np.int64)
    weights[whole.token_ids[0, : whole.count[0]]] = whole.weights[0, : whole.count[0]]
    order = np.argsort(-x, kind="stable")
    top_p = np.float32(weights[order][: rank + 1].sum() / weights.sum())
    top_p = np.clip(top_p + ulps * np.spacing(top_p), np.float32(1e-6), np.float32(1 - 2**-24))
    above = np.concatenate([[0], np.cumsum(weights[order])[:-1]])
    above = above[np.searchsorted(-x[order], -x[order], side="left")]  # of tied tokens the same
    crossed = above.astype(np.float64) < np.float64(top_p) * np.float64(weights.sum())
    want = np.sort(order[crossed & (x[order] > -np.inf)])
    assert kept(select(backend, x, temperature, top_p=top_p)) == want.tolist()

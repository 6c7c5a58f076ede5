"""The kernels' twins on one thread, as every other test runs them, and on several: the same bits."""

import dataclasses

import numba
import numpy as np
import pytest

import gpu
from tests import device_adjust, device_restrict
from tests.backends import HOST, assert_same
from tests.rounds import make_proposal, make_round

MOST = numba.config.NUMBA_NUM_THREADS
pytestmark = pytest.mark.skipif(MOST < 2, reason="one thread is all there is")


def on_threads(count, work):
    before = numba.get_num_threads()
    numba.set_num_threads(count)
    try:
        return work()
    finally:
        numba.set_num_threads(before)


def agree(work):
    """What work() returns on one thread, having been the same on several, five times: arrays, or records of them."""
    want = on_threads(1, work)
    for count in {2, MOST}:
        for _ in range(5):
            for got, expected in zip(on_threads(count, work), want, strict=True):
                if dataclasses.is_dataclass(expected):
                    assert_same(got, expected)
                else:
                    np.testing.assert_array_equal(got, expected)
    return want


@pytest.mark.parametrize(("order", "dtype"), [("top_k_first", "float32"), ("joint", "bfloat16")])
def test_a_round(order, dtype):
    round_ = make_round(7, 16, 5, 700, dtype, num_poisoned=3)
    exact = HOST.select_support(round_.rows, *round_.parameters, filter_order=order, capacity=700)
    proposal = make_proposal(7, round_, exact, dtype)
    support, _, _ = agree(
        lambda: gpu.run_round(
            round_.logits, *round_.parameters, round_.drafts, round_.num_drafts, *round_.coins, round_.wanted, 350,
            proposal, filter_order=order, capacity=300,
        )
    )  # fmt: skip
    agree(lambda: gpu.top_logprobs(round_.logits, support, 7, np.arange(80)))


@pytest.mark.parametrize("slots", [False, True])
def test_adjusted_logits(slots):
    rng = np.random.default_rng(8)
    batch, width, size = 12, 4, 300
    logits = rng.standard_normal((batch, width, size)).astype(np.float32)
    drafts = rng.integers(0, size, (batch, width - 1)).astype(np.int32)
    num_drafts = np.full(batch, width - 1, np.int32)
    history = (device_adjust.random_slots(rng, batch, size), device_adjust.random_history(rng, batch, 90, size))[
        not slots
    ]
    values = zip(device_adjust.PENALTIES, (1.3, 0.7, 0.4), strict=True)
    penalties = {name: np.full(batch, value, np.float32) for name, value in values}
    bias = None if slots else device_adjust.random_bias(rng, batch, 9, size, False)

    def work():
        out = logits.copy()
        gpu.adjust_logits(out, drafts, num_drafts, history=history, logit_bias=bias, **penalties)
        return [out]

    agree(work)


def test_restricted_logits():
    rng = np.random.default_rng(9)
    logits, allowed, rows = device_restrict.random_case(rng, 12, 4, 300, 5, "float32", 0.5)

    def work():
        out = logits.copy()
        gpu.restrict_logits(out, allowed, rows)
        return [out]

    agree(work)


def test_looked_up_drafts():
    tokens = np.random.default_rng(10).integers(0, 3, (40, 90)).astype(np.int32)
    agree(lambda: gpu.prompt_lookup(tokens, np.full(40, 90, np.int32), 5, max_ngram=4))


def test_a_loss():
    rng = np.random.default_rng(11)
    rows, size = 64, 500
    offsets = np.concatenate([[0], np.cumsum(rng.integers(1, 90, rows))]).astype(np.int64)
    ids = np.concatenate([np.sort(rng.permutation(size)[:n]) for n in np.diff(offsets)]).astype(np.int32)
    logits, temperature = rng.standard_normal((rows, size)).astype(np.float32), np.full(rows, 0.7)
    (entries,) = agree(lambda: [gpu.support_log_softmax(logits, ids, offsets, temperature)])

    def gradient():
        out = np.zeros_like(logits)
        gpu.support_log_softmax_backward(entries, np.ones_like(entries), ids, offsets, temperature, out)
        return [out]

    agree(gradient)
    agree(lambda: [gpu.row_sums(entries, offsets)])

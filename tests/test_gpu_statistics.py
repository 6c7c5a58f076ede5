"""The law of committed tokens: pooled over accepted and replaced, it is the row's policy.

Seeds are fixed, so a test gives one answer. Its chi-square would exceed the limit with probability 1e-6 for a
sound kernel under a fresh seed.
"""

import numpy as np
import pytest
from scipy.stats import chi2

from gpu import ACCEPT, DRAW, PROPOSAL, uniforms
from tests import naive

FALSE_ALARMS = 1e-6
TRIALS = 40_000
SIZE = 12


def chi_square_is_fine(tokens, probs):
    counts = np.bincount(tokens, minlength=probs.size)
    assert counts[probs == 0].sum() == 0
    expected = probs[probs > 0] * tokens.size
    statistic = ((counts[probs > 0] - expected) ** 2 / expected).sum()
    return statistic < chi2.isf(FALSE_ALARMS, (probs > 0).sum() - 1)


def case(backend, temperature, top_k, top_p):
    """Two rows of logits, their policies and supports, repeated TRIALS times."""
    x = (np.random.default_rng(21).normal(size=(2, SIZE)) * 1.5).astype(np.float32)
    policies = [naive.policy(row.astype(float), temperature, top_k, np.float32(top_p)) for row in x]
    logits = np.broadcast_to(x, (TRIALS, 2, SIZE))
    rows = 2 * TRIALS
    support = backend.select_support(
        np.ascontiguousarray(logits).reshape(rows, SIZE),
        np.full(rows, temperature, np.float32),
        np.full(rows, top_k, np.int32),
        np.full(rows, top_p, np.float32),
        capacity=SIZE,
    )
    return logits, policies, support


def coins(purpose):
    return uniforms(np.arange(TRIALS, dtype=np.uint64), np.full(TRIALS, 5), 2, purpose)


SETTINGS = [(1.0, 0, 1.0), (0.8, 6, 1.0), (1.3, 0, 0.8)]


@pytest.mark.parametrize("setting", SETTINGS)
@pytest.mark.parametrize("draft", [0, 3, 7])
def test_target_only(backend, setting, draft):
    logits, policies, support = case(backend, *setting)
    drafts = np.full((TRIALS, 1), draft, np.int32)
    verdict = backend.verify_chain(logits, support, drafts, np.ones(TRIALS, np.int32), coins(ACCEPT), coins(DRAW))
    assert chi_square_is_fine(verdict.tokens[:, 0], policies[0].probs)
    accepted = verdict.num_accepted == 1
    assert abs(accepted.mean() - policies[0].probs[draft]) < 0.02
    if accepted.any():  # the bonus token, given that the draft was accepted
        assert chi_square_is_fine(verdict.tokens[accepted, 1], policies[1].probs)


@pytest.mark.parametrize("setting", SETTINGS)
@pytest.mark.parametrize("closeness", [0.0, 0.9])
@pytest.mark.parametrize("options", [{}, {"threshold_acc": 1 - 2**-40}], ids=["as a block", "draft by draft"])
def test_with_draft_probs(backend, setting, closeness, options):
    logits, policies, support = case(backend, *setting)
    other = np.random.default_rng(22).dirichlet(np.ones(SIZE))
    proposal = (closeness * policies[0].probs + (1 - closeness) * other).astype(np.float32)
    drafts = np.searchsorted(np.cumsum(proposal.astype(float)), coins(PROPOSAL)[:, :1])
    drafts = np.minimum(drafts, SIZE - 1).astype(np.int32)
    draft_probs = np.broadcast_to(proposal, (TRIALS, 1, SIZE))
    verdict = backend.verify_chain(
        logits, support, drafts, np.ones(TRIALS, np.int32), coins(ACCEPT), coins(DRAW), draft_probs, **options
    )
    assert (verdict.bounds is None) == bool(options)
    assert chi_square_is_fine(verdict.tokens[:, 0], policies[0].probs)
    accepted = verdict.num_accepted == 1
    assert abs(accepted.mean() - np.minimum(policies[0].probs, proposal).sum()) < 0.02
    assert chi_square_is_fine(verdict.tokens[accepted, 1], policies[1].probs)


def test_ordinary_decoding(backend):
    logits, policies, support = case(backend, 1.0, 5, 0.9)
    none = np.zeros(TRIALS, np.int32)
    drafts = np.full((TRIALS, 1), -1, np.int32)
    verdict = backend.verify_chain(logits, support, drafts, none, coins(ACCEPT), coins(DRAW))
    assert chi_square_is_fine(verdict.tokens[:, 0], policies[0].probs)


def test_the_test_has_teeth(backend):
    """Given "accepted" or "replaced" alone the law differs, and the chi-square sees it."""
    logits, policies, support = case(backend, 1.0, 0, 1.0)
    drafts = np.full((TRIALS, 1), int(policies[0].probs.argmax()), np.int32)
    verdict = backend.verify_chain(logits, support, drafts, np.ones(TRIALS, np.int32), coins(ACCEPT), coins(DRAW))
    replaced = verdict.num_accepted == 0
    assert not chi_square_is_fine(verdict.tokens[replaced, 0], policies[0].probs)
    biased = policies[0].probs * np.where(np.arange(SIZE) == 3, 1.1, 1.0)
    assert not chi_square_is_fine(verdict.tokens[:, 0], biased / biased.sum())


def verify_with_thresholds(backend, single, acc, draft=0):
    """Rows of probabilities (.5, .3, .2), one draft each."""
    logits = np.broadcast_to(np.log(np.float32([0.5, 0.3, 0.2])), (TRIALS, 2, 3))
    every = 2 * TRIALS
    support = backend.select_support(
        np.ascontiguousarray(logits).reshape(every, 3),
        np.ones(every, np.float32),
        np.zeros(every, np.int32),
        np.ones(every, np.float32),
        capacity=3,
    )
    drafts = np.full((TRIALS, 1), draft, np.int32)
    return backend.verify_chain(
        logits,
        support,
        drafts,
        np.ones(TRIALS, np.int32),
        coins(ACCEPT),
        coins(DRAW),
        threshold_single=single,
        threshold_acc=acc,
    )


def test_thresholds_change_the_law_by_their_definition(backend):
    """Accepted with .5 / .8; else (.3, .2) renormalised: (.625, .225, .15)."""
    assert chi_square_is_fine(verify_with_thresholds(backend, 1.0, 0.8).tokens[:, 0], np.array([0.625, 0.225, 0.15]))
    assert (verify_with_thresholds(backend, 0.4, 1.0).tokens[:, 0] == 0).all()
    assert chi_square_is_fine(verify_with_thresholds(backend, 0.6, 1.0).tokens[:, 0], np.array([0.5, 0.3, 0.2]))


@pytest.mark.parametrize("value", [0, -1, 1.5, float("nan")])
def test_thresholds_out_of_range(backend, value):
    with pytest.raises(ValueError, match=r"threshold_single=.*, expected a number above 0 and at most 1"):
        verify_with_thresholds(backend, value, 1.0)
    with pytest.raises(ValueError, match=r"threshold_acc=.*, expected a number above 0 and at most 1"):
        verify_with_thresholds(backend, 1.0, value)

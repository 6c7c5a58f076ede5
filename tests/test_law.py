"""The law itself: what is generated against an exact enumeration, by chi-square, for every decoding path.

Every committed token is pooled, whether accepted, replaced or bonus: only their union follows the target's policy.
Seeds are fixed. Each test refuses at a p-value below 1e-4, so over the dozen of them a change that keeps the law and
only reshuffles the randomness fails with a chance of about one in a thousand.
"""

import itertools
from dataclasses import replace

import numpy as np
import pytest
from scipy import stats

from pipeline import SamplingParams
from tests import naive, pipes

VOCABULARY = 10
PROMPT = [4, 7, 5]
SAMPLES = 100_000
FALSE_ALARM = 1e-4

POLICIES = {
    "unfiltered": SamplingParams(temperature=1.3, ignore_eos=True),
    "filtered": SamplingParams(temperature=0.8, top_k=5, top_p=0.9, ignore_eos=True),
}


def enumerate_law(params, length, filter_order="top_k_first", adjust=None):
    """The exact probability of every sequence of `length` tokens: float64 [V ** length]."""
    law = np.zeros((VOCABULARY,) * length)
    rows = {}
    for sequence in itertools.product(range(VOCABULARY), repeat=length):
        probability = 1.0
        for i, token in enumerate(sequence):
            prefix = sequence[:i]
            if prefix not in rows:
                logits = pipes.logits_after([*PROMPT, *prefix], VOCABULARY)
                logits = logits if adjust is None else adjust(prefix, logits)
                rows[prefix] = naive.policy(
                    logits, params.temperature, params.top_k or 0, params.top_p, params.min_p, filter_order
                ).probs
            probability *= rows[prefix][token]
            if not probability:
                break
        law[sequence] = probability
    return law.ravel()


def count(rollouts, length):
    tokens = np.array([rollout.token_ids[:length] for rollout in rollouts])
    return np.bincount(np.ravel_multi_index(tokens.T, (VOCABULARY,) * length), minlength=VOCABULARY**length)


def p_value(counts, law):
    """Chi-square with the cells that expect fewer than five pooled into one."""
    assert counts[law == 0].sum() == 0, "a token of probability 0 was generated"
    expected = law * counts.sum()
    rare = expected < 5
    observed = np.append(counts[~rare], counts[rare].sum())
    wanted = np.append(expected[~rare], expected[rare].sum())
    if wanted[-1] < 5:
        observed[-2] += observed[-1]
        wanted[-2] += wanted[-1]
        observed, wanted = observed[:-1], wanted[:-1]
    return stats.chisquare(observed, wanted * observed.sum() / wanted.sum()).pvalue


def a_pipe(path, **options):
    pipe = pipes.pipe(path != "ordinary", VOCABULARY, max_batch=2048, max_length=16, **options)
    if path == "good draft":
        pipe.stages["draft"] = pipes.PerfectDrafts(VOCABULARY)
    return pipe


def generate(path, params, samples, new_tokens, **options):
    params = replace(params, n=samples, seed=20260, max_new_tokens=new_tokens)
    return a_pipe(path, **options).generate([PROMPT], params)


@pytest.mark.slow
@pytest.mark.parametrize("policy", POLICIES)
@pytest.mark.parametrize("path", ["ordinary", "bad draft", "good draft"])
def test_three_tokens_follow_the_target(path, policy):
    """A token more is generated, so that blocks of two drafts run; the first three are held against the law."""
    params = POLICIES[policy]
    rollouts = generate(path, params, SAMPLES, 4 if path != "ordinary" else 3)
    accepted = np.mean([rollout.num_accepted.sum() for rollout in rollouts])
    assert (accepted > 0.7) == (path == "good draft")
    assert p_value(count(rollouts, 3), enumerate_law(params, 3)) > FALSE_ALARM
    assert p_value(count(rollouts, 2), enumerate_law(params, 2)) > FALSE_ALARM


@pytest.mark.slow
def test_the_filter_order_is_part_of_the_law():
    params = SamplingParams(temperature=3.0, top_k=6, top_p=0.6, ignore_eos=True)
    laws = {order: enumerate_law(params, 2, order) for order in ("top_k_first", "joint")}
    for order, law in laws.items():
        counts = count(generate("good draft", params, 20_000, 4, filter_order=order), 2)
        assert p_value(counts, law) > FALSE_ALARM
        other = laws["joint" if order == "top_k_first" else "top_k_first"]
        assert counts[other == 0].sum() > 0 or p_value(counts, other) < 1e-12


@pytest.mark.slow
@pytest.mark.parametrize("path", ["ordinary", "good draft"])
def test_adjusted_policies_with_their_own_prefix(path):
    """Penalties and bias depend on the drafts before a row; a policy that took the block's start for all would fail."""
    params = SamplingParams(
        temperature=0.9,
        repetition_penalty=1.8,
        presence_penalty=0.7,
        frequency_penalty=0.9,
        logit_bias={6: 1.5, 2: -np.inf},
        ignore_eos=True,
    )

    def adjust(prefix, logits):
        bias = {6: 1.5, 2: -np.inf}
        return naive.adjust(logits, PROMPT, list(prefix), 1.8, 0.9, 0.7, bias.items())

    rollouts = generate(path, params, SAMPLES // 2, 4)
    assert p_value(count(rollouts, 3), enumerate_law(params, 3, adjust=adjust)) > FALSE_ALARM
    start = enumerate_law(params, 3, adjust=lambda prefix, logits: adjust((), logits))
    assert p_value(count(rollouts, 3), start) < 1e-12


@pytest.mark.slow
def test_the_law_is_enumerated_right_and_the_test_has_power():
    """Accepted tokens alone don't follow the target; the chi-square sees it, so it would see a broken verifier."""
    params = POLICIES["unfiltered"]
    rollouts = generate("good draft", params, 20_000, 2)
    accepted = [rollout for rollout in rollouts if rollout.num_accepted.sum() >= 0]
    law = enumerate_law(params, 2)
    assert abs(law.sum() - 1) < 1e-12
    assert p_value(count(accepted, 2), law) > FALSE_ALARM
    drafts = pipes.PerfectDrafts(VOCABULARY)
    kept = [r for r in rollouts if r.token_ids[1] == drafts.after((*PROMPT, int(r.token_ids[0])))]
    assert p_value(count(kept, 2), law) < 1e-12

"""The contract as an interface: proposers of tokens, the n-gram proposer, and the kit that they are held against.

The kit's seeds are fixed; a method that keeps the law is refused with a chance of 1e-4 a policy.
"""

import re
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from scipy import stats

from pipeline import InvalidRequest, NgramProposer, Proposed, Proposer, SamplingParams, SpeculativePipeline
from pipeline.testing import (
    check_alignment,
    check_law,
    check_masks,
    check_proposer,
    enumerate_law,
    p_value,
    tiny_target,
)
from pipeline.testing.reference import policy
from tests import naive, pipes, test_law
from tests.strategies import fuzz
from tests.test_masks import PROMPTS, MaskKit

README = (Path(__file__).parent.parent / "README.md").read_text()


def bigrams(**attributes):
    """The README's proposer, its class changed by `attributes`, over a random table."""
    [code] = re.findall(r"```python\n(import numpy.*?class Bigrams.*?)\n\n\nprint\(check_proposer", README, re.DOTALL)
    held = {}
    exec(code, held)
    kind = type("Changed", (held["Bigrams"],), attributes)
    return kind(np.random.default_rng(0).random((10, 10)) ** 4)


def pipeline_of(proposer, **options):
    options = {"max_batch": 4, "max_length": 128} | options
    return SpeculativePipeline(pipes.target(), proposer, **options)


@pytest.mark.slow
@pytest.mark.parametrize("make", [lambda: NgramProposer(3, min_ngram=1), bigrams], ids=["ngram", "the README's"])
def test_the_kit_passes(make):
    report = check_proposer(make(), samples=5_000)
    assert report.declared
    assert report.drafts_a_round > 0.2
    assert report.accepted_a_round > 0.05
    assert report.rows > 150
    assert min(report.p_values.values()) > 1e-4


@pytest.mark.slow
def test_the_kit_takes_a_draft_model():
    def make(target):
        return pipes.draft(10, 3)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("pipeline.testing.kit.tiny_target", lambda vocab_size: pipes.target(vocab_size))
        assert check_proposer(make, samples=2_000).method == "dflash"


def sharpened(self, contexts):
    proposed = type(self).__mro__[1].propose(self, contexts)
    probs = proposed.probs**2
    return replace(proposed, probs=probs / probs.sum(2, keepdims=True))


def looks_ahead(self, contexts):
    """The number of drafts depends on the draft that it would leave out."""
    proposed = type(self).__mro__[1].propose(self, contexts)
    return replace(proposed, num_drafts=(proposed.tokens < 5).cumprod(1).sum(1))


def chosen_by_the_law_of_another(self, contexts):
    """Drawn drafts without their laws: as chosen ones they are verified exactly."""
    return replace(type(self).__mro__[1].propose(self, contexts), probs=None)


@pytest.mark.slow
@pytest.mark.parametrize("propose", [sharpened, looks_ahead])
def test_the_kit_refuses_what_breaks_a_promise(propose):
    with pytest.raises(AssertionError, match="p-value"):
        check_proposer(bigrams(propose=propose), samples=10_000)


@pytest.mark.slow
def test_drafts_drawn_in_any_way_are_exact_as_chosen_ones():
    assert check_proposer(bigrams(propose=chosen_by_the_law_of_another), samples=5_000).declared


def test_a_proposer_without_the_declaration_generates_and_its_masks_are_refused():
    report = check_proposer(bigrams(mask_contract=False))
    assert (report.method, report.declared, report.rows) == ("bigram", False, 0)
    pipe = pipeline_of(type("Plain", (NgramProposer,), {"mask_contract": False, "method": "plain"})())
    assert not pipe.capabilities.masks_available
    with pytest.raises(InvalidRequest, match="the draft method 'plain' doesn't implement the sampling-mask contract"):
        pipe.submit([1], SamplingParams(top_k=4, return_sampling_mask=True))


class Fixed(Proposer):
    """Returns what it is given."""

    method, num_drafts = "fixed", 2

    def __init__(self, proposed):
        self.proposed = proposed

    def propose(self, contexts):
        return self.proposed


TOKENS = np.zeros((1, 2), np.int32)
WRONG = {
    "not a Proposed": (TOKENS, "Fixed.propose returned ndarray, expected a Proposed"),
    "tokens' type": (Proposed(TOKENS.astype(float)), r"tokens=float64\[1, 2\], expected integers \[1, 2\]"),
    "tokens' shape": (Proposed(TOKENS[:, :1]), r"tokens=int32\[1, 1\], expected integers \[1, 2\]"),
    "tokens' range": (Proposed(TOKENS + 320), r"tokens\[0, 0\]=320, expected ids in \[0, 320\)"),
    "num_drafts' range": (Proposed(TOKENS, np.array([3])), r"num_drafts=\[3\], expected 0..2"),
    "num_drafts' shape": (Proposed(TOKENS, np.array(1)), r"num_drafts=int64\[\], expected integers \[1\]"),
    "probs' type": (Proposed(TOKENS, probs=np.zeros((1, 2, 320))), r"probs=float64\[1, 2, 320\], expected float32"),
    "probs' shape": (
        Proposed(TOKENS, probs=np.zeros((1, 2, 9), np.float32)),
        r"probs=float32\[1, 2, 9\], expected float32\[1, 2, 320\]",
    ),
}


@pytest.mark.parametrize("wrong", WRONG)
def test_a_wrong_proposal_is_named(wrong):
    proposed, message = WRONG[wrong]
    with pytest.raises(InvalidRequest, match=message):
        pipeline_of(Fixed(proposed)).generate([[1, 2]], SamplingParams(seed=0))


def test_what_lies_behind_num_drafts_is_not_read():
    proposed = Proposed(np.array([[5, -1]]), np.array([1]))
    assert pipeline_of(Fixed(proposed)).generate([[1, 2]], SamplingParams(seed=0, max_new_tokens=9))[0].ok


@pytest.mark.parametrize("values", [{"num_drafts": 0}, {"min_ngram": 0}, {"max_ngram": 1}, {"num_drafts": 2.5}])
def test_ngrams_out_of_range(values):
    [(name, value)] = values.items()
    with pytest.raises(InvalidRequest, match=f"{name}={value}, expected an integer of at least"):
        NgramProposer(**values)


def test_ngram_by_name():
    pipe = SpeculativePipeline.from_pretrained(str(pipes.target_folder()), draft="ngram", max_batch=2, max_length=64)
    assert (pipe.capabilities.method, pipe.capabilities.block_size) == ("ngram", 8)
    assert pipe.capabilities.masks_available
    rollouts = pipe.generate([[1, 2]], SamplingParams(max_new_tokens=3, seed=0))
    assert rollouts.provenance["draft"]["name"] == "ngram(num_drafts=7, max_ngram=4, min_ngram=2)"
    with pytest.raises(InvalidRequest, match="has no confidence head"):
        pipes.SpeculativePipeline(pipes.target(), NgramProposer(), draft_lengths=_threshold())


def _threshold():
    from pipeline import ConfidenceThreshold

    return ConfidenceThreshold(0.5)


def test_ngrams_save_rounds_where_the_output_repeats():
    """A policy that goes round in a circle: after one round of it all drafts are kept."""
    circle = [10, 11, 12, 13, 14]

    def process(input_ids, scores):
        scores[:, circle[input_ids.shape[1] % 5]] += 1000.0
        return scores

    params = SamplingParams(logits_processors=[process], max_new_tokens=60, seed=0, ignore_eos=True)
    pipe = pipeline_of(NgramProposer(7))
    pipe.observe("forward", lambda block: widths.append(block.logits.shape[1]))
    widths = []
    rollout = pipe.generate([[1, 2, 3]], params)[0]
    assert rollout.token_ids.tolist() == [circle[(3 + i) % 5] for i in range(60)]
    assert widths[0] == 1  # nothing found, nothing verified
    assert max(widths) == 8
    assert rollout.num_accepted[8:-1].tolist() == [7] * (len(rollout.num_accepted) - 9)
    assert rollout.num_rounds < 20


class TestNgramMasks(MaskKit):
    """The kit of the masks."""

    def make(self, **options):
        return pipeline_of(NgramProposer(3, min_ngram=1), **options)


class TestNgramMasksInRounds(MaskKit):
    """The same from the engine's rounds."""

    def make(self, **options):
        return pipeline_of(NgramProposer(3, min_ngram=1), engine="overlapped", **options)


def test_who_is_captured():
    """A proposal that was changed in one form only isn't what the other form makes."""

    class Other(NgramProposer):
        def propose(self, contexts):
            return super().propose(contexts)

    assert NgramProposer.captured
    assert type("Plain", (NgramProposer,), {}).captured
    assert not Other.captured
    assert not Fixed.captured
    with pytest.raises(InvalidRequest, match=r"engine='overlapped', .*'ngram' doesn't say that it can be captured"):
        pipeline_of(Other(), engine="overlapped")
    with pytest.raises(
        NotImplementedError, match=r"Fixed\.propose_captured: expected of a proposer with captured=True"
    ):
        Fixed(None).propose_captured(None, None)


def test_ngram_requests_depend_on_themselves_only():
    each = [
        SamplingParams(temperature=t, top_k=6, max_new_tokens=20 + i, seed=i, ignore_eos=True)
        for i, t in enumerate([1.0, 0.0, 0.6, 0.3])
    ]
    prompts = [*PROMPTS, [9, 9]]
    made = pipeline_of(NgramProposer(3, min_ngram=1)).generate(prompts, each)
    assert sum(rollout.num_accepted.sum() for rollout in made) > 0
    for prompt, params, rollout in zip(prompts, each, made, strict=True):
        alone = pipeline_of(NgramProposer(3, min_ngram=1)).generate([prompt], params)[0]
        assert alone.token_ids.tolist() == rollout.token_ids.tolist()
    greedy = pipes.pipe(False).generate([prompts[1]], each[1])[0]
    assert greedy.token_ids.tolist() == made[1].token_ids.tolist()


# --- the kit itself -------------------------------------------------------------------------------------------------


@fuzz
@given(
    seed=st.integers(0, 2**32),
    size=st.integers(2, 30),
    temperature=st.sampled_from([0.0, 0.5, 1.0, 2.0]),
    top_k=st.sampled_from([None, 1, 2, 5, 40]),
    top_p=st.sampled_from([1.0, 0.9, 0.5]),
    min_p=st.sampled_from([0.0, 0.1, 0.7]),
    order=st.sampled_from(["top_k_first", "joint"]),
    ties=st.booleans(),
)
def test_the_kits_reference_is_the_oracles(seed, size, temperature, top_k, top_p, min_p, order, ties):
    logits = np.random.default_rng(seed).normal(size=size) * 3
    logits = np.round(logits) if ties else logits
    params = SamplingParams(temperature=temperature, top_k=top_k, top_p=top_p, min_p=min_p)
    probs, close = policy(logits, params, order)
    want = naive.policy(logits, temperature, top_k or 0, top_p, min_p, order)
    if not (close or want.borderline):
        np.testing.assert_allclose(probs, want.probs, atol=1e-12)


def test_the_kits_law_and_p_value(monkeypatch):
    params = test_law.POLICIES["filtered"]
    law = enumerate_law(pipes.target(10), test_law.PROMPT, params, 2)
    np.testing.assert_allclose(law.ravel(), test_law.enumerate_law(params, 2), atol=1e-6)
    rng = np.random.default_rng(1)
    probs = np.array([0.5, 0.3, 0.15, 0.05])
    counts = rng.multinomial(1000, probs)
    assert p_value(counts, probs) == pytest.approx(stats.chisquare(counts, probs * 1000).pvalue, rel=1e-9)
    assert p_value(np.array([999, 1]), np.array([1.0, 0.0])) == 0.0
    assert p_value(np.array([5, 4, 1]), np.array([0.5, 0.45, 0.05])) > 0.05  # rare cells are pooled


def test_the_kit_refuses_policies_that_it_has_no_reference_for():
    with pytest.raises(InvalidRequest, match="expected temperature and filters only"):
        policy(np.zeros(3), SamplingParams(presence_penalty=1.0))


def test_the_kit_sees_broken_records():
    params = SamplingParams(top_k=5, max_new_tokens=6, seed=1, return_sampling_mask=True, sampling_logprobs="support")
    rollout = pipes.pipe().generate(PROMPTS[:1], params)[0]
    check_alignment(rollout)
    mask = rollout.sampling_mask
    moved = mask.logprobs.copy()
    moved[mask.offsets[2] : mask.offsets[3]] -= 0.1
    broken = {
        "5 tokens, 6 masks": replace(rollout, token_ids=rollout.token_ids[:5]),
        "token 0: 319 isn't in its support": replace(rollout, token_ids=np.full_like(rollout.token_ids, 319)),
        "two log-probabilities": replace(rollout, logprobs=rollout.logprobs - 1),
        "token 2: two log-prob": replace(rollout, sampling_mask=replace(mask, logprobs=moved)),
    }
    for message, one in broken.items():
        with pytest.raises(AssertionError, match=message):
            check_alignment(one)


def test_the_kit_sees_masks_of_another_policy():
    from pipeline.stages import Adjust

    class Hotter(Adjust):
        def __call__(self, state, block):
            adjusted = super().__call__(state, block)
            return replace(adjusted, logits=adjusted.logits * np.float32(0.9))

    target = tiny_target(20)
    pipe = SpeculativePipeline(target, NgramProposer(2), max_batch=4, max_length=64)
    params = SamplingParams(top_k=6, max_new_tokens=12, seed=0)
    assert check_masks(pipe, [[1, 2, 1], [3]], params) > 15
    pipe.stages["adjust"] = Hotter()
    with pytest.raises(AssertionError, match="L1 distance"):
        check_masks(pipe, [[1, 2, 1], [3]], params)
    with pytest.raises(AssertionError, match="p-value"):
        check_law(pipe, SamplingParams(seed=0), prompt=[1], samples=3_000, length=1)

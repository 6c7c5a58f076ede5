"""Every draft method in the pipeline: the mask kit, company and recording that change nothing, and the law.

The law: 6,000 samples a policy against the enumeration, refused at a p-value below 1e-4; over the 16 comparisons here
a change that keeps the law and only reshuffles the randomness fails with a chance of about one in six hundred.
"""

from dataclasses import replace

import numpy as np
import pytest

import gpu
from pipeline import ConfidenceThreshold, SamplingParams, ThroughputSchedule
from pipeline.stages import Draft
from tests import naive, pipes
from tests.test_law import FALSE_ALARM, POLICIES, PROMPT, VOCABULARY, count, enumerate_law, p_value
from tests.test_masks import PROMPTS, MaskKit

THRESHOLD = ConfidenceThreshold(0.5)
SCHEDULE = ThroughputSchedule([1, 4, 64], [1.0, 1.1, 9.0])
# By name: the kind of draft, and the options that make it a path of its own.
PATHS = {
    "dflash": ("dflash", {}),
    "dflash, chosen": ("dflash", {"proposal": "argmax"}),
    "dflash2": ("dflash2", {}),
    "dflash2, chosen": ("dflash2", {"proposal": "argmax"}),
    "dflash2, no selector": ("dflash2 convolutions only", {}),
    "dspark vanilla": ("dspark vanilla", {}),
    "dspark gated": ("dspark gated", {}),
    "dspark rnn, chosen": ("dspark rnn", {"proposal": "argmax"}),
    "dspark rank 0": ("dspark rank 0", {}),
    "specforge": ("specforge borrowed", {}),
    "speculators dflash": ("speculators dflash", {}),
    "speculators dspark": ("speculators dspark", {}),
    "threshold": ("dspark rnn", {"draft_lengths": THRESHOLD}),
    "schedule": ("dspark vanilla", {"draft_lengths": SCHEDULE}),
}


def make(path, **options):
    kind, own = PATHS[path]
    return pipes.pipe_of_kind(kind, **(own | options))


@pytest.fixture(params=PATHS)
def path(request):
    return request.param


class TestMasks(MaskKit):
    """The kit of the masks, for every path."""

    @pytest.fixture(autouse=True)
    def _take(self, path):
        self.path = path

    def make(self, **options):
        return make(self.path, **options)


def test_recording_and_company_change_nothing(path):
    """Each request alone and in a batch of greedy and sampled ones, with and without masks: the same tokens.

    Under the throughput schedule a request's lengths, and so its sample, depend on its company: left out there.
    """
    each = [
        SamplingParams(temperature=t, top_k=40, max_new_tokens=9 + i, seed=i, ignore_eos=True)
        for i, t in enumerate([1.0, 0.0, 0.6, 1.5])
    ]
    prompts = [*PROMPTS, [9, 9]]
    plain = make(path).generate(prompts, each)
    recorded = make(path).generate(prompts, [replace(p, return_sampling_mask=True) for p in each])
    assert [r.token_ids.tolist() for r in plain] == [r.token_ids.tolist() for r in recorded]
    if path != "schedule":
        for prompt, params, rollout in zip(prompts, each, plain, strict=True):
            assert make(path).generate([prompt], params)[0].token_ids.tolist() == rollout.token_ids.tolist()


def test_greedy_requests_are_the_targets_own(path):
    """Drafts change the speed of a greedy request, never its tokens."""
    params = SamplingParams(temperature=0, max_new_tokens=20, ignore_eos=True)
    expected = pipes.pipe(False).generate(PROMPTS, params)
    drafted = make(path).generate(PROMPTS, params)
    assert [r.token_ids.tolist() for r in drafted] == [r.token_ids.tolist() for r in expected]


def test_up_to_the_last_position(path):
    """Blocks that reach past max_length, and single tokens."""
    pipe = make(path, max_length=24)
    rollouts = pipe.generate([[3] * 17, [3] * 23, [5]], SamplingParams(max_new_tokens=99, seed=0, ignore_eos=True))
    assert [len(r.token_ids) for r in rollouts] == [7, 1, 23]
    assert [r.finish_reason for r in rollouts] == ["length"] * 3


def test_laws_reach_the_verifier_as_drawn():
    """What stage 3 hands on: the draws' own laws, one-hot for greedy rows, zero outside the candidates."""
    seen = []
    for kind in ("dspark vanilla", "dflash2"):
        pipe = pipes.pipe_of_kind(kind)
        pipe.observe("draft", seen.append)
        sampled = SamplingParams(max_new_tokens=9, seed=1, ignore_eos=True)
        pipe.generate(PROMPTS, [sampled, replace(sampled, temperature=0), replace(sampled, top_k=1)])
    for proposal in seen:
        dense = proposal.draft_probs
        if dense is None:
            assert all(request.params.greedy for request in proposal.requests)
            continue
        drafts = proposal.draft_tokens[..., None].astype(np.int64)
        assert (np.take_along_axis(dense, drafts, 2) > 0).all()
        assert np.abs(dense.sum(2) - 1).max() < 1e-5
        for b, request in enumerate(proposal.requests):
            if request.params.greedy:
                assert (dense[b].max(1) == 1).all()
    laws = [proposal.draft_probs for proposal in seen if proposal.draft_probs is not None]
    sparse = [law for law in laws if (np.count_nonzero(law, axis=2) <= 4).all()]
    assert len(sparse) > 3


@pytest.mark.parametrize(
    ("kind", "method", "rows"),
    [("dspark vanilla", "dspark", 5), ("dspark rank 0", "dspark", 5), ("dflash2", "dflash2", 4)],
)
def test_what_the_pipeline_says_of_them(kind, method, rows):
    """A verify block of gamma + 1 rows where a block of gamma rows samples from the anchor."""
    pipe = pipes.pipe_of_kind(kind)
    assert (pipe.capabilities.method, pipe.capabilities.block_size) == (method, rows)
    assert pipe.capabilities.masks_available
    pipe.observe("forward", lambda block: widths.add(block.logits.shape[1]))
    widths = set()
    rollouts = pipe.generate(PROMPTS[:1], SamplingParams(max_new_tokens=4, seed=0))
    assert widths == {rows}
    assert rollouts.provenance["draft"]["method"] == method


def test_all_greedy_batches_carry_no_laws():
    pipe = pipes.pipe_of_kind("dspark vanilla")
    pipe.observe("draft", lambda proposal: laws.append(proposal.draft_probs))
    laws = []
    pipe.generate(PROMPTS, SamplingParams(temperature=0, max_new_tokens=5, ignore_eos=True))
    assert laws
    assert all(law is None for law in laws)


def test_proposals_use_their_own_coins():
    """Philox by seed, anchor's place, draft and purpose: the oracle's coins give every draft again.

    No coin serves twice, whatever was rejected: the coin of draft k behind n tokens is number 4 n + k.
    """
    pipe = pipes.pipe_of_kind("dspark rank 0")
    seen, compared = [], 0
    pipe.observe("draft", lambda proposal: seen.append((proposal.requests[0].num_generated, proposal)))
    pipe.generate([PROMPTS[0]], SamplingParams(max_new_tokens=12, seed=11, ignore_eos=True))
    assert len(seen) > 4
    for generated, proposal in seen:
        for k in range(4):
            coin = naive.uniform(11, 4 * generated + k, gpu.PROPOSAL)
            token, borderline = naive.draw(proposal.draft_probs[0, k].astype(np.float64), coin)
            compared += not borderline
            assert borderline or token == proposal.draft_tokens[0, k]
    assert compared > 15


def test_a_draft_that_overflows_ends_its_request_and_no_other(monkeypatch):
    """NaN in the draft's own logits: its law is none, so the request is INVALID rather than verified against one.

    A greedy request's drafts have no need of a law.
    """
    pipe = pipes.pipe_of_kind("dspark vanilla", max_batch=3)
    draft = pipe.state.draft
    logits_of = draft.logits

    def spoilt(hidden):
        logits = logits_of(hidden)
        for b, request in enumerate(pipe.state.running):
            if request.seed != 1:
                logits[b, 0, 7] = np.nan
        return logits

    monkeypatch.setattr(draft, "logits", spoilt)
    sampled = SamplingParams(max_new_tokens=9, seed=1, ignore_eos=True)
    greedy = replace(sampled, seed=6, temperature=0)
    with pytest.warns(UserWarning, match="1 of 3 samples"):
        rollouts = pipe.generate(PROMPTS[:2] + PROMPTS[:1], [sampled, replace(sampled, seed=5), greedy])
    assert "its draft has no probability under its own law" in rollouts[1].error
    assert rollouts[0].ok
    assert rollouts[2].ok


LAW_PATHS = (
    "dflash", "dflash, chosen", "dflash2", "dspark vanilla", "dspark gated", "dspark rank 0", "speculators dspark",
    "threshold", "schedule",
)  # fmt: skip
LAW_SCHEDULE = ThroughputSchedule([1, 10_000], [1.0, 4.0])


def law_samples(path, samples, spoil=None):
    kind, own = PATHS[path]
    if path == "schedule":  # for a batch of this size
        own = {"draft_lengths": LAW_SCHEDULE}
    pipe = pipes.pipe_of_kind(kind, VOCABULARY, 3, **({"max_batch": 2048, "max_length": 16} | own))
    lengths = []

    def see(proposal):
        first = [request.num_generated == 1 for request in proposal.requests]
        lengths.extend(proposal.num_drafts[first].tolist())

    pipe.observe("draft", see)
    if spoil is not None:
        pipe.stages["draft"] = spoil
    policies = [replace(policy, n=samples, seed=20260, max_new_tokens=4) for policy in POLICIES.values()]
    greedy = SamplingParams(temperature=0, max_new_tokens=4, ignore_eos=True)
    rollouts = pipe.generate([PROMPT] * 3, [*policies, greedy])
    return rollouts[:samples], rollouts[samples:-1], rollouts[-1], lengths


@pytest.mark.slow
@pytest.mark.parametrize("path", LAW_PATHS)
def test_the_law(path):
    """Filtered, unfiltered and greedy requests side by side, ragged where the path is."""
    unfiltered, filtered, greedy, lengths = law_samples(path, 6_000)
    for name, rollouts in (("unfiltered", unfiltered), ("filtered", filtered)):
        assert p_value(count(rollouts, 3), enumerate_law(POLICIES[name], 3)) > FALSE_ALARM, name
    assert np.mean([rollout.num_accepted.sum() for rollout in unfiltered]) > 0.1
    prefix = list(PROMPT)
    for token in greedy.token_ids.tolist():
        assert token == int(pipes.logits_after(prefix, VOCABULARY).argmax())
        prefix.append(token)
    # The limit leaves each request's first block two drafts; only confidences make it shorter.
    assert set(lengths) == ({0, 1, 2} if path in ("threshold", "schedule") else {2})


@pytest.mark.slow
def test_a_law_that_was_not_drawn_from_is_seen():
    """A sharpened law in the draws' place biases what is committed, and the comparison sees it."""

    class Sharpened(Draft):
        def __call__(self, state):
            proposal = super().__call__(state)
            sharp = proposal.draft_probs**2
            return replace(proposal, draft_probs=sharp / sharp.sum(2, keepdims=True))

    unfiltered, _, _, _ = law_samples("dspark vanilla", 6_000, Sharpened())
    assert p_value(count(unfiltered, 3), enumerate_law(POLICIES["unfiltered"], 3)) < 1e-12

"""The audit agrees with what the pipeline did, and finds what was changed afterwards or done wrong."""

from dataclasses import replace

import numpy as np
import pytest
from hypothesis import assume, given
from hypothesis import strategies as st

import gpu
from pipeline import ConfidenceThreshold, InvalidRequest, Rollout, Rollouts, SamplingMask, SamplingParams
from pipeline.audit import audit
from pipeline.batch.recording import record_rows
from pipeline.batch.records import Adjusted, Proposal, Verified
from pipeline.batch.request import Prompt, Request
from pipeline.results.audit_record import DTYPES, RAGGED, AuditRecord
from pipeline.stages import Draft, Verify
from tests import pipes
from tests.strategies import fuzz
from tests.test_gpu_verify import rounds
from tests.test_rollouts import same

PROMPTS = [[4, 7, 5], [9, 8], [1]]
SAMPLED = SamplingParams(
    temperature=1.2, top_k=30, top_p=0.95, seed=11, n=2, max_new_tokens=14, ignore_eos=True, record="audit"
)
POLICIES = {
    "filtered": SAMPLED,
    "unfiltered": replace(SAMPLED, top_k=None, top_p=1.0),
    "greedy": replace(SAMPLED, temperature=0),
    "penalised": replace(SAMPLED, repetition_penalty=1.5, frequency_penalty=0.5, logit_bias={3: 2.0, 5: -np.inf}),
    "masked": replace(SAMPLED, return_sampling_mask=True, sampling_logprobs="support"),
    "selected": replace(SAMPLED, return_sampling_mask=True, return_logprobs=False),
}
PATHS = ("ordinary", "bad draft", "good draft", "sampled draft")
# Kinds of drafts that draw, with the options that make them.
DRAWN = {
    "dflash": {"proposal": "sample"},
    "dflash2": {},
    "dspark vanilla": {},
    "dspark rnn": {"draft_lengths": ConfidenceThreshold(0.4)},
    "speculators dspark": {},
}


class SampledDrafts:
    """Put in the draft stage's place: drafts drawn from a law of their own, a flat one over a few tokens."""

    def __init__(self, vocab_size):
        self.vocab_size = vocab_size

    def __call__(self, state):
        proposal = Draft()(state)
        batch, drafts = proposal.draft_tokens.shape
        rng = np.random.default_rng(sum(request.num_generated for request in proposal.requests))
        laws = rng.random((batch, drafts, self.vocab_size)).astype(np.float32) ** 4
        laws /= laws.sum(-1, keepdims=True)
        seeds = np.array([request.seed for request in proposal.requests], np.uint64)
        starts = np.array([request.num_generated for request in proposal.requests], np.int64)
        coins = gpu.uniforms(seeds, starts, drafts, gpu.PROPOSAL)
        tokens = (laws.cumsum(-1) <= coins[..., None]).sum(-1).clip(max=self.vocab_size - 1).astype(np.int32)
        return Proposal(proposal.requests, tokens, proposal.num_drafts, laws)


def a_pipe(path, vocab_size=320, **options):
    options = {"allow_unbounded_support": True, "proposal": "argmax"} | options
    pipe = pipes.pipe(path != "ordinary", vocab_size, **options)
    if path == "good draft":
        pipe.stages["draft"] = pipes.PerfectDrafts(vocab_size)
    if path == "sampled draft":
        pipe.stages["draft"] = SampledDrafts(vocab_size)
    return pipe


@pytest.mark.parametrize("policy", POLICIES)
@pytest.mark.parametrize("path", PATHS)
def test_it_agrees_with_the_pipeline(path, policy):
    rollouts = a_pipe(path).generate(PROMPTS, POLICIES[policy])
    assert not rollouts.failed
    for rollout in rollouts:
        report = audit(rollout)
        assert report.ok, report
        assert report.num_tokens == len(rollout.token_ids) == 14
        assert report.num_rounds == rollout.num_rounds
        record = rollout.audit
        tested = record.bounds.size if path == "sampled draft" else (record.draft_tokens >= 0).sum()
        assert report.num_coins == tested + (~record.accepted).sum()
        assert (record.proposal_probs.size > 0) == (path == "sampled draft")
        assert record.totals.tolist() == np.add.reduceat(record.weights, record.offsets[:-1]).tolist()
    accepted = sum(int(rollout.audit.accepted.sum()) for rollout in rollouts)
    assert path != "good draft" or accepted > 0
    assert path != "ordinary" or accepted == 0


@pytest.mark.parametrize("path", ["bad draft", "good draft", "sampled draft"])
@pytest.mark.parametrize("order", ["top_k_first", "joint"])
def test_small_vocabularies_accept_and_replace(path, order):
    """Ten tokens: drawn drafts are both kept and replaced often."""
    params = replace(SAMPLED, top_k=6, n=8, max_new_tokens=9)
    rollouts = a_pipe(path, 10, max_batch=16, max_length=16, filter_order=order).generate([PROMPTS[0]], params)
    assert all(audit(rollout).ok for rollout in rollouts)
    tested = np.concatenate([r.audit.accepted[r.audit.draft_tokens >= 0] for r in rollouts])
    assert 0 < tested.mean() < 1


@pytest.mark.parametrize("kind", DRAWN)
def test_it_agrees_with_every_drawn_draft(kind, tmp_path):
    """Laws over the whole vocabulary, over candidates, over a part of it, and the one-hot of a greedy neighbour."""
    pipe = pipes.pipe_of_kind(kind, 10, 3, max_batch=16, max_length=16, **DRAWN[kind])
    laws = {}

    def see(proposal):
        dense = proposal.draft_probs
        for b, request in enumerate(proposal.requests):
            for i in range(proposal.num_drafts[b]):
                laws[request.prompt.index, request.sample_index, request.num_generated + i] = dense[b, i]

    pipe.observe("draft", see)
    params = replace(SAMPLED, top_k=6, n=7, max_new_tokens=9, return_sampling_mask=True, sampling_logprobs="support")
    greedy = replace(params, temperature=0, n=1)
    rollouts = pipe.generate([PROMPTS[0], [2]], [params, greedy])
    for rollout in Rollouts.from_parquet(rollouts.to_parquet(tmp_path / "drawn.parquet")):
        report = audit(rollout)
        assert report.ok, report
        assert report.num_tokens == 9
        record = rollout.audit
        for i in np.flatnonzero(record.draft_tokens >= 0):
            law = laws[rollout.prompt_index, rollout.sample_index, int(i)]
            ids = record.token_ids[record.offsets[i] : record.offsets[i + 1]]
            held = record.proposal_probs[record.proposal_offsets[i] : record.proposal_offsets[i + 1]]
            assert held.tolist() == law[ids].tolist()
            assert record.draft_probs[i] == law[record.draft_tokens[i]] > 0
    tested = np.concatenate([r.audit.accepted[r.audit.draft_tokens >= 0] for r in rollouts[:-1]])
    assert 0 < tested.mean() < 1


@fuzz
@given(case=rounds(vocabularies=(1, 2, 31, 33, 257)), seed=st.integers(0, 2**64 - 1))
def test_the_rules_are_verify_chains(case, seed):
    """One block of any logits, drafts and proposals, recorded and audited by itself."""
    rows, batch, width, drafts, num_drafts, _, proposal_probs = case
    size = rows.logits.shape[1]
    support = gpu.select_support(*rows.filter_arguments(), capacity=size)
    assert_agreement(rows.logits.reshape(batch, width, size), support, drafts, num_drafts, proposal_probs, seed)


def assert_agreement(logits, support, drafts, num_drafts, proposal_probs, seed):
    """What `verify_chain` makes of a block, recorded and audited; the tokens of every request."""
    batch, width, size = logits.shape
    seeds, starts = np.full(batch, seed, np.uint64), np.zeros(batch, np.int64)
    accept = gpu.accept_purpose(proposal_probs)
    coins = [gpu.uniforms(seeds, starts, width, purpose) for purpose in (accept, gpu.DRAW)]
    verdict = gpu.verify_chain(logits, support, drafts, num_drafts, *coins, proposal_probs)
    capture = gpu.capture_masks(logits, support, verdict, np.ones(batch, bool), size)
    requests = [a_request(seed) for _ in range(batch)]
    proposal = Proposal(requests, drafts, num_drafts, proposal_probs)
    for b in range(batch):
        n = int(verdict.num_committed[b])
        record = record_rows(Verified(Adjusted(proposal, logits), support, verdict), capture, b)
        first, last = capture.row_start[b], capture.row_start[b + 1]
        offsets = capture.offsets[first : last + 1]
        mask = SamplingMask(record.token_ids, record.offsets, capture.logprobs[offsets[0] : offsets[-1]], "support")
        rollout = a_rollout(verdict.tokens[b, :n], verdict.logprobs[b, :n], int(verdict.num_accepted[b]), seed, record)
        report = audit(replace(rollout, sampling_mask=mask))
        assert report.ok, report
        assert report.num_tokens == n
    return verdict.tokens


def test_nothing_left_draws_from_the_policy():
    """A proposal above the policy everywhere leaves no residual; only rounding can do that to a real one."""
    logits, drafts, num_drafts = np.zeros((1, 2, 2), np.float32), np.zeros((1, 1), np.int32), np.ones(1, np.int32)
    law = np.full((1, 1, 2), 0.9, np.float32)
    settings = np.ones(2, np.float32), np.zeros(2, np.int32), np.ones(2, np.float32)
    support = gpu.select_support(logits[0], *settings, capacity=2)
    first = [int(assert_agreement(logits, support, drafts, num_drafts, law, seed)[0, 0]) for seed in range(40)]
    assert set(first) == {0, 1}


@pytest.mark.parametrize("seed", range(12))
def test_the_walk_takes_the_first_id_above_the_threshold(seed):
    """Four tokens of weight 1: the coin's quarter is the token's place."""
    coin = float(gpu.uniforms(np.array([seed], np.uint64), np.zeros(1, np.int64), 1, gpu.DRAW)[0, 0])
    values = {name: np.zeros(1, dtype) for name, dtype in DTYPES.items()}
    values |= {"draft_tokens": np.full(1, -1, np.int32), "draft_probs": np.full(1, np.nan, np.float32)}
    values |= {"token_ids": np.array([2, 3, 7, 9], np.int32), "weights": np.ones(4, np.int64)}
    values |= {"offsets": np.array([0, 4]), "proposal_offsets": np.zeros(2, np.int64), "totals": np.array([4])}
    values |= {"proposal_probs": np.empty(0, np.float32), "bound_offsets": np.zeros(2, np.int64), "bounds": np.empty(0)}
    token = values["token_ids"][int(4 * coin)]
    rollout = a_rollout(np.array([token]), np.log(np.full(1, 0.25, np.float32)), 0, seed, AuditRecord(**values))
    assert audit(rollout).ok


def a_request(seed):
    prompt = Prompt(np.array([1], np.int32), ticket=0, index=0, unstarted=set())
    return Request(prompt=prompt, sample_index=0, params=SamplingParams(), params_index=0, seed=seed, scanner=None)


def a_rollout(tokens, logprobs, num_accepted, seed, record):
    return Rollout(
        prompt_token_ids=np.array([1], np.int32),
        token_ids=tokens,
        text="",
        finish_reason="length",
        logprobs=logprobs,
        sampling_mask=None,
        top_logprobs=None,
        num_rounds=1,
        num_accepted=np.array([num_accepted], np.int32),
        seed=seed,
        prompt_index=0,
        sample_index=0,
        params_index=0,
        audit=record,
    )


# --- what was changed afterwards ------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def recorded():
    """A rollout with accepted, replaced and bonus tokens, and one with drawn drafts; nothing but the record."""
    pool = {}
    for path in ("good draft", "sampled draft"):
        params = replace(SAMPLED, top_k=6, n=8, max_new_tokens=9, return_logprobs=False)
        rollouts = a_pipe(path, 10, max_batch=16, max_length=16).generate([PROMPTS[0]], params)
        pool[path] = max(rollouts, key=lambda r: int(r.audit.accepted.sum()))
        assert pool[path].audit.accepted.any()
    return pool


def changed(rollout, name, i, value):
    """The rollout with element i of one array of its record set to something else."""
    array = getattr(rollout.audit, name).copy()
    array[i] = value(array[i])
    return replace(rollout, audit=replace(rollout.audit, **{name: array}))


TAMPERED = {
    "rounds": ("round", lambda x: x + 1),
    "rows": ("row", lambda x: x + 1),
    "positions": ("position of the coins", lambda x: x + 1),
    "accepted": ("accepted", lambda x: not x),
    "totals": ("sum of weights", lambda x: x - 1),
    "weights": ("sum of weights", lambda x: x + 1),
}


@pytest.mark.parametrize("path", ["good draft", "sampled draft"])
@pytest.mark.parametrize("name", TAMPERED)
def test_a_changed_record_is_found_where_it_was_changed(recorded, path, name):
    rollout = recorded[path]
    what, value = TAMPERED[name]
    for i in range(len(rollout.token_ids)):
        place = int(rollout.audit.offsets[i]) if name == "weights" else i
        report = audit(changed(rollout, name, place, value))
        assert not report.ok
        assert (report.disagreement.position, report.disagreement.what) == (i, what), report
        assert report.num_tokens == i
        assert report.disagreement.expected != report.disagreement.found


@pytest.mark.parametrize("path", ["good draft", "sampled draft"])
def test_a_changed_token_is_found_where_it_was_changed(recorded, path):
    rollout = recorded[path]
    for i, token in enumerate(rollout.token_ids):
        tokens = rollout.token_ids.copy()
        tokens[i] = (token + 1) % 10
        found = audit(replace(rollout, token_ids=tokens)).disagreement
        assert (found.position, found.what, found.expected, found.found) == (i, "token", token, tokens[i])


@pytest.mark.parametrize("path", PATHS)
def test_another_seed_is_found_where_a_decision_turns(path):
    rollout = a_pipe(path).generate([PROMPTS[0]], replace(SAMPLED, n=1))[0]
    reports = [audit(replace(rollout, seed=rollout.seed ^ 1 << bit)) for bit in range(0, 64, 3)]
    assert not any(report.ok for report in reports)
    assert {report.disagreement.what for report in reports} <= {"accepted", "token"}
    assert {report.num_tokens == report.disagreement.position for report in reports} == {True}
    greedy = a_pipe(path).generate([PROMPTS[0]], POLICIES["greedy"])[0]
    assert audit(replace(greedy, seed=greedy.seed + 1)).ok, "a greedy rollout doesn't depend on its seed"


def test_a_changed_draft_is_found(recorded):
    record = recorded["good draft"].audit
    i = int(np.flatnonzero(record.accepted)[0])
    found = audit(changed(recorded["good draft"], "draft_tokens", i, lambda x: -1)).disagreement
    assert (found.position, found.what) == (i, "draft probability")
    found = audit(changed(recorded["good draft"], "draft_probs", i, lambda x: 0.5)).disagreement
    assert (found.position, found.what, found.expected) == (i, "draft probability", 1.0)


def test_a_changed_proposal_is_found(recorded):
    rollout = recorded["sampled draft"]
    record = rollout.audit
    i = int(np.flatnonzero(record.accepted)[0])
    found = audit(changed(rollout, "draft_probs", i, lambda x: x / 2)).disagreement
    assert (found.position, found.what) == (i, "draft probability")
    ids = record.token_ids[record.offsets[i] : record.offsets[i + 1]]
    place = int(record.proposal_offsets[i] + np.flatnonzero(ids == record.draft_tokens[i])[0])
    found = audit(changed(rollout, "proposal_probs", place, lambda x: x / 2)).disagreement
    assert (found.position, found.what) == (i, "draft probability")
    found = audit(changed(rollout, "proposal_probs", place, lambda x: np.nan)).disagreement
    assert (found.position, found.what) == (i, "proposal")


@pytest.mark.parametrize("kind", ["dflash2", "dspark vanilla"])
def test_a_changed_probability_of_a_drawn_draft_is_found(kind):
    params = replace(SAMPLED, top_k=6, n=16, max_new_tokens=9)
    rollouts = pipes.pipe_of_kind(kind, 10, 3, max_batch=16, max_length=16).generate([PROMPTS[0]], params)
    changes = 0
    for rollout in rollouts:
        record = rollout.audit
        for i in np.flatnonzero(record.accepted):
            ids = record.token_ids[record.offsets[i] : record.offsets[i + 1]]
            place = int(record.proposal_offsets[i] + np.flatnonzero(ids == record.draft_tokens[i])[0])
            alone = changed(rollout, "draft_probs", i, lambda x: x * 1.001)
            found = audit(alone).disagreement
            assert (found.position, found.what) == (i, "draft probability")
            # In both places, but then the next row's coin would have been held against less.
            both = changed(changed(rollout, "draft_probs", i, lambda x: 1e9), "proposal_probs", place, lambda x: 1e9)
            found = audit(both).disagreement
            assert (found.position, found.what) in ((i, "bound"), (i, "next bound"))
            assert found.expected < 1e-6
            changes += 1
    assert changes > 5


def test_a_changed_bound_is_found_where_something_depends_on_it():
    """The bound of a row that has a token, or is next to one; and any that would have turned the decision."""
    params = replace(SAMPLED, top_k=6, n=8, max_new_tokens=9, return_logprobs=False)
    rollouts = pipes.pipe_of_kind("dspark vanilla", 10, 3, max_batch=16, max_length=16).generate([PROMPTS[0]], params)
    found, unseen = [], 0
    for rollout in rollouts:
        record = rollout.audit
        for first in np.flatnonzero(np.diff(record.bound_offsets)):
            at, rows = int(record.bound_offsets[first]), int((record.rounds == record.rounds[first]).sum())
            for k in range(int(record.bound_offsets[first + 1]) - at):
                report = audit(changed(rollout, "bounds", at + k, lambda x: x * 0.999 + 1e-9))
                if report.ok:
                    assert k + 1 >= rows
                    unseen += 1
                    continue
                found.append(report.disagreement.what)
                assert first <= report.disagreement.position <= first + k + 1
            lost = int(rollout.num_accepted[record.rounds[first]]) + 1
            if lost <= record.bound_offsets[first + 1] - at:
                report = audit(changed(rollout, "bounds", at + lost - 1, lambda x: 1.0))
                assert (report.disagreement.position, report.disagreement.what) == (first, "num_accepted")
            report = audit(changed(rollout, "bounds", at, lambda x: 1.5))
            assert (report.disagreement.position, report.disagreement.what) == (first, "bound")
    assert {what: found.count(what) > 3 for what in found} == {"bound": True, "next bound": True}
    assert unseen > 3, "what isn't recorded can't be seen"


def test_a_block_without_its_bounds_is_found(recorded):
    rollout = recorded["sampled draft"]
    record = replace(rollout.audit, bounds=np.empty(0), bound_offsets=np.zeros(len(rollout.token_ids) + 1, np.int64))
    found = audit(replace(rollout, audit=record)).disagreement
    assert (found.what, found.expected, found.found) == ("proposal", "none", "a law")


@pytest.mark.parametrize("name", DTYPES)
def test_a_missing_end_is_found(recorded, name):
    rollout = recorded["sampled draft"]
    shorter = replace(rollout.audit, **{name: getattr(rollout.audit, name)[:-1]})
    report = audit(replace(rollout, audit=shorter))
    assert report.disagreement.what == name
    last = len(rollout.token_ids) - 2
    for offsets in (one for one, names in RAGGED.items() if name in names):
        last = np.flatnonzero(np.diff(getattr(rollout.audit, offsets)))[-1]
    assert report.disagreement.position >= last


def test_other_records_of_the_rollout_are_held_against_it():
    params = POLICIES["masked"]
    rollout = a_pipe("good draft").generate([PROMPTS[0]], replace(params, n=1))[0]
    mask = rollout.sampling_mask
    logprobs = rollout.logprobs.copy()
    logprobs[5] -= 0.001
    found = audit(replace(rollout, logprobs=logprobs)).disagreement
    assert (found.position, found.what) == (5, "logprob")
    ids = mask.token_ids.copy()
    ids[mask.offsets[6]] += 1
    found = audit(replace(rollout, sampling_mask=replace(mask, token_ids=ids))).disagreement
    assert (found.position, found.what) == (6, "sampling mask")
    of_mask = mask.logprobs.copy()
    of_mask[mask.offsets[7]] += 0.001
    found = audit(replace(rollout, sampling_mask=replace(mask, logprobs=of_mask))).disagreement
    assert (found.position, found.what) == (7, "mask logprob")
    accepted = rollout.num_accepted.copy()
    accepted[1] += 1
    assert audit(replace(rollout, num_accepted=accepted)).disagreement.what == "num_accepted"
    assert audit(replace(rollout, num_rounds=rollout.num_rounds + 1)).disagreement.what == "num_rounds"
    assert "token 5: logprob=" in str(audit(replace(rollout, logprobs=logprobs)))


EXTREMES = (0, 1, -1, 2, 7, 2**31 - 1, -(2**31), 2**62, 2**63 - 1, -(2**63), np.nan, np.inf, -np.inf, 0.5)


@fuzz
@given(data=st.data(), path=st.sampled_from(["good draft", "sampled draft"]))
def test_any_change_is_reported_not_raised(recorded, data, path):
    rollout = recorded[path]
    name = data.draw(st.sampled_from([*DTYPES, "of the rollout: token_ids"]))
    array = rollout.token_ids if name not in DTYPES else getattr(rollout.audit, name)
    assume(array.size)
    i = data.draw(st.integers(0, array.size - 1))
    new = array.copy()
    with np.errstate(all="ignore"):
        new[i] = np.array(data.draw(st.sampled_from(EXTREMES)), object).astype(np.float64).astype(array.dtype)
    if name in DTYPES:
        report = audit(replace(rollout, audit=replace(rollout.audit, **{name: new})))
    else:
        report = audit(replace(rollout, token_ids=new))
    assert 0 <= report.num_tokens <= len(rollout.token_ids)
    if np.array_equal(new, array, equal_nan=array.dtype.kind == "f"):
        assert report.ok
    elif name not in ("token_ids", "draft_tokens", "draft_probs", "proposal_probs", "bounds"):
        # No decision may depend on one of those: a draft outside the support is refused whatever its probability, and
        # rows behind the last token aren't recorded.
        assert not report.ok


# --- what was done wrong --------------------------------------------------------------------------------------------


class OneCoin(Verify):
    """Draws with the coin that tested the draft: a replacement then isn't independent of the rejection."""

    @staticmethod
    def _coins(requests, width, purpose):
        return Verify._coins(requests, width, gpu.ACCEPT)


class Stale(Verify):
    """Starts every block's coins anew, so that a coin serves twice."""

    @staticmethod
    def _coins(requests, width, purpose):
        seeds = np.array([request.seed for request in requests], dtype=np.uint64)
        return gpu.uniforms(seeds, np.zeros(len(requests), np.int64), width, purpose)


class Lenient(Verify):
    """Keeps the first draft unseen."""

    def __call__(self, state, adjusted):
        verified = super().__call__(state, adjusted)
        verdict, proposal = verified.verdict, verified.proposal
        for b, drafts in enumerate(proposal.num_drafts):
            if drafts and not verdict.num_accepted[b]:
                verdict.num_accepted[b], verdict.num_committed[b] = 1, 1
                verdict.tokens[b, 0] = proposal.draft_tokens[b, 0]
        return verified


@pytest.mark.parametrize("stage", [OneCoin, Stale, Lenient])
def test_a_wrong_verification_is_found(stage):
    pipe = a_pipe("bad draft")
    pipe.stages["verify"] = stage()
    rollouts = pipe.generate(PROMPTS, SAMPLED)
    assert not rollouts.failed
    assert not any(audit(rollout).ok for rollout in rollouts)


def test_a_verification_without_weights_says_so():
    class Small(Verify):
        def __call__(self, state, adjusted):
            verified = super().__call__(state, adjusted)
            rows = verified.support
            less = replace(rows, token_ids=rows.token_ids[:, :2].copy(), weights=rows.weights[:, :2].copy())
            return replace(verified, support=less)

    pipe = a_pipe("ordinary")
    pipe.stages["verify"] = Small()
    with pytest.raises(ValueError, match=r"support capacity=2, expected at least \d+"):
        pipe.generate([PROMPTS[0]], SAMPLED)


# --- where it is cut, kept and refused ------------------------------------------------------------------------------


@pytest.mark.parametrize("ending", ["eos", "stop", "length"])
def test_it_is_cut_with_the_tokens(ending, monkeypatch):
    """Blocks of four rows, whose end lies anywhere in them."""
    params = replace(SAMPLED, temperature=0, n=1, max_new_tokens=12)
    whole = a_pipe("good draft").generate([PROMPTS[0]], params)[0]
    cuts = set()
    for length in range(1, 12):
        last = int(whole.token_ids[length - 1])
        if last in whole.token_ids[: length - 1]:
            continue
        if ending == "eos":
            monkeypatch.setattr(pipes.target(320), "eos_token_ids", frozenset([last]))
        ends = {
            "eos": {"ignore_eos": False},
            "stop": {"stop_token_ids": [last]},
            "length": {"max_new_tokens": length},
        }
        rollout = a_pipe("good draft").generate([PROMPTS[0]], replace(params, **ends[ending]))[0]
        assert rollout.finish_reason == ending
        assert len(rollout.token_ids) == len(rollout.audit) == length
        assert audit(rollout).ok
        if ending != "length":  # with a nearer limit the last block has fewer drafts
            assert same(rollout.audit, whole.audit.cut(length))
        cuts.add(int(rollout.num_accepted[-1] - rollout.audit.rows[-1]))
    assert ending == "length" or len(cuts) > 2


def test_parts_join_to_the_whole():
    record = a_pipe("sampled draft").generate([PROMPTS[0]], replace(SAMPLED, n=1))[0].audit
    assert len(AuditRecord.join([])) == 0
    assert {name: getattr(record, name).dtype.type for name in DTYPES} == DTYPES
    assert {name: getattr(AuditRecord.join([]), name).dtype.type for name in DTYPES} == DTYPES
    one = record.cut(5)
    assert same(AuditRecord.join([one]), one)
    twice = AuditRecord.join([one, record])
    assert same(twice.cut(5), one)
    assert len(twice) == 5 + len(record)
    assert twice.offsets[-1] == len(twice.weights) == one.offsets[-1] + record.offsets[-1]


def test_it_survives_parquet(tmp_path):
    rollouts = a_pipe("sampled draft").generate(PROMPTS, [SAMPLED, replace(SAMPLED, record=None), SAMPLED])
    back = Rollouts.from_parquet(rollouts.to_parquet(tmp_path / "audited.parquet"))
    for before, after in zip(rollouts, back, strict=True):
        assert same(before, after)
        assert after.audit is None or audit(after).ok
    assert [rollout.audit is None for rollout in back] == [False, False, True, True, False, False]
    assert [one["record"] for one in back.provenance["params"]] == ["audit", None]


@pytest.mark.parametrize("path", PATHS)
def test_recording_changes_nothing_and_is_off_by_default(path):
    plain = replace(SAMPLED, record=None)
    assert SamplingParams().record is None
    pipe = a_pipe(path)
    captured = []
    pipe.observe("capture", captured.append)
    without = pipe.generate(PROMPTS, plain)
    assert all(one.capture is None and one.audits is None for one in captured)
    assert all(rollout.audit is None for rollout in without)
    recorded = a_pipe(path).generate(PROMPTS, SAMPLED)
    for a, b in zip(without, recorded, strict=True):
        assert same(a, replace(b, audit=None))
    assert all(rollout.sampling_mask is None for rollout in recorded)


def test_neighbours_get_what_they_asked_for():
    params = [SAMPLED, replace(SAMPLED, record=None), replace(POLICIES["masked"], record=None)]
    rollouts = a_pipe("bad draft").generate(PROMPTS, params)
    assert [(r.audit is None, r.sampling_mask is None) for r in rollouts[::2]] == [
        (False, True),
        (True, True),
        (True, False),
    ]


def test_what_it_refuses():
    with pytest.raises(InvalidRequest, match="record='all', expected \"audit\" or None"):
        SamplingParams(record="all")
    pipe = pipes.pipe()
    pipe.set_accept_thresholds(0.9)
    with pytest.raises(InvalidRequest, match="record='audit', expected None while the acceptance thresholds"):
        pipe.submit(PROMPTS[0], SAMPLED)
    pipe.set_accept_thresholds()
    with pytest.raises(InvalidRequest, match="top_k=None, expected a finite top_k"):
        pipe.submit(PROMPTS[0], POLICIES["unfiltered"])
    pipe.submit(PROMPTS[0], SAMPLED)
    with pytest.raises(InvalidRequest, match="expected no change while 2 mask requests are queued"):
        pipe.set_accept_thresholds(0.9)
    tight = a_pipe("bad draft", max_support=4)
    with pytest.warns(UserWarning, match="OVERFLOW"):
        failed = tight.generate(PROMPTS[:1], replace(SAMPLED, n=1, top_k=20))[0]
    assert failed.error.startswith("OVERFLOW: support=")
    for rollout in (failed, a_pipe("ordinary").generate(PROMPTS[:1], replace(SAMPLED, record=None))[0]):
        with pytest.raises(InvalidRequest, match="audit=None, expected the record of a finished rollout"):
            audit(rollout)

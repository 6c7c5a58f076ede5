"""Lengths by confidence: the rules against slow ones, the law under them by enumeration, compact forwards."""

from __future__ import annotations

import functools
import itertools

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from model_loaders import load_target
from pipeline import ConfidenceThreshold, InvalidRequest, SamplingParams, ThroughputSchedule, measure_cost
from tests import naive_lengths, pipes
from tests.tiny_models import write_tiny_target

VOCABULARY, DRAFTS = 3, 3
PROMPTS = [[1, 2, 3], [40, 41, 42, 43], [200, 5]]


class Pair:
    """Random laws and confidences after every prefix; the confidence of draft k sees the drafts before it."""

    def __init__(self, seed):
        self.seed = seed

    @functools.cache  # noqa: B019 (a test's)
    def law(self, who, prefix):
        numbers = np.random.default_rng([self.seed, who, len(prefix), *prefix])
        return numbers.dirichlet(np.ones(VOCABULARY))

    def target(self, prefix):
        return self.law(1, prefix)

    def draft(self, prefix):
        return self.law(2, prefix)

    def confidence(self, drafts):
        return [float(self.law(3, drafts[:k])[0]) ** 0.2 for k in range(DRAFTS)]


def distance(pair, length_of, rule):
    """Total variation between what is committed and the target's law."""
    got = naive_lengths.committed_law(pair.target, pair.draft, length_of, DRAFTS, VOCABULARY, rule)
    wanted = naive_lengths.target_law(pair.target, DRAFTS + 1, VOCABULARY)
    assert abs(got.sum() - 1) < 1e-12
    return 0.5 * np.abs(got - wanted).sum()


def by_rule(rule, pair, others=()):
    """A request's length in a batch with others of fixed confidences, in the middle of them."""

    def length_of(drafts):
        half = len(others) // 2
        confidence = np.array([*others[:half], pair.confidence(drafts), *others[half:]], dtype=np.float32)
        return int(rule(confidence, np.full(len(confidence), DRAFTS))[half])

    return length_of


SCHEDULES = [
    ThroughputSchedule([1, 3, 12], [1.0, 1.3, 2.2]),
    ThroughputSchedule([1, 2, 4, 6, 7, 20], [1.0, 1.2, 1.4, 1.4, 1.7, 3.0]),
    ThroughputSchedule([1, 20], [1.0, 2.9]),
    ThroughputSchedule([1, 20], [1.0, 4.0]),
]
OTHERS = [[0.9, 0.8, 0.75], [0.5, 0.9, 0.9], [0.97, 0.96, 0.1]]


RULES = pytest.mark.parametrize("rule", [naive_lengths.draft_by_draft, naive_lengths.as_block])


@RULES
@pytest.mark.parametrize("threshold", [0.0, 0.5, 0.65, 0.8, 1.0])
def test_the_law_under_a_threshold(threshold, rule):
    for seed in range(4):
        assert distance(Pair(seed), by_rule(ConfidenceThreshold(threshold), Pair(seed)), rule) < 1e-12


@RULES
@pytest.mark.parametrize("others", [0, 1, 3])
def test_the_law_under_a_schedule(others, rule):
    varied = 0
    for seed, schedule in itertools.product(range(4), SCHEDULES):
        length_of = by_rule(schedule, Pair(seed), OTHERS[:others])
        varied += len({length_of((a, b, 0)) for a in range(VOCABULARY) for b in range(VOCABULARY)}) > 1
        assert distance(Pair(seed), length_of, rule) < 1e-12
    assert varied > 2


def best_stop(schedule, pair, drafts):
    """The best of all stopping points, looking past the draft in question."""
    survival = np.cumprod(pair.confidence(drafts))
    speed = [(1 + survival[:k].sum()) / schedule.cost(1 + k) for k in range(DRAFTS + 1)]
    return int(np.argmax(speed))


WRONG = {
    "looks at the draft it tests": lambda pair, drafts: next(
        (k for k in range(DRAFTS) if pair.draft(drafts[:k])[drafts[k]] < 0.35), DRAFTS
    ),
    "looks at the next confidence": lambda pair, drafts: sum(
        np.logical_and.accumulate([*(np.array(pair.confidence(drafts))[1:] >= 0.65), True])
    ),
    "the best of all stopping points": functools.partial(
        lambda schedule, pair, drafts: best_stop(schedule, pair, drafts),
        ThroughputSchedule([1, 2, 3, 4], [1.0, 2.0, 2.55, 3.6]),
    ),
}


@RULES
@pytest.mark.parametrize("wrong", WRONG)
def test_the_enumeration_sees_a_rule_that_looks_ahead(wrong, rule):
    far = [distance(Pair(seed), lambda drafts, s=seed: WRONG[wrong](Pair(s), drafts), rule) for seed in range(6)]
    assert max(far) > 1e-3


@settings(max_examples=200, deadline=None)
@given(st.data())
def test_the_rules_equal_the_slow_ones(data):
    batch, width = data.draw(st.integers(1, 4)), data.draw(st.integers(0, 4))
    # Multiples of an eighth: survivals tie, and their products are exact.
    number = st.integers(0, 8).map(lambda n: n / 8)
    confidence = data.draw(st.lists(st.lists(number, min_size=width, max_size=width), min_size=batch, max_size=batch))
    most = data.draw(st.lists(st.integers(0, width), min_size=batch, max_size=batch))
    array = np.array(confidence, dtype=np.float32).reshape(batch, width)
    threshold = data.draw(number)
    expected = []
    for row, cap in zip(confidence, most, strict=True):
        expected.append(min(cap, next((k for k, c in enumerate(row) if c < threshold), width)))
    got = ConfidenceThreshold(threshold)(array, np.array(most))
    assert (got.dtype, got.tolist()) == (np.int32, expected)
    steps = data.draw(st.lists(st.integers(0, 4), min_size=3, max_size=3))
    schedule = ThroughputSchedule([1, 5, 9], np.cumsum([2, *steps[1:]]).tolist())
    got = schedule(array, np.array(most))
    assert (got.dtype, got.tolist()) == (np.int32, naive_lengths.schedule(confidence, most, schedule.cost))


def test_a_confidence_that_is_no_number_admits_nothing_more():
    confidence = np.array([[0.9, np.nan, 0.9]], dtype=np.float32)
    assert ConfidenceThreshold(0.1)(confidence, np.array([3])).tolist() == [1]
    assert ThroughputSchedule([1, 9], [1.0, 1.1])(confidence, np.array([3])).tolist() == [1]


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: ConfidenceThreshold(1.5), "threshold=1.5, expected a number from 0 to 1"),
        (lambda: ConfidenceThreshold(np.nan), "threshold=nan, expected a number from 0 to 1"),
        (lambda: ConfidenceThreshold(True), "threshold=True, expected a number from 0 to 1"),
        (lambda: ThroughputSchedule([1], [1.0]), r"rows=\[1\], seconds=\[1.0\], expected two lists of one length"),
        (lambda: ThroughputSchedule([2, 1], [1, 2]), r"rows=\[2, 1\], expected ascending numbers"),
        (lambda: ThroughputSchedule([1, 2], [2, 1]), r"seconds=\[2, 1\], expected positive numbers that don't descend"),
        (lambda: ThroughputSchedule([1, 2], [0, 1]), r"seconds=\[0, 1\], expected positive"),
        (
            lambda: pipes.pipe(draft_lengths=ConfidenceThreshold(0.5)),
            r"draft_lengths=ConfidenceThreshold\(.*\), expected None: the draft \(method 'dflash'\) has no confidence",
        ),
        (lambda: pipes.pipe(False, draft_lengths=ConfidenceThreshold(0.5)), "expected None: .* None"),
        (lambda: pipes.pipe(draft_lengths=0.5), "draft_lengths=0.5, expected a ConfidenceThreshold, a"),
        (lambda: pipes.pipe(proposal="best"), 'proposal=\'best\', expected "auto", "argmax" or "sample"'),
    ],
)
def test_refusals(make, message):
    with pytest.raises(InvalidRequest, match=message):
        make()


def test_a_measured_schedule():
    """Not a timing: its shape, and that a pipeline takes it."""
    schedule = measure_cost(pipes.target(), 3, 2, context=4, repeats=1)
    assert schedule.rows == (1, 2, 3, 4, 6, 8)
    assert min(schedule.seconds) > 0
    pipe = pipes.pipe_of_kind("dspark vanilla", draft_lengths=schedule)
    rollouts = pipe.generate(PROMPTS, SamplingParams(max_new_tokens=6, seed=0, ignore_eos=True))
    assert [len(r.token_ids) for r in rollouts] == [6] * 3
    assert rollouts.provenance["options"]["draft_lengths"]["rule"] == "throughput schedule"


# --- compact forwards -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("arch", ["llama", "qwen3", "mistral", "qwen3_moe"])
def test_a_compact_forward_is_the_whole_one(tmp_path, arch):
    """Logits, features and cache entries of the rows that are run, bit for bit; nothing of the others.

    A mixture of experts multiplies each expert's rows together, so its last bits depend on the company.
    """
    close = 1e-4 if arch == "qwen3_moe" else 0.0

    def equal(a, b):
        torch.testing.assert_close(a, b, atol=close, rtol=close)

    target = load_target(write_tiny_target(tmp_path, arch), device="cpu")
    target.set_taps((0, 2))
    generator = torch.Generator().manual_seed(0)
    lengths, starts, slots = [4, 0, 1, 3], torch.tensor([5, 2, 7, 1]), [3, 0, 1, 4]
    prompt = torch.randint(0, 320, (4, 8), generator=generator)
    block = torch.randint(0, 320, (4, 4), generator=generator)
    positions = starts[:, None] + torch.arange(4)
    found = []
    for cut in (None, lengths):
        cache = target.new_cache(5, 16)
        target.forward(prompt, torch.arange(8).expand(4, -1), cache, slots)
        output = target.forward(block, positions, cache, slots, lengths=cut)
        found.append((output, [cache.snapshot(slot, 12) for slot in slots], cache))
    (whole, before, _), (compact, after, cache) = found
    for row, length in enumerate(lengths):
        equal(compact.logits[row, :length], whole.logits[row, :length])
        equal(compact.features[row, :length], whole.features[row, :length])
        assert compact.logits[row, length:].isnan().all()
        assert (compact.features[row, length:] == 0).all()
        end = int(starts[row]) + length
        for a, b in zip(before[row].keys + before[row].values, after[row].keys + after[row].values, strict=True):
            equal(a[:, :end], b[:, :end])
    # The next block of ordinary shape runs on what the compact one left.
    again = target.forward(block, positions, cache, slots)
    equal(again.logits, whole.logits)


@pytest.mark.parametrize("lengths", [[1], [5, 1], [-1, 1], [0, 0]])
def test_refused_lengths(lengths):
    ids = torch.zeros(2, 4, dtype=torch.int64)
    with pytest.raises(ValueError, match=r"lengths=.*, expected 2 from 0 to 4"):
        pipes.target().forward(ids, torch.arange(4).expand(2, -1), pipes.target().new_cache(2, 8), lengths=lengths)


@pytest.mark.parametrize("kind", ["dspark vanilla", "dspark rnn", "speculators dspark"])
def test_compact_rounds_equal_whole_ones(kind):
    """The same lengths with every row computed: the same tokens, masks and log-probabilities, bit for bit."""
    params = [
        SamplingParams(
            temperature=t, top_k=12, top_p=0.95, max_new_tokens=12, seed=4, ignore_eos=True,
            return_sampling_mask=True, sampling_logprobs="support", repetition_penalty=1.2,
        )
        for t in (1.0, 0.0, 0.7)
    ]  # fmt: skip
    compact, whole = (
        pipes.pipe_of_kind(kind, draft_lengths=ConfidenceThreshold(0.55), proposal="sample") for _ in range(2)
    )
    forward = whole.state.target.forward
    kept, left_out = [], []

    class WholeTarget:
        def __getattr__(self, name):
            return getattr(compact.state.target, name)

        def forward(self, *arguments, lengths=None, **options):
            return forward(*arguments, **options)

    whole.state.target = WholeTarget()
    compact.observe("forward", lambda block: left_out.append(int(block.logits.isnan().any(2).sum())))
    compact.observe("draft", lambda proposal: kept.append(proposal.num_drafts.tolist()))
    for a, b in zip(compact.generate(PROMPTS, params), whole.generate(PROMPTS, params), strict=True):
        assert a.ok
        assert b.ok
        assert a.token_ids.tolist() == b.token_ids.tolist()
        assert a.logprobs.tolist() == b.logprobs.tolist()
        assert a.sampling_mask.token_ids.tolist() == b.sampling_mask.token_ids.tolist()
        assert a.sampling_mask.logprobs.tolist() == b.sampling_mask.logprobs.tolist()
        assert a.num_accepted.tolist() == b.num_accepted.tolist()
    assert sum(left_out) > 0
    assert len({length for round_ in kept for length in round_}) > 1

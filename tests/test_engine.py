"""The engine: its rounds against the eager ones, and what becomes of requests that end, fail, leave or change over.

Without a device the same loop runs over the kernels' twins (engine="overlapped").
"""

from dataclasses import replace
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

import gpu
from model_loaders.targets import target
from pipeline import InvalidRequest, SamplingParams, SpeculativePipeline
from pipeline.drafting.lengths import ConfidenceThreshold
from pipeline.drafting.ngram import NgramProposer
from pipeline.engine.buckets import KV_STEP, kv_bucket, slots_bucket, top_bucket
from pipeline.engine.features import Features
from pipeline.engine.memory import fit_device, fitting, slot_bytes
from pipeline.engine.prefills import Prefills
from pipeline.engine.rounds import Rounds, Shape, Ticket
from pipeline.options import Options
from pipeline.running import intake
from pipeline.testing.law import check_law
from tests import engines, pipes
from tests.engines import MIXED, PROMPTS, WIDE, assert_close, assert_same

KINDS = ("ordinary", "dflash", "dspark vanilla", "dflash2", "ngram")
SAMPLED = SamplingParams(seed=11, max_new_tokens=24, ignore_eos=True, **WIDE)


@pytest.mark.parametrize("kind", KINDS)
def test_rounds_are_those_of_the_eager_pipeline(kind):
    want = engines.pipe(kind, "eager").generate(PROMPTS, MIXED)
    assert {r.finish_reason for r in want} >= {"length", "eos"}
    assert_same(engines.pipe(kind).generate(PROMPTS, MIXED), want)


@pytest.mark.parametrize("proposal", ["sample", "argmax"])
def test_both_ways_to_propose(proposal):
    for kind in ("dflash", "dspark vanilla"):
        want = engines.pipe(kind, "eager", proposal=proposal).generate(PROMPTS, MIXED)
        assert_same(engines.pipe(kind, proposal=proposal).generate(PROMPTS, MIXED), want)


@settings(deadline=None, max_examples=12)
@given(data=st.data())
def test_any_batch(data):
    """Any mix of requests through any number of slots, in any chunks: what the eager pipeline gives."""
    policy = st.builds(
        SamplingParams,
        temperature=st.sampled_from([0.0, 0.7, 1.5]),
        top_k=st.sampled_from([1, 5, 60]),
        top_p=st.sampled_from([0.5, 1.0]),
        seed=st.integers(0, 99),
        n=st.integers(1, 3),
        max_new_tokens=st.integers(1, 30),
        top_logprobs=st.sampled_from([0, 0, 3]),
        return_sampling_mask=st.booleans(),
        presence_penalty=st.sampled_from([0.0, 0.0, 0.5]),
        ignore_eos=st.booleans(),
    )
    prompts = data.draw(st.lists(st.lists(st.integers(0, 319), min_size=1, max_size=40), min_size=1, max_size=6))
    params = [data.draw(policy) for _ in prompts]
    options = {
        "max_batch": data.draw(st.integers(1, 5)),
        "max_length": 50,
        "prefill_chunk": data.draw(st.integers(3, 40)),
    }
    kind = data.draw(st.sampled_from(["ordinary", "dflash", "ngram"]))
    want = engines.pipe(kind, "eager", **options).generate(prompts, params)
    assert_same(engines.pipe(kind, **options).generate(prompts, params), want)


def test_recording_changes_nothing():
    policies = [replace(SAMPLED, seed=i) for i in range(len(PROMPTS))]
    plain = engines.pipe().generate(PROMPTS, policies)
    recorded = engines.pipe().generate(
        PROMPTS, [replace(p, return_sampling_mask=True, top_logprobs=3) for p in policies]
    )
    for one, other in zip(plain, recorded, strict=True):
        assert one.token_ids.tolist() == other.token_ids.tolist()
        np.testing.assert_array_equal(one.logprobs, other.logprobs)
        assert len(other.sampling_mask) == len(other.token_ids)


LAWS = {
    "unfiltered": SamplingParams(temperature=1.3, seed=20260),
    "filtered": SamplingParams(temperature=0.9, top_k=6, top_p=0.9, min_p=0.05, seed=20260),
}


@pytest.mark.parametrize("policy", LAWS)
@pytest.mark.parametrize(
    ("kind", "proposal"),
    [("ordinary", "auto"), ("dflash", "argmax"), ("dspark vanilla", "sample"), ("ngram", "auto")],
)
def test_the_law(kind, proposal, policy):
    """Against the enumeration; each of the eight refuses what keeps the law with a chance of 1e-4."""
    options = {"vocab_size": 10, "max_batch": 256, "max_length": 16, "proposal": proposal}
    check_law(engines.pipe(kind, **options), LAWS[policy], prompt=[4, 7, 5, 4, 7], samples=4000, length=2)


def test_supports_are_those_of_the_policy():
    params = SamplingParams(
        temperature=1.1, top_k=6, top_p=0.9, seed=7, max_new_tokens=24, ignore_eos=True, return_sampling_mask=True,
        sampling_logprobs="support",
    )  # fmt: skip
    for kind in ("ordinary", "dflash", "dspark vanilla", "ngram"):
        assert (
            engines.check_supports(engines.pipe(kind, vocab_size=10, max_batch=2), [[4, 7, 5], [1, 2], [3]], params)
            > 60
        )


def test_rounds_of_other_logits_have_memory_of_their_own():
    """Adjusted logits are float32: a filter's memory of bfloat16 ones doesn't fit them."""
    rounds = engines.pipe("ordinary")._engine.rounds
    shapes = [Shape(gpu.DECODING, 2, 128, Features(masks, 0, adjusts)) for masks in (0, 1) for adjusts in (0, 1)]
    assert len({id(rounds._workspace(shape)) for shape in shapes}) == 4


def test_thresholds_reach_the_rounds():
    params = [SamplingParams(seed=i, max_new_tokens=24, ignore_eos=True) for i in range(4)]
    results = []
    for engine in ("overlapped", "eager"):
        pipe = engines.pipe(engine=engine)
        plain = pipe.generate(PROMPTS[:4], params)
        pipe.set_accept_thresholds(1e-3, 0.1)
        results.append(pipe.generate(PROMPTS[:4], params))
        assert sum(r.num_accepted.sum() for r in results[-1]) > sum(r.num_accepted.sum() for r in plain)
    assert_same(*results)


def test_the_host_is_one_round_behind():
    """A step launches a round and delivers the one before; what a round past an end brings is dropped."""
    pipe = engines.pipe("ordinary", max_batch=2)
    pipe.submit(PROMPTS[0], replace(SAMPLED, max_new_tokens=4))
    counts = []
    while pipe.has_work:
        counts.append(pipe.step().num_tokens)
    # The first token and the first block are launched in one step.
    assert counts == [0, 2, 1, 1]


def test_no_round_is_launched_for_nobody():
    """Where the number of tokens says so, the last round is known to be the last."""
    pipe = engines.pipe("ordinary")
    launched = []
    launch = pipe._engine.rounds.launch
    pipe._engine.rounds.launch = lambda shape, *rest: launched.append(shape) or launch(shape, *rest)
    pipe.generate(PROMPTS[:3], replace(SAMPLED, max_new_tokens=6))
    assert len(launched) == 6


def test_an_end_that_only_the_host_sees_is_cut():
    """EOS and stop strings end in the middle of blocks and rounds; refills take the slot."""
    params = [replace(SAMPLED, seed=i, ignore_eos=False, logit_bias={258: 2.5}, max_new_tokens=50) for i in range(8)]
    want = engines.pipe("ordinary", "eager", max_batch=2).generate(PROMPTS, params)
    assert sum(r.finish_reason == "eos" for r in want) >= 4
    for kind in ("ordinary", "dflash"):
        got = engines.pipe(kind, max_batch=2).generate(PROMPTS, params)
        assert [r.finish_reason for r in got] == [
            r.finish_reason for r in engines.pipe(kind, "eager").generate(PROMPTS, params)
        ]
    assert_same(engines.pipe("ordinary", max_batch=2).generate(PROMPTS, params), want)


@pytest.mark.parametrize("kind", ["ordinary", "dflash"])
def test_contexts_grow_through_several_key_lengths(kind):
    """A round reads far enough for what the device has committed beyond what the host has read."""
    params = [replace(SAMPLED, seed=i, max_new_tokens=n) for i, n in enumerate((230, 100, 170))]
    options = {"max_batch": 2, "max_length": 270}
    pipe, lengths = engines.pipe(kind, **options), set()
    launch = pipe._engine.rounds.launch
    pipe._engine.rounds.launch = lambda shape, *rest: lengths.add(shape.kv_length) or launch(shape, *rest)
    got = pipe.generate(PROMPTS[3:6], params)
    assert_same(got, engines.pipe(kind, "eager", **options).generate(PROMPTS[3:6], params))
    assert lengths > {0, 128, 192, 256}


def test_one_prefill_for_the_samples_of_a_prompt():
    pipe = engines.pipe(max_batch=2)
    forward, widths = pipe.state.target.forward, []

    def count(ids, *arguments, **options):
        widths.append(tuple(ids.shape) if options.get("last_only") else None)
        return forward(ids, *arguments, **options)

    pipe.state.target.forward = count
    try:
        rollouts = pipe.generate([PROMPTS[1]], replace(SAMPLED, n=5))
    finally:
        del pipe.state.target.forward
    assert [width for width in widths if width] == [(1, 17)]
    assert len({tuple(r.token_ids.tolist()) for r in rollouts}) > 1


def test_a_long_prompt_holds_nobody_up():
    """Its chunks go beside the others' rounds: a round for each, and one for the first token behind them."""
    pipe = engines.pipe("ordinary", prefill_chunk=8)
    pipe.submit(PROMPTS[0], replace(SAMPLED, max_new_tokens=30))
    pipe.step()
    pipe.submit(list(range(80)), replace(SAMPLED, max_new_tokens=2))
    delivered = []
    while pipe._engine._prefills or len(pipe.state.waiting):
        delivered.append(pipe.step().num_tokens)
    assert len(delivered) == 11
    assert min(delivered) >= 1
    list(pipe.stream())


@pytest.mark.parametrize("padded", [False, True])
@pytest.mark.parametrize("kind", KINDS)
def test_chunks_and_the_rounds_beside_them_come_in_any_order(kind, padded, monkeypatch):
    """On a device they run at the same time: what one writes the other neither reads nor writes."""

    def results():
        pipe = engines.pipe(kind, max_batch=3, prefill_chunk=7)
        pipe._engine._prefills.padded = padded
        return pipe.generate(PROMPTS, MIXED)

    want, later = results(), []
    join = Prefills.join

    def join_later(prefills):
        while later:
            prefills.advance(later.pop())
        join(prefills)

    monkeypatch.setattr(Prefills, "beside", lambda prefills, tokens: later.append(tokens))
    monkeypatch.setattr(Prefills, "join", join_later)
    assert_same(results(), want)


@pytest.mark.parametrize("kind", ["ordinary", "dflash", "dspark vanilla"])
def test_padding_of_prompts_is_never_seen(kind):
    """Chunks padded to a width, as a device runs them: of one token, of a part, and too near the end to be padded."""
    prompts = [PROMPTS[3][:1], PROMPTS[3], PROMPTS[1], list(range(100))]
    params = [replace(SAMPLED, seed=i, n=1 + i % 2) for i in range(4)]
    pipe = engines.pipe(kind, max_batch=3, max_length=110, prefill_chunk=24)
    pipe._engine._prefills.padded = True
    want = engines.pipe(kind, "eager", max_batch=3, max_length=110, prefill_chunk=24).generate(prompts, params)
    assert_close(pipe.generate(prompts, params), want)
    assert set(pipe._engine._prefills._inputs) == {16, 24}


class Frozen:
    """Graphs of a kind: whatever a key's work was at first is what runs ever after."""

    def __init__(self):
        self.bodies = {}

    def run(self, key, body):
        self.bodies.setdefault(key, body)()


@pytest.mark.parametrize("kind", KINDS)
def test_a_round_reads_only_what_stands_in_place(kind):
    """Replayed rounds and chunks see new requests through the slots' memory alone, as a graph must."""
    pipe = engines.pipe(kind, max_batch=3)
    frozen = pipe._engine.rounds.graphs = pipe._engine._prefills.graphs = Frozen()
    pipe._engine._prefills.padded = True
    for prompts, params in ((PROMPTS[::-1], MIXED[::-1]), (PROMPTS, MIXED)):
        want = engines.pipe(kind, "eager", max_batch=3).generate(prompts, params)
        assert_close(pipe.generate(prompts, params), want)
    assert len(frozen.bodies) < 36


@pytest.mark.parametrize("order", ["top_k_first", "joint"])
def test_rounds_say_whether_rows_are_weighed_whole(order, monkeypatch):
    """Of all slots that a round runs over, those that aren't through their prefill too."""
    said, run_round = [], gpu.run_round

    def spy(logits, temperature, top_k, top_p, *arguments, whole_rows, **options):
        sampled = (temperature > 0) & (top_k != 1)
        whole = sampled & ((top_k == 0) | (top_k >= logits.shape[-1]) | ((order == "joint") & (top_p < 1)))
        said.append((whole_rows, bool(whole.any())))
        return run_round(logits, temperature, top_k, top_p, *arguments, whole_rows=whole_rows, **options)

    monkeypatch.setattr(gpu, "run_round", spy)
    bounded = [replace(SAMPLED, seed=i, max_new_tokens=4 + i) for i in range(5)]
    params = [*bounded, replace(SAMPLED, top_k=None), replace(SAMPLED, temperature=0.0, top_k=None)]
    engines.pipe(max_batch=3, filter_order=order, prefill_chunk=8).generate(PROMPTS[:7], params)
    assert {(True, True), (False, False)} <= set(said)
    assert all(hint >= whole for hint, whole in said)


CONSTRAINED = replace(MIXED[1], temperature=1.5, grammar={"regex": "(a|b)(aa|bb)?(a|ba)*b"}, max_new_tokens=12)
GRAMMARS = [
    *MIXED[:2],
    CONSTRAINED,
    replace(MIXED[3], ignore_eos=True, max_new_tokens=40),
    replace(MIXED[3], temperature=1.5, grammar={"regex": "(ab)*"}, min_new_tokens=5),
    *MIXED[5:7],
    replace(CONSTRAINED, grammar={"regex": "a?b"}, ignore_eos=True),
]
"""With grammars among them, which adjust, end early and late, and record."""


@pytest.mark.parametrize("kind", ["ordinary", "dspark vanilla", "ngram"])
def test_grammars_run_in_rounds(kind):
    """The eager pipeline's rollouts, from rounds in pieces that see new requests through memory alone."""
    want = engines.pipe(kind, "eager", max_batch=3).generate(PROMPTS, GRAMMARS)
    assert {"eos", "stop", "length"} <= {r.finish_reason for r in want}
    pipe = engines.pipe(kind, max_batch=3)
    frozen = pipe._engine.rounds.graphs = Frozen()
    eager, step = [], pipe._stepper.step

    def watched(*arguments):
        record = step(*arguments)
        eager.append(record.decode is not None)
        return record

    pipe._stepper.step = watched
    assert_same(pipe.generate(PROMPTS[::-1], GRAMMARS), engines.pipe(kind, "eager").generate(PROMPTS[::-1], GRAMMARS))
    assert_same(pipe.generate(PROMPTS, GRAMMARS), want)
    assert not any(eager)
    pieces = {key[1] for key in frozen.bodies if isinstance(key, tuple) and isinstance(key[1], str)}
    assert pieces == {"propose", "forward", "settle"}


def test_a_grammar_that_allows_nothing_ends_its_own_request():
    stuck = replace(CONSTRAINED, grammar={"ebnf": "root ::= root"}, n=1)
    params = [CONSTRAINED, stuck, SAMPLED]
    with pytest.warns(UserWarning, match="1 of 5"):
        got = engines.pipe().generate(PROMPTS[:3], params)
    assert got[3].error.startswith("grammar: it allows no token of the vocabulary at output token 0, expected")
    with pytest.warns(UserWarning, match="1 of 5"):
        assert_same(got, engines.pipe(engine="eager").generate(PROMPTS[:3], params))


def test_overflow_ends_its_own_request():
    params = [replace(SAMPLED, seed=i, return_sampling_mask=i != 2) for i in range(4)]
    params[1] = replace(params[1], top_k=300, top_p=1.0)
    with pytest.warns(UserWarning, match="1 of 4"):
        got = engines.pipe(max_support=60).generate(PROMPTS[:4], params)
    with pytest.warns(UserWarning, match="1 of 4"):
        want = engines.pipe(engine="eager", max_support=60).generate(PROMPTS[:4], params)
    assert "OVERFLOW" in got[1].error
    assert_same(got, want)


@pytest.mark.parametrize("kind", ["ordinary", "dflash"])
def test_an_invalid_row_ends_its_own_request_and_its_slot_is_clean_again(kind):
    params = [replace(SAMPLED, seed=i, max_new_tokens=9) for i in range(8)]
    pipe = engines.pipe(kind, max_batch=2)
    with spoilt_token(pipe.state.target, 299):
        spoilt = [[5, 299, 6] if i in (1, 4) else prompt for i, prompt in enumerate(PROMPTS)]
        with pytest.warns(UserWarning, match="2 of 8"):
            got = pipe.generate(spoilt, params)
    assert [i for i, r in enumerate(got) if "INVALID" in (r.error or "")] == [1, 4]
    want = engines.pipe(kind, "eager", max_batch=2).generate(PROMPTS, params)
    assert_same([r for r in got if r.ok], [r for i, r in enumerate(want) if i not in (1, 4)])


class spoilt_token:
    """A token whose embedding is NaN; what a prompt with it meets is a model that broke."""

    def __init__(self, target, token):
        self.weight, self.token = target.model.get_input_embeddings().weight, token

    def __enter__(self):
        self.before = self.weight[self.token].clone()
        self.weight.data[self.token] = np.nan

    def __exit__(self, *_):
        self.weight.data[self.token] = self.before


def run_through(pipe, params, prompts=PROMPTS):
    """Submit all, step through whatever exceptions, and the rollouts in order."""
    for prompt, policy in zip(prompts, params, strict=True):
        pipe.submit(prompt, policy)
    found = []
    while pipe.has_work:
        try:
            found += pipe.step().rollouts
        except ZeroDivisionError:
            continue
    return sorted(found, key=lambda r: (r.prompt_index, r.sample_index))


@pytest.mark.parametrize(
    ("kind", "params"),
    [("ordinary", MIXED), ("dflash", MIXED), ("ngram", GRAMMARS)],
    ids=["ordinary", "dflash", "ngram with grammars"],
)
def test_a_step_is_whole_or_has_not_happened(kind, params):
    """An exception in every launch and every delivery, once each: afterwards, the same rollouts."""
    want = run_through(engines.pipe(kind, "eager", max_batch=3), params)
    pipe = engines.pipe(kind, max_batch=3)
    rounds, raised = pipe._engine.rounds, set()

    def trouble(name, call):
        def broken(*arguments):
            state = pipe.state
            key = name, len(state.waiting), tuple((r.seed, r.num_generated) for r in state.running)
            if key not in raised:
                raised.add(key)
                raise ZeroDivisionError
            return call(*arguments)

        return broken

    rounds.launch = trouble("launch", rounds.launch)
    pipe._engine._deliver = trouble("deliver", pipe._engine._deliver)
    pipe.stages["finish"] = trouble("finish", pipe.stages["finish"])
    assert_same(run_through(pipe, params), want)
    assert {name for name, *_ in raised} == {"launch", "deliver", "finish"}


def test_requests_change_over_to_eager_rounds_and_back():
    """A processor among the requests, or an observer, has the rounds run stage by stage meanwhile."""
    params = list(MIXED)
    params[5] = replace(params[5], max_new_tokens=9, logits_processors=[lambda ids, scores: scores * 0.5])
    want = engines.pipe(engine="eager", max_batch=3).generate(PROMPTS, params)
    pipe = engines.pipe(max_batch=3)
    seen = []
    step = pipe._stepper.step

    def watched(*arguments):
        record = step(*arguments)
        seen.append(record.decode is not None)
        return record

    pipe._stepper.step = watched
    assert_same(pipe.generate(PROMPTS, params), want)
    assert {True, False} <= set(seen)
    assert seen[0] is False or seen[-1] is False


def test_an_observer_may_come_and_go():
    want = engines.pipe(engine="eager").generate(PROMPTS[:4], SAMPLED)
    pipe, blocks = engines.pipe(), []
    for prompt in PROMPTS[:4]:
        pipe.submit(prompt, SAMPLED)
    found, leave = [], None
    for i in range(100):
        if i == 3:
            leave = pipe.observe("verify", blocks.append)
        if i == 6:
            leave()
        found += pipe.step().rollouts
        if not pipe.has_work:
            break
    assert len(blocks) == 3
    found = sorted(found, key=lambda r: r.prompt_index)
    assert [r.token_ids.tolist() for r in found] == [r.token_ids.tolist() for r in want]


def test_a_replaced_stage_is_what_runs():
    pipe = engines.pipe(engine="overlapped")
    pipe.stages["draft"] = pipes.PerfectDrafts()
    greedy = SamplingParams(temperature=0, max_new_tokens=20, ignore_eos=True)
    got = pipe.generate(PROMPTS[:2], greedy)
    assert all(r.num_accepted.mean() > 2 for r in got)
    assert [r.token_ids.tolist() for r in got] == [
        r.token_ids.tolist() for r in engines.pipe("ordinary").generate(PROMPTS[:2], greedy)
    ]


def test_weights_change_between_and_abort_what_runs():
    pipe = engines.pipe("ordinary")
    name, weight = next(iter(pipe.state.target.model.named_parameters()))
    pipe.submit(PROMPTS[0], SAMPLED)
    pipe.step()
    pipe.step()
    with pytest.raises(InvalidRequest, match="1 requests are waiting or running"):
        pipe.update_target_weights({name: weight.detach().clone()})
    pipe.update_target_weights({name: weight.detach().clone()}, abort=True)
    aborted = list(pipe.stream())
    assert [r.finish_reason for r in aborted] == ["abort"]
    assert_same(pipe.generate(PROMPTS, MIXED), engines.pipe("ordinary", "eager").generate(PROMPTS, MIXED))


def test_holes_are_closed_when_nobody_waits():
    """Fewer slots are run over once the batch has shrunk, and who moves goes on as before."""
    params = [replace(SAMPLED, seed=i, max_new_tokens=40 if i in (1, 6) else 5) for i in range(8)]
    pipe = engines.pipe(max_batch=8)
    launch, batches = pipe._engine.rounds.launch, []
    pipe._engine.rounds.launch = lambda shape, *rest: batches.append(shape.batch) or launch(shape, *rest)
    got = pipe.generate(PROMPTS, params)
    assert_same(got, engines.pipe(engine="eager", max_batch=8).generate(PROMPTS, params))
    assert batches[1] == 8
    assert batches[-1] <= 2


def test_a_refusal_by_name():
    with pytest.raises(
        InvalidRequest, match='engine="graphs", expected "auto", "overlapped" or "eager" for a target on cpu'
    ):
        engines.pipe(engine="graphs")
    with pytest.raises(InvalidRequest, match="engine='fast', expected"):
        engines.pipe(engine="fast")
    assert engines.pipe(engine="auto")._engine is None


@given(needed=st.integers(1, 5000), most=st.integers(1, 5000))
def test_buckets(needed, most):
    if needed <= most:
        assert needed <= slots_bucket(needed, most) <= min(2 * needed, most)
        assert needed <= kv_bucket(needed, most) <= min(max(2 * KV_STEP, 3 * needed // 2 + KV_STEP), most)
    assert top_bucket(0) == 0
    assert needed <= top_bucket(needed) < 2 * needed + 1
    length = kv_bucket(needed, 10**9)
    assert length % KV_STEP == 0


def test_a_growing_context_meets_few_lengths():
    assert len({kv_bucket(needed, 4096) for needed in range(1, 4097)}) == 11


@pytest.mark.parametrize("kind", ["ordinary", "dflash"])
def test_requests_are_cancelled_in_the_middle(kind):
    """What was read so far is kept, what is on its way is dropped, and the others get what they would have got."""
    want = engines.pipe(kind, "eager").generate(PROMPTS[:3], SAMPLED)
    pipe = engines.pipe(kind, max_batch=2)
    tickets = [pipe.submit(prompt, replace(SAMPLED, return_sampling_mask=True)) for prompt in PROMPTS[:3]]
    found = [r for _ in range(4) for r in pipe.step().rollouts]
    pipe.cancel(tickets[0])
    found += list(pipe.stream())
    by_ticket = {r.prompt_index: r for r in found}
    gone = by_ticket[tickets[0]]
    assert gone.finish_reason == "cancelled"
    assert 0 < len(gone.token_ids) == len(gone.sampling_mask) < 24
    assert gone.token_ids.tolist() == want[0].token_ids.tolist()[: len(gone.token_ids)]
    for ticket, other in zip(tickets[1:], want[1:], strict=True):
        assert by_ticket[ticket].token_ids.tolist() == other.token_ids.tolist()


def test_a_time_limit_is_looked_at_as_rounds_are_read():
    pipe = engines.pipe("ordinary")
    now = [0.0]
    pipe.state.clock = lambda: now[0]
    pipe.submit(PROMPTS[0], replace(SAMPLED, max_time=5.0))
    for _ in range(4):
        assert pipe.step().rollouts == []
    now[0] = 6.0
    (rollout,) = pipe.step().rollouts
    assert rollout.finish_reason == "time"
    assert 0 < len(rollout.token_ids) < 24


def test_what_needs_the_host_is_refused_an_engine_and_given_none_by_default():
    class Own(NgramProposer):
        def propose(self, contexts):
            return super().propose(contexts)

    def build(engine):
        return SpeculativePipeline(engines.target(), Own(), engine=engine, max_batch=2)

    assert build("auto")._engine is None
    with pytest.raises(InvalidRequest, match=r"engine='overlapped', expected .*: the draft method 'ngram' doesn't"):
        build("overlapped")
    scheduled = ConfidenceThreshold(0.5)
    with pytest.raises(InvalidRequest, match=r"engine='overlapped', expected .*: draft_lengths=ConfidenceThreshold"):
        engines.pipe("dspark vanilla", draft_lengths=scheduled)
    assert engines.pipe("dspark vanilla", "auto", draft_lengths=scheduled)._engine is None


@pytest.mark.parametrize("kind", ["ordinary", "dflash"])
def test_memory_that_runs_out_costs_slots_and_no_request(kind):
    """Rounds over more than two slots don't fit: the batch shrinks, whoever was in it starts again, same rollouts."""
    want = run_through(engines.pipe(kind, "eager", max_batch=8), MIXED)
    pipe = engines.pipe(kind, max_batch=8)
    launch, refused = pipe._engine.rounds.launch, []

    def scarce(shape, *rest):
        if shape.batch > 2:
            refused.append(shape)
            raise torch.OutOfMemoryError("CUDA out of memory")
        return launch(shape, *rest)

    pipe._engine.rounds.launch = scarce
    assert_same(run_through(pipe, MIXED), want)
    assert refused
    assert pipe.state.slot_limit.limit <= 3


def test_a_fault_of_one_request_is_contained():
    """A launch that fails with one request in it ends that request, the others go on."""
    pipe = engines.pipe(max_batch=4)
    launch = pipe._engine.rounds.launch

    def broken(shape, *rest):
        if any(r.prompt.ticket == 2 for r in pipe.state.running):
            raise RuntimeError("a bad row")
        return launch(shape, *rest)

    pipe._engine.rounds.launch = broken
    for prompt in PROMPTS[:5]:
        pipe.submit(prompt, SAMPLED)
    found = []
    while pipe.has_work:
        found += pipe.step(contain=True).rollouts
    want = engines.pipe(engine="eager").generate(PROMPTS[:5], SAMPLED)
    found = sorted(found, key=lambda r: r.prompt_index)
    assert "a stage failed: RuntimeError: a bad row" in found[2].error
    assert_same([r for r in found if r.ok], [r for i, r in enumerate(want) if i != 2])


@pytest.mark.parametrize("engine", ["eager", "overlapped"])
@pytest.mark.parametrize("kind", ["dflash", "dflash2", "dspark vanilla", "specforge borrowed"])
def test_what_a_draft_borrows_follows_new_weights(kind, engine):
    engines.check_new_weights(kind, engine)


def test_memory_of_rounds_is_given_up_when_it_runs_out():
    pipe = engines.pipe()
    want = pipe.generate(PROMPTS, MIXED)
    assert pipe._engine.rounds._workspaces
    pipe._engine.forget(ZeroDivisionError())
    assert pipe._engine.rounds._workspaces
    pipe._engine.forget(torch.OutOfMemoryError())
    assert not pipe._engine.rounds._workspaces
    assert_same(pipe.generate(PROMPTS, MIXED), want)


def test_slots_are_as_many_as_the_device_has_memory_for(monkeypatch):
    """Free is what the driver has and what torch holds without using it."""
    target, options = engines.target(), Options(max_batch=8, max_length=100)
    a_slot = slot_bytes(target, None, 101, options.max_support)
    assert fit_device(options, target, None, 101) == options  # on the CPU nobody asks
    on_device = SimpleNamespace(
        device=torch.device("cuda"), new_cache=target.new_cache, vocab_size=target.vocab_size, dtype=target.dtype
    )
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda device: (2 * a_slot, 100 * a_slot))
    monkeypatch.setattr(torch.cuda, "memory_reserved", lambda device: 9 * a_slot)
    monkeypatch.setattr(torch.cuda, "memory_allocated", lambda device: 7 * a_slot)
    with pytest.warns(UserWarning, match="max_batch=3 is used"):
        assert fit_device(options, on_device, None, 101).max_batch == 3


def test_as_many_slots_as_memory_holds():
    options = Options(max_batch=8, max_length=100)
    assert fitting(options, 10_000, 1000) == options
    with pytest.warns(UserWarning, match=r"max_batch=8 doesn't fit: .*; max_batch=4 is used"):
        assert fitting(options, 5000, 1000).max_batch == 4
    with pytest.raises(InvalidRequest, match="max_length=100, expected less: a slot takes"):
        fitting(options, 1000, 1000)


def test_what_a_slot_takes():
    """Keys and values as the caches will have them, and no less than the logits and supports of a block."""
    target, draft = engines.target(), engines.draft("dflash")
    with_draft, without = (slot_bytes(target, d, 100, 64) for d in (draft, None))
    caches = [model.new_cache(1, 100) for model in (target, draft)]
    for cache in caches:
        cache.reserve()
        assert cache.full_bytes() == cache.memory_bytes()
    assert without > caches[0].memory_bytes() + 320 * (12 + 8) + 64 * 12
    assert with_draft > sum(cache.memory_bytes() for cache in caches) + 4 * (320 * 16 + 64 * 12) + 320 * 8


def test_a_compiled_forward(monkeypatch):
    """What dynamo traces in one graph, taps included, for each shape and again after other taps."""
    monkeypatch.setitem(target.COMPILING, "backend", "eager")
    params = replace(SAMPLED, max_new_tokens=8)
    for kind in ("dflash", "ordinary"):
        got = engines.pipe(kind, compile=True, max_batch=2).generate(PROMPTS[:2], params)
        assert_close(got, engines.pipe(kind, max_batch=2).generate(PROMPTS[:2], params))
    with pytest.raises(ValueError, match=r"lengths=\[1\], expected None for a compiled forward"):
        engines.target().forward(
            torch.zeros(1, 1).long(),
            torch.zeros(1, 1).long(),
            engines.target().new_cache(1, 4),
            lengths=[1],
            compiled=True,
        )


def test_prompts_are_encoded_while_rounds_are_on_their_way(monkeypatch):
    """All but those that nobody could wait beside: as many as there are slots, before the first round."""
    events = []

    def noted(owner, name, event):
        function = getattr(owner, name)
        monkeypatch.setattr(owner, name, lambda *a, **k: (events.append(event), function(*a, **k))[1])

    noted(intake, "token_ids_of", "encode")
    noted(Rounds, "launch", "launch")
    noted(Ticket, "receive", "receive")
    prompts = [[1 + i, 2, 3] for i in range(12)]
    prompts[5], prompts[9] = [], [1, "2"]  # refused
    params = [SamplingParams(seed=i, max_new_tokens=4 + i % 3, ignore_eos=True) for i in range(12)]
    with pytest.warns(UserWarning, match="2 of 12 samples"):
        found = engines.pipe("ordinary", max_batch=2).generate(prompts, params)
    assert [bool(rollout.error) for rollout in found] == [i in (5, 9) for i in range(12)]
    first = events.index("launch")
    assert events[:first] == ["encode"] * 2
    later = [before for before, event in zip(events[first:], events[first + 1 :], strict=False) if event == "encode"]
    assert len(later) == 10
    assert set(later) == {"launch"}
    with pytest.warns(UserWarning, match="2 of 12 samples"):
        eager = engines.pipe("ordinary", engine="eager", max_batch=2).generate(prompts, params)
    assert [r.token_ids.tolist() for r in found] == [r.token_ids.tolist() for r in eager]

"""Whole generations: who gets which tokens, whatever else is in the batch."""

import re
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch

import gpu
from model_loaders import CheckpointError
from pipeline import InvalidRequest, NgramProposer, Rollouts, SamplingParams, SpeculativePipeline
from tests import naive, pipes

ROOT = Path(__file__).parent.parent
PROMPTS = [[1, 2, 3], [4] * 17, [9, 8], list(range(40)), [200], [7, 7, 7, 7], [31, 5], [100, 3, 2]]
SAMPLED = SamplingParams(temperature=0.9, top_k=20, top_p=0.9, max_new_tokens=12, seed=11, ignore_eos=True)


def tokens(rollouts):
    return [rollout.token_ids.tolist() for rollout in rollouts]


@pytest.mark.parametrize("speculative", [False, True], ids=["ordinary", "dflash"])
def test_a_request_does_not_depend_on_its_company(speculative):
    """Alone, in a full batch, in another slot, through refills and moved slots: the same tokens, float32 on the CPU."""
    together = tokens(pipes.pipe(speculative, max_batch=3).generate(PROMPTS, SAMPLED))
    alone = [tokens(pipes.pipe(speculative, max_batch=1).generate([prompt], SAMPLED))[0] for prompt in PROMPTS]
    backwards = tokens(pipes.pipe(speculative, max_batch=8).generate(PROMPTS[::-1], SAMPLED))[::-1]
    assert together == alone == backwards


@pytest.mark.parametrize("values", [{"temperature": 0}, {"top_k": 1}], ids=["temperature 0", "top_k 1"])
def test_greedy_is_the_argmax_of_a_forward_without_cache(values):
    params = SamplingParams(max_new_tokens=10, ignore_eos=True, **values)
    expected = []
    for prompt in PROMPTS[:3]:
        ids = list(prompt)
        for _ in range(10):
            ids.append(int(pipes.logits_after(ids).argmax()))
        expected.append(ids[len(prompt) :])
    perfect = pipes.pipe()
    perfect.stages["draft"] = pipes.PerfectDrafts()
    for pipe in (pipes.pipe(speculative=False), pipes.pipe(), perfect):
        rollouts = pipe.generate(PROMPTS[:3], params)
        assert tokens(rollouts) == expected
    # A draft that is always right: every block commits whole.
    assert all(r.num_accepted.tolist() == [0, 3, 3, 0] for r in rollouts)


def test_greedy_equals_transformers_generate():
    model = pipes.target().model
    for prompt in PROMPTS[:3]:
        with torch.inference_mode():
            expected = model.generate(torch.tensor([prompt]), max_new_tokens=10, do_sample=False)[0, len(prompt) :]
        rollout = pipes.pipe().generate([prompt], SamplingParams(temperature=0, max_new_tokens=10))[0]
        assert rollout.token_ids.tolist() == expected.tolist()


def test_recording_changes_nothing():
    for speculative in (False, True):
        plain = pipes.pipe(speculative).generate(PROMPTS, SAMPLED)
        for values in (
            {"return_sampling_mask": True},
            {"return_sampling_mask": True, "sampling_logprobs": "support"},
            {"top_logprobs": 5},
            {"return_sampling_mask": True, "top_logprobs": 30, "return_logprobs": False},
        ):
            params = replace(SAMPLED, **values)
            recorded = pipes.pipe(speculative).generate(PROMPTS, params)
            assert tokens(recorded) == tokens(plain)
            for a, b in zip(plain, recorded, strict=True):
                assert b.logprobs is None or a.logprobs.tobytes() == b.logprobs.tobytes()


def test_nobody_asked_nothing_is_captured():
    pipe = pipes.pipe()
    seen = []
    pipe.observe("capture", seen.append)
    rollout = pipe.generate([[1, 2]], SAMPLED)[0]
    assert rollout.sampling_mask is None
    assert rollout.top_logprobs is None
    assert all(record.capture is None and record.top_ids is None for record in seen)


def test_samples_share_one_prefill_and_differ():
    pipe = pipes.pipe(max_batch=3)
    forwards = []
    forward = pipe.state.target.forward

    class Counting:
        def __getattr__(self, name):
            return getattr(pipes.target(), name)

        def forward(self, ids, *args, **kwargs):
            forwards.append(tuple(ids.shape))
            return forward(ids, *args, **kwargs)

    pipe.state.target = Counting()
    params = SamplingParams(max_new_tokens=6, n=7, seed=5, ignore_eos=True)
    rollouts = pipe.generate([[1, 2, 3], list(range(30))], params)
    assert forwards.count((1, 3)) == 1
    assert forwards.count((1, 30)) == 1
    assert [(r.prompt_index, r.sample_index) for r in rollouts] == [(p, s) for p in range(2) for s in range(7)]
    assert len({tuple(t) for t in tokens(rollouts)}) == 14
    assert len({r.seed for r in rollouts[:7]}) == 7
    assert rollouts[0].seed == 5
    # A sample is what a request with its seed is.
    again = pipes.pipe().generate([[1, 2, 3]], SamplingParams(max_new_tokens=6, seed=rollouts[4].seed, ignore_eos=True))
    assert tokens(again)[0] == rollouts[4].token_ids.tolist()


def test_prefill_in_chunks_gives_the_same():
    whole = pipes.pipe().generate([list(range(100))], SAMPLED)
    chunked = pipes.pipe(prefill_chunk=7).generate([list(range(100))], SAMPLED)
    assert tokens(whole) == tokens(chunked)


def test_seeds():
    pipe = pipes.pipe()
    fixed = [pipe.generate([[1, 2]], SAMPLED)[0].token_ids.tolist() for _ in range(2)]
    assert fixed[0] == fixed[1]
    free = pipe.generate([[1, 2]] * 2, SamplingParams(max_new_tokens=12, ignore_eos=True))
    assert free[0].seed != free[1].seed
    assert tokens(free)[0] != tokens(free)[1]


def test_mixed_rows_in_one_batch():
    """Greedy, filtered, unfiltered, penalised and masked requests together: each as if it were alone."""
    each = [
        SamplingParams(temperature=0, max_new_tokens=8, return_sampling_mask=True),
        SamplingParams(top_k=5, max_new_tokens=9, seed=1, return_sampling_mask=True, sampling_logprobs="support"),
        SamplingParams(max_new_tokens=7, seed=2, top_logprobs=3),
        SamplingParams(top_p=0.8, max_new_tokens=6, seed=3),
        SamplingParams(top_k=9, min_p=0.05, max_new_tokens=8, seed=4, repetition_penalty=1.4, presence_penalty=0.5),
        SamplingParams(temperature=2.5, max_new_tokens=8, seed=5, logit_bias={3: 9.0, 4: -np.inf}),
    ]
    for speculative in (False, True):
        together = pipes.pipe(speculative, max_batch=6).generate(PROMPTS[:6], each)
        for prompt, params, rollout in zip(PROMPTS, each, together, strict=False):
            alone = pipes.pipe(speculative).generate([prompt], params)[0]
            assert alone.token_ids.tolist() == rollout.token_ids.tolist()
            # The tokens are the same; the forward's last bits depend on the batch's shape.
            np.testing.assert_allclose(alone.logprobs, rollout.logprobs, atol=1e-4)
            assert (rollout.sampling_mask is not None) == params.return_sampling_mask
            assert (rollout.top_logprobs is not None) == bool(params.top_logprobs)
            if rollout.sampling_mask is not None:
                assert alone.sampling_mask.token_ids.tolist() == rollout.sampling_mask.token_ids.tolist()
        assert together[0].logprobs.tolist() == [0.0] * 8
        assert 4 not in together[5].token_ids


def test_refills_keep_the_batch_full():
    """Eight requests of very different lengths through three slots: nobody waits while a slot is free."""
    pipe = pipes.pipe(speculative=False, max_batch=3)
    lengths = [3, 30, 4, 5, 3, 6, 3, 4]
    for prompt, length in zip(PROMPTS, lengths, strict=True):
        pipe.submit(prompt, SamplingParams(max_new_tokens=length, seed=0, ignore_eos=True))
    finished, busy = [], []
    while pipe.has_work:
        waiting = len(pipe.state.waiting)
        record = pipe.step()
        if record.decode is not None and waiting >= 3:
            busy.append(len(record.decode.block.proposal.requests))
        finished += record.rollouts
    assert min(busy) == 3
    assert sorted(len(r.token_ids) for r in finished) == sorted(lengths)
    assert pipe.state.running == []


def test_step_stream_and_generate_side_by_side():
    pipe = pipes.pipe()
    ticket = pipe.submit([1, 2, 3], SAMPLED)
    record = pipe.step()
    assert [request.prompt.ticket for request in record.admitted.requests] == [ticket]
    assert record.prefill.block.logits.shape == (1, 1, 320)
    assert record.decode.block.logits.shape == (1, 4, 320)
    generated = pipe.generate([[9, 8]], SAMPLED)
    assert tokens(generated) == tokens(pipes.pipe().generate([[9, 8]], SAMPLED))
    streamed = list(pipe.stream())
    assert [r.prompt_index for r in streamed] == [ticket]
    assert tokens(streamed) == tokens(pipes.pipe().generate([[1, 2, 3]], SAMPLED))
    assert not pipe.has_work


def test_observers_see_every_record_and_can_leave():
    pipe = pipes.pipe()
    seen = {name: [] for name in pipe.stages}
    leave = [pipe.observe(name, seen[name].append) for name in pipe.stages]
    pipe.generate([[1, 2, 3]], SamplingParams(max_new_tokens=5, seed=0, ignore_eos=True))
    assert all(seen.values())
    assert len(seen["prefill"]) == 1
    assert len(seen["verify"]) == len(seen["finish"]) == len(seen["forward"]) + 1
    counts = {name: len(records) for name, records in seen.items()}
    for end in leave:
        end()
    pipe.generate([[1, 2, 3]], SamplingParams(max_new_tokens=5, seed=0))
    assert counts == {name: len(records) for name, records in seen.items()}


def test_an_interrupted_call_leaves_the_pipeline_usable():
    pipe = pipes.pipe(max_batch=2)
    waiting = pipe.submit([5, 6], SAMPLED)
    calls = []

    def interrupt(record):
        calls.append(record)
        if len(calls) == 3:
            raise KeyboardInterrupt

    leave = pipe.observe("verify", interrupt)
    with pytest.raises(KeyboardInterrupt):
        pipe.generate(PROMPTS, SAMPLED)
    leave()
    assert len(pipe.state.waiting) + len(pipe.state.running) == 1
    assert tokens(pipe.generate([[1, 2, 3]], SAMPLED)) == tokens(pipes.pipe().generate([[1, 2, 3]], SAMPLED))
    assert [r.prompt_index for r in pipe.stream()] == [waiting]


def test_a_processor_that_raises_ends_its_own_request():
    def broken(ids, scores):
        if ids.shape[1] > 6:
            raise RuntimeError("no such grammar")
        return scores

    def shapeless(ids, scores):
        return scores[:, :5]

    pipe = pipes.pipe()
    good = SamplingParams(max_new_tokens=8, seed=1)
    params = [good, SamplingParams(logits_processors=[broken]), SamplingParams(logits_processors=[shapeless])]
    with pytest.warns(UserWarning, match="2 of 3 samples"):
        rollouts = pipe.generate(PROMPTS[:3], params)
    assert rollouts[0].ok
    assert rollouts[1].error == "logits_processors: RuntimeError: no such grammar"
    assert "returned [1, 5], expected a tensor [1, 320]" in rollouts[2].error
    assert tokens(pipes.pipe().generate(PROMPTS[:1], good)) == tokens(rollouts[:1])


def test_processors_see_each_row_with_its_own_prefix():
    """Every row's call gets prompt, output and the drafts before the row, and nothing else."""
    pipe = pipes.pipe()
    pipe.stages["draft"] = pipes.PerfectDrafts()
    calls, blocks = [], []
    pipe.observe("adjust", blocks.append)

    def spy(ids, scores):
        calls.append(ids[0].tolist())
        return scores

    rollout = pipe.generate([[1, 2, 3]], SamplingParams(logits_processors=[spy], max_new_tokens=6, seed=0))[0]
    expected, committed = [], 0
    for block, accepted in zip(blocks, rollout.num_accepted, strict=True):
        drafts = block.proposal.draft_tokens[0][: block.proposal.num_drafts[0]].tolist()
        prefix = [1, 2, 3, *rollout.token_ids[:committed].tolist()]
        expected += [prefix + drafts[:i] for i in range(len(drafts) + 1)]
        committed += int(accepted) + 1
    assert calls == expected
    assert rollout.num_accepted.sum() > 0


def test_penalties_reach_every_row_with_its_own_drafts():
    """The recorded log-probabilities equal transformers' repetition penalty applied along the committed tokens."""
    from transformers import RepetitionPenaltyLogitsProcessor

    processor = RepetitionPenaltyLogitsProcessor(1.7)
    pipe = pipes.pipe()
    pipe.stages["draft"] = pipes.PerfectDrafts()
    params = SamplingParams(temperature=0.4, repetition_penalty=1.7, max_new_tokens=16, seed=3, ignore_eos=True)
    rollout = pipe.generate([[1, 2, 3]], params)[0]
    assert rollout.num_accepted.sum() > 0
    ids = [1, 2, 3]
    for token, logprob in zip(rollout.token_ids.tolist(), rollout.logprobs, strict=True):
        scores = torch.from_numpy(pipes.logits_after(ids))[None].float()
        logits = processor(torch.tensor([ids]), scores)[0].double() / 0.4
        assert abs(float(torch.log_softmax(logits, -1)[token]) - logprob) < 1e-4
        ids.append(token)


def test_chats_and_strings():
    pipe = pipes.pipe()
    chat = [{"role": "user", "content": "hello"}]
    rollouts = pipe.generate(["hello", chat], SamplingParams(max_new_tokens=4, seed=0))
    assert rollouts[0].prompt_token_ids.tolist() == pipe.state.target.encode("hello")
    assert rollouts[1].prompt_token_ids.tolist() == pipe.state.target.render_chat(chat)
    for rollout in rollouts:
        assert rollout.text == pipe.state.target.decode(rollout.token_ids.tolist())


def test_provenance(tmp_path):
    pipe = pipes.pipe(filter_order="joint")
    rollouts = pipe.generate([[1, 2]] * 2, [SAMPLED, SamplingParams(max_new_tokens=2)])
    held = Rollouts.from_parquet(rollouts.to_parquet(tmp_path / "r.parquet")).provenance
    assert held == rollouts.provenance
    assert len(held["target"]["sha256"]) == len(held["draft"]["sha256"]) == 64
    assert held["draft"]["method"] == "dflash"
    assert held["options"]["filter_order"] == "joint"
    assert held["params"][rollouts[1].params_index]["max_new_tokens"] == 2
    assert (held["dtype"], held["device"]) == ("float32", "cpu")
    assert {"torch", "transformers", "numba", "specmask"} <= set(held["versions"])


def test_loading_by_name(tmp_path):
    pipe = SpeculativePipeline.from_pretrained(
        str(pipes.target_folder()), pipes.draft_folder(), device="cpu", max_batch=2, max_length=64
    )
    assert tokens(pipe.generate([[1, 2, 3]], SAMPLED)) == tokens(pipes.pipe().generate([[1, 2, 3]], SAMPLED))
    with pytest.raises(InvalidRequest, match="max_batch=0"):
        SpeculativePipeline.from_pretrained("no such folder", max_batch=0)


@pytest.fixture
def no_target(monkeypatch):
    def load(*args, **options):
        raise AssertionError("the target was loaded")

    monkeypatch.setattr("pipeline.pipeline.load_target", load)


@pytest.mark.parametrize("draft", [True, False, 3, ["demo"], b"demo", NgramProposer])
def test_a_draft_of_another_kind_is_refused_before_the_target_is_loaded(no_target, draft):
    message = rf"^draft={re.escape(repr(draft))}, expected None .*, a Proposer .* also takes 'demo', .*a folder$"
    with pytest.raises(InvalidRequest, match=message):
        SpeculativePipeline.from_pretrained("demo", draft=draft)


@pytest.mark.parametrize(
    ("draft", "message"),
    [
        ("", "draft='', expected 'demo', 'demo-dflash', 'demo-dflash2', a folder or a hub name"),
        ("./nowhere", "no such folder; expected 'demo', 'demo-dflash', 'demo-dflash2', a folder or a hub name"),
        (ROOT / "tests", "config.json is missing"),
        (ROOT / "setup.cfg", "setup.cfg': a file, expected the folder of config.json and"),
        (pipes.target_folder, "architectures=['LlamaForCausalLM'], expected one of"),
    ],
)
def test_a_draft_that_is_not_there_is_refused_before_the_target_is_loaded(no_target, draft, message):
    draft = draft() if callable(draft) else draft
    with pytest.raises(CheckpointError, match=re.escape(message)):
        SpeculativePipeline.from_pretrained("demo", draft)


def test_a_name_is_no_draft_of_a_loaded_target():
    with pytest.raises(InvalidRequest, match=r"draft='demo', expected None .*from_pretrained also takes"):
        SpeculativePipeline(pipes.target(), "demo")


def test_empty_calls():
    assert pipes.pipe().generate([]) == []
    with pytest.warns(UserWarning, match="1 of 1 samples"):
        assert pipes.pipe().generate([[]])[0].error.startswith("prompt=[]")


def test_progress_bar(capsys):
    pipes.pipe().generate([[1, 2]] * 2, SamplingParams(max_new_tokens=2), progress=True)
    shown = capsys.readouterr().err
    assert "2/2" in shown
    assert "tokens/s" in shown


def test_every_token_is_what_its_seed_and_position_say():
    """An audit: each block again by the oracle, with coins of (seed, position) alone, from the logits of the block."""
    pipe = pipes.pipe(block_size=4, max_batch=3)
    pipe.stages["draft"] = pipes.PerfectDrafts()
    blocks, checked, accepted = [], 0, 0
    pipe.observe("verify", blocks.append)
    starts = {}

    def note(block):
        starts[id(block.proposal)] = [request.num_generated for request in block.proposal.requests]

    pipe.observe("prefill", note)
    pipe.observe("forward", note)
    params = [
        SamplingParams(temperature=0.8, top_k=40, top_p=0.95, max_new_tokens=15, seed=seed, ignore_eos=True)
        for seed in (3, 2**63 + 9, 4, 3)
    ]
    pipe.generate(PROMPTS[:4], params)
    for block in blocks:
        for b, request in enumerate(block.proposal.requests):
            start, number = starts[id(block.proposal)][b], int(block.proposal.num_drafts[b])
            coins = {
                purpose: [naive.uniform(request.seed, start + i, purpose) for i in range(number + 1)]
                for purpose in (gpu.ACCEPT, gpu.DRAW)
            }
            policies = [
                naive.policy(block.logits[b, i].astype(np.float64), np.float32(0.8), 40, np.float32(0.95))
                for i in range(number + 1)
            ]
            drafts = block.proposal.draft_tokens[b].tolist()
            expected = naive.verify(policies, drafts, number, coins[gpu.ACCEPT], coins[gpu.DRAW])
            if not expected.borderline:
                assert block.verdict.tokens[b, : len(expected.tokens)].tolist() == expected.tokens
                assert block.verdict.num_accepted[b] == expected.num_accepted
                checked += 1
                accepted += expected.num_accepted
    assert checked > 20
    assert accepted > 10


def test_the_draft_sees_what_a_fresh_one_would():
    """Every proposal of a busy batch (refills, moved slots, shared prefills, a failed row), from an empty cache."""

    def spoil(ids, scores):
        return scores * (np.nan if ids.shape[1] > 9 else 1.0)

    pipe = pipes.pipe(max_batch=3, proposal="argmax")
    target, draft = pipe.state.target, pipe.state.draft
    proposals = []

    def note(proposal):
        for request, tokens in zip(proposal.requests, proposal.draft_tokens, strict=True):
            proposals.append(([*request.prompt.token_ids.tolist(), *request.token_ids], tokens.tolist()))

    pipe.observe("draft", note)
    lengths = [3, 17, 5, 11, 4, 9, 2, 6]
    params = [SamplingParams(max_new_tokens=n, seed=n, ignore_eos=True) for n in lengths]
    params[1] = replace(params[1], n=3)
    params[3] = replace(params[3], logits_processors=[spoil])
    with pytest.warns(UserWarning, match="1 of 10 samples"):
        pipe.generate(PROMPTS, params)
    assert len(proposals) > 40
    for sequence, tokens in proposals:
        target.set_taps(draft.target_layer_ids)
        context = torch.tensor([sequence[:-1]])
        positions = torch.arange(context.shape[1])[None]
        features = target.forward(context, positions, target.new_cache(1, 128)).features
        cache = draft.new_cache(1, 128)
        draft.extend(features, positions, cache)
        logits = draft.logits(draft.hidden(torch.tensor([sequence[-1]]), torch.tensor([context.shape[1]]), cache))[0]
        best = logits.max(-1).values
        chosen = logits.gather(-1, torch.tensor(tokens, dtype=torch.int64)[:, None])[:, 0]
        assert (best - chosen < 1e-4).all()


@pytest.mark.parametrize("speculative", [False, True], ids=["ordinary", "dflash"])
def test_a_round_is_whole_or_has_not_happened(speculative):
    """An exception at every stage of every round, failing requests included: afterwards, the same rollouts."""

    def spoil(ids, scores):
        return scores * (np.nan if ids.shape[1] > 8 else 1.0)

    params = [replace(SAMPLED, max_new_tokens=n, return_sampling_mask=True) for n in (3, 9, 1, 5)]
    params[1] = replace(params[1], n=3)
    params[2] = replace(params[2], stop="ab", max_new_tokens=7)
    params[3] = replace(params[3], logits_processors=[spoil], max_new_tokens=9)

    def run(pipe):
        for prompt, policy in zip(PROMPTS, params, strict=False):
            pipe.submit(prompt, policy)
        found = []
        while pipe.has_work:
            try:
                found += pipe.step().rollouts
            except ZeroDivisionError:
                continue
        return sorted((r.prompt_index, r.sample_index, r.token_ids.tolist(), r.error, r.num_rounds) for r in found)

    expected = run(pipes.pipe(speculative, max_batch=2))
    assert len(expected) == 6
    broken = pipes.pipe(speculative, max_batch=2)
    raised = set()

    def trouble(stage):
        def observer(record):
            # Once for every stage of every round.
            state = broken.state
            key = (stage, len(state.waiting), tuple((r.seed, r.num_generated) for r in state.running))
            if key not in raised:
                raised.add(key)
                raise ZeroDivisionError

        return observer

    leaving = [broken.observe(stage, trouble(stage)) for stage in broken.stages]
    assert run(broken) == expected
    assert {stage for stage, *_ in raised} == set(broken.stages)
    assert broken.state.running == []
    alone = pipes.pipe(speculative).generate([PROMPTS[0]], SAMPLED)
    for leave in leaving:
        leave()
    assert tokens(broken.generate([PROMPTS[0]], SAMPLED)) == tokens(alone)


def test_a_stream_may_be_left_and_taken_up_again():
    pipe = pipes.pipe()
    tickets = [pipe.submit([1, 2, 3 + i], SamplingParams(max_new_tokens=1, seed=i)) for i in range(4)]
    first = next(pipe.stream())
    rest = list(pipe.stream())
    assert sorted(r.prompt_index for r in (first, *rest)) == tickets
    assert not pipe.has_work


def test_observers_may_leave_while_they_are_called():
    pipe = pipes.pipe()
    heard = []
    leave = pipe.observe("admit", lambda record: (heard.append("a"), leave()))
    pipe.observe("admit", lambda record: heard.append("b"))
    pipe.generate([[1, 2]], SamplingParams(max_new_tokens=1))
    assert heard == ["a", "b"]
    leave()


def test_nothing_is_kept_for_samples_that_are_through():
    pipe = pipes.pipe(max_batch=2)
    seen = []
    pipe.observe("prefill", lambda block: seen.extend(block.proposal.requests))
    pipe.generate([[1, 2, 3]], SamplingParams(n=5, max_new_tokens=4, seed=0, ignore_eos=True))
    assert len(seen) == 5
    assert all(request.prompt.prefix is None and not request.prompt.unstarted for request in seen)


def test_top_logprobs_are_computed_for_those_who_asked():
    pipe = pipes.pipe()
    seen = []
    pipe.observe("capture", seen.append)
    pipe.generate(PROMPTS[:3], [SAMPLED, replace(SAMPLED, top_logprobs=4), SAMPLED])
    for record in seen:
        asked = [request.params.top_logprobs > 0 for request in record.verified.proposal.requests]
        if not any(asked):
            assert record.top_start is None
            continue
        counts = np.diff(record.top_start)
        for request, count in zip(record.verified.proposal.requests, counts, strict=True):
            assert (count > 0) == (request.params.top_logprobs > 0)


def test_a_pipeline_inside_another_ones_processor():
    """Pipelines may share a target, also in the middle of each other's rounds."""
    inner = pipes.pipe(speculative=False)

    def ask(ids, scores):
        inner.generate([[4, 5]], SamplingParams(max_new_tokens=1, temperature=0))
        return scores

    params = replace(SAMPLED, max_new_tokens=4)
    plain = tokens(pipes.pipe().generate([[1, 2, 3]], params))
    assert tokens(pipes.pipe().generate([[1, 2, 3]], replace(params, logits_processors=[ask]))) == plain


def test_a_top_k_beyond_any_vocabulary():
    rollout = pipes.pipe().generate([[1, 2]], replace(SAMPLED, top_k=2**40))[0]
    unbounded = pipes.pipe().generate([[1, 2]], replace(SAMPLED, top_k=None))[0]
    assert rollout.token_ids.tolist() == unbounded.token_ids.tolist()


@pytest.mark.parametrize("engine", ["eager", "overlapped"])
def test_as_many_prompts_come_in_as_samples_end(engine, monkeypatch):
    """Beside a long output 90 short ones pass through 15 slots; a batch mustn't thin out when many end in a round."""
    pipe = pipes.pipe(False, max_batch=16, engine=engine)
    rounds, step = [], pipe._stepper.step
    monkeypatch.setattr(pipe._stepper, "step", lambda *arguments: rounds.append(step(*arguments)) or rounds[-1])
    params = [replace(SAMPLED, max_new_tokens=2 if i else 60) for i in range(91)]
    rollouts = pipe.generate([[i + 1, 2] for i in range(91)], params)
    assert [len(rollout.token_ids) for rollout in rollouts] == [60] + [2] * 90
    # One prompt a round would take more than 75 rounds.
    assert max(i for i, one in enumerate(rounds[:-1]) if one.ended) < 40

"""Time limits and cancellation, and where any combination of ends cuts; every record is cut at the same token."""

import contextlib
import functools
import threading

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from pipeline import InvalidRequest, SamplingParams
from pipeline.audit import audit
from tests import engines, pipes
from tests.strategies import fuzz
from tests.test_stopping import EOS, EOS_ID, TOKENIZER, ForcedDrafts, forced

RECORDED = {
    "top_k": 8,
    "seed": 3,
    "ignore_eos": True,
    "return_sampling_mask": True,
    "sampling_logprobs": "support",
    "top_logprobs": 3,
    "record": "audit",
}


def assert_cut_at(rollout, n):
    """n tokens, and n rows of everything that is recorded; the audit agrees."""
    assert_rows(rollout, n)
    assert audit(rollout).ok


def assert_rows(rollout, n):
    """n tokens, and n rows of everything that is recorded."""
    assert len(rollout.token_ids) == len(rollout.logprobs) == len(rollout.sampling_mask) == len(rollout.audit) == n
    assert rollout.sampling_mask.offsets[-1] == len(rollout.sampling_mask.token_ids)
    assert len(rollout.sampling_mask.token_ids) == len(rollout.sampling_mask.logprobs)
    assert rollout.top_logprobs.ids.shape == rollout.top_logprobs.values.shape == (n, 3)
    assert rollout.audit.offsets[-1] == len(rollout.audit.token_ids)


class Clock:
    """Moves on by a second whenever it is read, from 100."""

    def __init__(self):
        self.now = 100.0

    def __call__(self):
        self.now += 1
        return self.now


@pytest.mark.parametrize("speculative", [False, True])
def test_a_time_limit_ends_with_the_round_in_which_it_is_over(speculative):
    params = SamplingParams(**RECORDED, max_new_tokens=60)
    pipe = pipes.pipe(speculative)
    whole = pipe.generate([[1, 2, 3]], params)[0]
    pipe.state.clock = Clock()
    ended = pipe.generate([[1, 2, 3], [1, 2, 3]], [SamplingParams(**RECORDED, max_new_tokens=60, max_time=4.5), params])
    # Read at admission, then once a round of the prompt that has a limit: over at the fifth.
    n = int(whole.num_accepted[:5].sum()) + 5
    assert (ended[0].finish_reason, ended[0].num_rounds) == ("time", 5)
    assert_cut_at(ended[0], n)
    assert ended[0].token_ids.tolist() == whole.token_ids[:n].tolist()
    assert ended[0].text == pipe.state.target.tokenizer.decode(ended[0].token_ids.tolist(), skip_special_tokens=True)
    assert ended[1].finish_reason == "length"
    assert ended[1].token_ids.tolist() == whole.token_ids.tolist()


def test_a_time_limit_that_is_over_at_once_leaves_the_first_token():
    rollout = pipes.pipe().generate([[1, 2, 3]], SamplingParams(**RECORDED, max_time=1e-9))[0]
    assert rollout.finish_reason == "time"
    assert_cut_at(rollout, 1)


def test_an_end_in_the_last_round_has_its_own_reason():
    prompt, params = forced([65, EOS_ID], max_time=1e-9)
    pipe = pipes.pipe()
    assert pipe.generate([prompt], params)[0].finish_reason == "time"
    pipe.state.clock = lambda: 0.0
    assert pipe.generate([prompt], params)[0].finish_reason == "eos"
    pipe.state.clock = Clock()
    _, params = forced([EOS_ID], max_time=1e-9)
    assert pipe.generate([prompt], params)[0].finish_reason == "eos"


@pytest.mark.parametrize("value", [0, -1, float("inf"), float("nan"), "1", True])
def test_time_limits_out_of_range(value):
    with pytest.raises(InvalidRequest) as refused:
        SamplingParams(max_time=value)
    assert (
        str(refused.value) == f"max_time={value!r}, expected a finite number of seconds above 0, or None for no limit"
    )


@pytest.mark.parametrize("speculative", [False, True])
def test_cancelled_between_rounds(speculative):
    pipe = pipes.pipe(speculative, max_batch=3)
    params = SamplingParams(**RECORDED, max_new_tokens=30)
    whole = pipe.generate([[1, 2, 3]], params)[0]
    kept, gone, late = (pipe.submit([1, 2, 3], p) for p in (params, SamplingParams(**RECORDED, n=2), params))
    for _ in range(3):
        pipe.step()
    pipe.cancel(gone)
    pipe.cancel(late)  # it waits: max_batch is 3
    found = list(pipe.stream())
    assert not pipe.has_work
    by_ticket = {ticket: [r for r in found if r.prompt_index == ticket] for ticket in (kept, gone, late)}
    assert by_ticket[kept][0].token_ids.tolist() == whole.token_ids.tolist()
    assert [r.finish_reason for r in by_ticket[gone]] == ["cancelled"] * 2
    for rollout in by_ticket[gone]:
        assert rollout.ok
        assert rollout.num_rounds == 4  # the prefill's and three
        assert_cut_at(rollout, int(rollout.num_accepted.sum()) + 4)
    [waited] = by_ticket[late]
    assert (waited.finish_reason, waited.error) == ("abort", "cancelled before its first token")
    assert len(waited.token_ids) == 0


def test_cancelled_from_an_observer_in_a_running_generate():
    """It ends before the next round; its neighbours and the pipeline go on."""
    pipe = pipes.pipe()
    params = SamplingParams(**RECORDED, max_new_tokens=30)
    whole = pipe.generate([[1, 2, 3], [4, 5]], params)

    def see(finished):
        for request in pipe.state.running:
            if request.prompt.index == 1 and request.num_generated > 4:
                pipe.cancel(request.prompt.ticket)

    leave = pipe.observe("finish", see)
    rollouts = pipe.generate([[1, 2, 3], [4, 5]], params)
    leave()
    assert [r.finish_reason for r in rollouts] == ["length", "cancelled"]
    assert rollouts[0].token_ids.tolist() == whole[0].token_ids.tolist()
    n = len(rollouts[1].token_ids)
    assert 4 < n < 30
    assert rollouts[1].token_ids.tolist() == whole[1].token_ids[:n].tolist()
    assert_cut_at(rollouts[1], n)
    assert pipe.generate([[4, 5]], params)[0].token_ids.tolist() == whole[1].token_ids.tolist()


def test_cancelled_from_another_thread():
    pipe = pipes.pipe(max_length=1000)
    ticket = pipe.submit([1, 2, 3], SamplingParams(**RECORDED, max_new_tokens=900))
    pipe.step()
    other = threading.Thread(target=pipe.cancel, args=(ticket,))
    other.start()
    rollouts = list(pipe.stream())
    other.join()
    rollouts += pipe.stream()
    assert [r.finish_reason for r in rollouts] in (["cancelled"], ["length"])


def test_a_round_that_failed_keeps_what_was_cancelled():
    pipe = pipes.pipe()
    tickets = [pipe.submit([1, 2, 3], SamplingParams(**RECORDED)) for _ in range(2)]
    pipe.step()
    pipe.cancel(tickets[0])
    leave = pipe.observe("verify", lambda record: 1 / 0)
    with pytest.raises(ZeroDivisionError):
        pipe.step()
    leave()
    assert [r.prompt_index for r in pipe.step().rollouts] == tickets[:1]


def test_tickets_that_were_never_given():
    pipe = pipes.pipe()
    ticket = pipe.submit([1], SamplingParams(max_new_tokens=1))
    list(pipe.stream())
    pipe.cancel(ticket)  # ended already
    assert list(pipe.stream()) == []
    for value in (ticket + 1, -1, "0", True, None):
        with pytest.raises(InvalidRequest, match=f"ticket={value!r}, expected one that submit returned"):
            pipe.cancel(value)


@functools.cache
def alone(i, params):
    return pipes.pipe().generate([[1 + i, 2, 3]], params)


@fuzz
@given(
    requests=st.lists(st.tuples(st.integers(1, 2), st.sampled_from([1, 3, 8, 12])), min_size=1, max_size=4),
    actions=st.lists(st.one_of(st.just("step"), st.just("fail"), st.integers(0, 3)), max_size=8),
)
def test_any_cancellations_leave_prefixes_and_disturb_nobody(requests, actions):
    """Every sample comes out once, as it would have alone or as the beginning of that."""
    pipe = pipes.pipe(max_batch=3)
    params = [SamplingParams(**RECORDED, n=n, max_new_tokens=length) for n, length in requests]
    whole = [alone(i, each) for i, each in enumerate(params)]
    tickets = [pipe.submit([1 + i, 2, 3], each) for i, each in enumerate(params)]
    cancelled, found = set(), []
    for action in actions:
        if action == "step":
            found += pipe.step().rollouts
        elif action == "fail":
            leave = pipe.observe("capture", lambda record: 1 / 0)
            with contextlib.suppress(ZeroDivisionError):
                found += pipe.step().rollouts
            leave()
        elif action < len(tickets):
            pipe.cancel(tickets[action])
            cancelled.add(tickets[action])
    found += pipe.stream()
    assert not pipe.has_work
    for i, (ticket, each) in enumerate(zip(tickets, params, strict=True)):
        ours = sorted((r for r in found if r.prompt_index == ticket), key=lambda r: r.sample_index)
        assert [r.sample_index for r in ours] == list(range(each.n))
        for rollout, full in zip(ours, whole[i], strict=True):
            n = len(rollout.token_ids)
            assert rollout.token_ids.tolist() == full.token_ids[:n].tolist()
            if rollout.finish_reason == "length":
                assert n == each.max_new_tokens
            else:
                assert ticket in cancelled
                assert rollout.finish_reason == ("cancelled" if n else "abort")
            if n:
                assert_rows(rollout, n)
    assert len(found) == sum(each.n for each in params)


def first_end(text_ids, params):
    """Where the output ends by the definitions, one prefix at a time: (reason, number of tokens, text or None)."""
    for n in range(1, len(text_ids) + 1):
        if text_ids[n - 1] in params.stop_token_ids:
            return "stop", n, None
        if text_ids[n - 1] in EOS and not params.ignore_eos:
            return "eos", n, None
        text = bytes(t for t in text_ids[:n] if t < 256).decode()
        before = bytes(t for t in text_ids[: n - 1] if t < 256).decode()
        if n >= params.min_new_tokens:
            # A match that ends with this token; one that ended before is passed over.
            found = [text.find(s, max(0, len(before) - len(s) + 1)) for s in params.stop]
            found = [at for at in found if at >= 0]
            if found:
                return "stop", n, text[: min(found)]
        if n == params.max_new_tokens:
            return "length", n, None
    raise AssertionError("unreachable")


BYTE = {letter: TOKENIZER.encode(letter, add_special_tokens=False)[0] for letter in "abc"}


@fuzz
@given(
    letters=st.lists(st.sampled_from(["a", "b", "c", "end"]), min_size=12, max_size=12),
    stop=st.lists(st.text("abc", min_size=1, max_size=3), max_size=2),
    stop_token=st.sampled_from([None, "c"]),
    min_new_tokens=st.integers(0, 6),
    max_new_tokens=st.integers(6, 12),
    ignore_eos=st.booleans(),
    good=st.booleans(),
)
def test_any_ends_cut_where_the_definitions_say(
    letters, stop, stop_token, min_new_tokens, max_new_tokens, ignore_eos, good
):
    ids = [EOS_ID if letter == "end" else BYTE[letter] for letter in letters]
    values = {
        "stop": stop,
        "stop_token_ids": [] if stop_token is None else [BYTE[stop_token]],
        "min_new_tokens": min_new_tokens,
        "max_new_tokens": max_new_tokens,
        "ignore_eos": ignore_eos,
    }
    ending = set(values["stop_token_ids"]) | (set() if ignore_eos else EOS)
    # A token that may not come yet can't be forced: the policy forbids it.
    ids = [BYTE["a"] if i < min_new_tokens and token in ending else token for i, token in enumerate(ids)]
    if min_new_tokens and BYTE["a"] in ending:
        return
    pipe = pipes.pipe(max_length=32, block_size=6)
    if good:
        pipe.stages["draft"] = ForcedDrafts(ids)
    prompt, params = forced(ids, **values)
    rollout = pipe.generate([prompt], params)[0]
    letter_of = {token: letter for letter, token in BYTE.items()}
    as_bytes = [ord(letter_of[token]) if token in letter_of else token for token in ids]
    spelled = SamplingParams(**(values | {"stop_token_ids": [ord("c")] if stop_token else []}))
    reason, n, text = first_end(as_bytes, spelled)
    assert (rollout.finish_reason, len(rollout.token_ids)) == (reason, n)
    assert rollout.token_ids.tolist() == ids[:n]
    assert text is None or rollout.text == text
    assert len(rollout.sampling_mask) == len(rollout.logprobs) == len(rollout.top_logprobs.ids) == n
    assert np.isfinite(rollout.logprobs).all()


@pytest.mark.parametrize("kind", ["ordinary", "dflash", "dspark vanilla", "ngram"])
def test_stop_strings_cut_audits_too(kind):
    """On every path, behind `min_new_tokens`, with the audit's own derivation of what is left."""
    params = SamplingParams(
        n=30, stop=["ab", "cc"], min_new_tokens=4, max_new_tokens=24, logit_bias=dict.fromkeys(BYTE.values(), 8.0),
        **RECORDED,
    )  # fmt: skip
    rollouts = engines.pipe(kind, "eager", max_batch=8).generate([[5, 6, 7], [9, 8]], params)
    for rollout in rollouts:
        n = len(rollout.token_ids)
        assert_cut_at(rollout, n)
        assert n >= 4
        whole = TOKENIZER.decode(rollout.token_ids)
        assert (rollout.finish_reason == "stop") == whole.endswith(("ab", "cc"))
        if rollout.finish_reason == "stop":
            assert rollout.text == whole[:-2]
    assert sum(rollout.finish_reason == "stop" for rollout in rollouts) > 20
    if kind == "ngram":  # random drafts know nothing of the bias
        assert sum(rollout.num_accepted.sum() for rollout in rollouts) > 10

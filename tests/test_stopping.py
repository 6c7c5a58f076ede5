"""Ends: EOS, stop tokens, stop strings anywhere in a block, limits; everything is cut at the same place."""

import numpy as np
import pytest

from pipeline import SamplingParams
from pipeline.batch.stopping import StopScanner
from tests import pipes

TOKENIZER = pipes.target().tokenizer  # byte-level: a token a byte
EOS = pipes.target().eos_token_ids


def scan(text, **values):
    scanner = StopScanner(SamplingParams(**values), EOS, TOKENIZER)
    for count, token in enumerate(TOKENIZER.encode(text, add_special_tokens=False), 1):
        if reason := scanner.push(token):
            return reason, count, scanner.cut_text
    return None, count, scanner.cut_text


@pytest.mark.parametrize(
    ("text", "stop", "ends"),
    [
        ("abcdef", "cd", ("stop", 4, "ab")),
        ("abcdef", ["ef", "cd"], ("stop", 4, "ab")),
        ("aaab", "aab", ("stop", 4, "a")),
        ("abcdef", "x", (None, 6, None)),
        ("abc", "abc", ("stop", 3, "")),
        ("naïve ☃ yes", "☃", ("stop", 10, "naïve ")),
        ("one\n\ntwo", "\n\n", ("stop", 5, "one")),
        ("abc", ["bc", "abc"], ("stop", 3, "")),
    ],
)
def test_stop_strings_span_tokens(text, stop, ends):
    assert scan(text, stop=stop) == ends


def test_min_new_tokens_looks_past_early_stops():
    assert scan("ab ab ab", stop="ab", min_new_tokens=3) == ("stop", 5, "ab ")
    assert scan("abab", stop="ab", min_new_tokens=2) == ("stop", 2, "")
    for others in ([], ["xxxxxxxxxx"]):
        assert scan("abcdefg", stop=["b", *others], min_new_tokens=4) == (None, 7, None)


def test_restarting_goes_through_the_tokens_again():
    params = SamplingParams(stop="cde")
    tokens = TOKENIZER.encode("abcd", add_special_tokens=False)
    scanner, again = StopScanner(params, EOS, TOKENIZER), StopScanner(params, EOS, TOKENIZER)
    for token in tokens:
        scanner.push(token)
        again.push(token)
    again.push(5)
    again.restart(tokens)
    end = TOKENIZER.encode("e", add_special_tokens=False)[0]
    assert scanner.push(end) == again.push(end) == "stop"
    assert scanner.cut_text == again.cut_text == "ab"


def forced(text, **values):
    """A request whose policy is all but fixed to `text`, by a processor that looks at its own prefix."""
    ids = TOKENIZER.encode(text, add_special_tokens=False) if isinstance(text, str) else text
    prompt = [5, 6, 7]

    def process(input_ids, scores):
        at = input_ids.shape[1] - len(prompt)
        scores[:, ids[min(at, len(ids) - 1)]] += 1000.0
        return scores

    params = SamplingParams(
        logits_processors=[process], top_k=4, return_sampling_mask=True, top_logprobs=2, seed=3, **values
    )
    return prompt, params


def aligned(rollout):
    n = len(rollout.token_ids)
    assert len(rollout.logprobs) == n
    assert len(rollout.sampling_mask) == n
    assert len(rollout.sampling_mask.logprobs) == n
    assert rollout.sampling_mask.offsets[-1] == len(rollout.sampling_mask.token_ids)
    assert rollout.top_logprobs.ids.shape == rollout.top_logprobs.values.shape == (n, 2)
    for token, row in zip(rollout.token_ids, rollout.sampling_mask, strict=True):
        assert token in row
    return n


EOS_ID = min(EOS)
ENDS = {
    "eos": (([65, 66, EOS_ID, 67], {}), "eos", 3),
    "eos at once": (([EOS_ID], {}), "eos", 1),
    "stop token": (([65, 66, 70, 67], {"stop_token_ids": [70]}), "stop", 3),
    "stop token that is eos": (([65, EOS_ID], {"stop_token_ids": [EOS_ID]}), "stop", 2),
    "stop string": (("abcdefgh", {"stop": "de"}), "stop", 5),
    "length": (("abcdefgh", {"max_new_tokens": 6}), "length", 6),
    "length of one": (("abcdefgh", {"max_new_tokens": 1}), "length", 1),
    "ignored eos": (([65, EOS_ID, 66, 67], {"ignore_eos": True, "max_new_tokens": 4}), "length", 4),
    "max_length": (("abc", {"max_new_tokens": 100}), "length", 29),
}


@pytest.mark.parametrize("perfect", [False, True], ids=["bad draft", "good draft"])
@pytest.mark.parametrize("end", ENDS)
def test_every_end_cuts_everything_at_the_same_place(end, perfect):
    (text, values), reason, length = ENDS[end]
    pipe = pipes.pipe(max_length=32, block_size=8)
    if perfect:
        pipe.stages["draft"] = ForcedDrafts(text)
    prompt, params = forced(text, **values)
    rollout = pipe.generate([prompt], params)[0]
    assert (rollout.finish_reason, aligned(rollout)) == (reason, length)
    if perfect and length > 2:
        assert rollout.num_accepted.max() > 0
    if end == "stop string":
        assert rollout.text == "abc"


class ForcedDrafts:
    """Drafts that follow the forced text, so whole blocks are accepted."""

    def __init__(self, text):
        self.ids = TOKENIZER.encode(text, add_special_tokens=False) if isinstance(text, str) else text

    def __call__(self, state):
        from pipeline.stages import Draft

        proposal = Draft()(state)
        tokens = np.array(proposal.draft_tokens)
        for row, request in zip(tokens, proposal.requests, strict=True):
            for i in range(len(row)):
                row[i] = self.ids[min(request.num_generated + i, len(self.ids) - 1)]
        return type(proposal)(proposal.requests, tokens, proposal.num_drafts)


def test_no_ending_before_min_new_tokens():
    """EOS has nearly all of the mass, yet neither it nor a stop token comes too early, in any row of a block.

    The drafts are the argmax of what is left, so that the minimum falls into the middle of an accepted block.
    """
    for speculative in (False, True):
        pipe = pipes.pipe(speculative)
        if speculative:
            pipe.stages["draft"] = pipes.PerfectDrafts()
        params = SamplingParams(
            temperature=0.01,
            logit_bias={EOS_ID: 50.0, 70: 49.0},
            stop_token_ids=[70],
            min_new_tokens=7,
            top_k=5,
            return_sampling_mask=True,
            seed=0,
        )
        rollout = pipe.generate([[1, 2, 3]], params)[0]
        assert len(rollout.token_ids) == 8
        assert rollout.token_ids[-1] == EOS_ID
        for i, row in enumerate(rollout.sampling_mask):
            assert (EOS_ID in row or 70 in row) == (i >= 7)
        if speculative:
            assert rollout.num_accepted.tolist() == [0, 3, 2]


AFTER_THE_END = {
    "a wide row": lambda scores: scores.zero_(),
    "NaN": lambda scores: scores.fill_(np.nan),
    "an exception": lambda scores: 1 / 0,
}


@pytest.mark.parametrize("after", AFTER_THE_END)
def test_what_lies_beyond_the_end_refuses_nothing(after):
    """A block is accepted past EOS; whether its later rows overflow, are NaN or raise must not matter."""
    ids = [10, 11, 12, EOS_ID, 13, 13, 13, 13]

    def process(input_ids, scores):
        at = input_ids.shape[1] - 3
        if at > 3:
            return AFTER_THE_END[after](scores)
        scores[:, ids[at]] += 1000.0
        return scores

    params = SamplingParams(
        logits_processors=[process], top_p=0.9, max_new_tokens=8, seed=0, return_sampling_mask=True, top_logprobs=2
    )
    options = {"max_support": 8, "allow_unbounded_support": True}
    speculative = pipes.pipe(block_size=8, **options)
    speculative.stages["draft"] = ForcedDrafts(ids)
    for pipe in (pipes.pipe(speculative=False, **options), speculative):
        rollout = pipe.generate([[5, 6, 7]], params)[0]
        assert (rollout.error, rollout.finish_reason) == (None, "eos")
        assert rollout.token_ids.tolist() == ids[:4]
        assert aligned(rollout) == 4


def test_an_overflow_inside_the_output_is_refused_wherever_its_row_lies():
    ids = [10, 11, 12, 13, EOS_ID]

    def process(input_ids, scores):
        at = input_ids.shape[1] - 3
        if at == 2:
            return scores.zero_()
        scores[:, ids[min(at, 4)]] += 1000.0
        return scores

    params = SamplingParams(logits_processors=[process], top_p=0.9, seed=0, return_sampling_mask=True)
    options = {"max_support": 8, "allow_unbounded_support": True}
    speculative = pipes.pipe(block_size=8, **options)
    speculative.stages["draft"] = ForcedDrafts(ids)
    for pipe in (pipes.pipe(speculative=False, **options), speculative):
        with pytest.warns(UserWarning, match="1 of 1 samples"):
            rollout = pipe.generate([[5, 6, 7]], params)[0]
        assert rollout.error.startswith("OVERFLOW: support=320, expected at most max_support=8")
        assert len(rollout.token_ids) == 0


def test_a_processor_that_refuses_a_forbidden_draft_costs_nothing():
    """It bans odd ids and raises if it ever sees one: a draft may be odd, but no odd token is ever committed."""

    def even_only(input_ids, scores):
        if any(token % 2 for token in input_ids[0, 3:].tolist()):
            raise RuntimeError("an odd token")
        scores[:, 1::2] = -np.inf
        return scores

    params = SamplingParams(logits_processors=[even_only], max_new_tokens=12, seed=0, ignore_eos=True)
    odd = pipes.pipe(block_size=8)
    odd.stages["draft"] = ForcedDrafts([161])
    for pipe in (pipes.pipe(speculative=False), pipes.pipe(), odd):
        rollout = pipe.generate([[5, 6, 7]], params)[0]
        assert rollout.error is None
        assert (rollout.token_ids % 2 == 0).all()
        assert len(rollout.token_ids) == 12

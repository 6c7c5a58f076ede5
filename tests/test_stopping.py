"""Ends: EOS, stop tokens, stop strings anywhere in a block, limits; everything is cut at the same place."""

import numpy as np
import pytest

from pipeline import SamplingParams
from pipeline.stopping import StopScanner
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
    ],
)
def test_stop_strings_span_tokens(text, stop, ends):
    assert scan(text, stop=stop) == ends


def test_min_new_tokens_looks_past_early_stops():
    assert scan("ab ab ab", stop="ab", min_new_tokens=3) == ("stop", 5, "ab ")
    assert scan("abab", stop="ab", min_new_tokens=2) == ("stop", 2, "")


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
    """EOS has nearly all of the mass, yet neither it nor a stop token comes too early, in any row of a block."""
    for speculative in (False, True):
        pipe = pipes.pipe(speculative)
        params = SamplingParams(
            logit_bias={EOS_ID: 50.0, 70: 49.0},
            stop_token_ids=[70],
            min_new_tokens=7,
            top_k=5,
            return_sampling_mask=True,
            seed=0,
        )
        rollout = pipe.generate([[1, 2, 3]], params)[0]
        assert len(rollout.token_ids) == 8
        for i, row in enumerate(rollout.sampling_mask):
            assert (EOS_ID in row or 70 in row) == (i >= 7)

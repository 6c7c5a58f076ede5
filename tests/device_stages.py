"""Stages 5 to 7 of a block whose logits are on a device, against the same block on the host, bit for bit."""

import dataclasses
from types import SimpleNamespace

import numpy as np
import torch

import gpu
from gpu.arrays import on_device
from pipeline import SamplingParams
from pipeline.batch.held import held
from pipeline.batch.records import Block, Proposal
from pipeline.policy.policies import row_policies
from pipeline.stages import Adjust, Capture, Verify
from tests.backends import assert_same, same_bits

WIDTH = 3
ENDINGS = frozenset({2, 11})


def doubled(ids, scores):
    return scores * (2.0 if ids[0, -1] % 2 else 0.5)


def broken(ids, scores):
    raise KeyError("no such row")


class EvenOnly:
    """A grammar in a walk's place: even tokens only, and in its third row nothing."""

    def __init__(self, vocabulary):
        self.words = -(-vocabulary // 32)

    def masks(self, drafts, num_early, banned):
        made = np.full((len(drafts) + 1, self.words), 0x55555555, np.int32)
        made[2:] = 0
        return made


POLICIES = {
    "plain": [{}, {}, {"temperature": 0.0}],
    "recorded": [{"return_sampling_mask": True}, {}, {"temperature": 0.0}],
    "all of it": [
        {"return_sampling_mask": True, "record": "audit", "top_logprobs": 3},
        {"repetition_penalty": 1.3, "presence_penalty": 0.2, "frequency_penalty": -0.1, "record": "audit"},
        {"logit_bias": {3: 1.5, 7: -np.inf}, "min_new_tokens": 4, "return_sampling_mask": True},
        {"logits_processors": [doubled], "top_logprobs": 5},
        {"logits_processors": [broken], "return_sampling_mask": True},
        {"grammar": {"regex": "any"}, "min_new_tokens": 3, "return_sampling_mask": True},
    ],
    "grammars alone": [{"grammar": {"regex": "x"}, "return_sampling_mask": True}, {"min_new_tokens": 9}],
    "a wide support": [{"top_k": None, "top_p": 1.0, "return_sampling_mask": True}, {"return_sampling_mask": True}],
}  # fmt: skip


def a_request(b, rng, vocabulary, changes):
    params = SamplingParams(**{"temperature": 1.2, "top_k": 9, "top_p": 0.9, "max_new_tokens": 50} | changes)
    output = rng.integers(0, vocabulary, b).tolist()
    return SimpleNamespace(
        params=params,
        prompt=SimpleNamespace(token_ids=rng.integers(0, vocabulary, 5).astype(np.int32)),
        token_ids=output,
        num_generated=len(output),
        num_accepted=[0] * b,
        seed=100 + b,
        scanner=SimpleNamespace(ending_ids=ENDINGS),
        grammar=None if params.grammar is None else EvenOnly(vocabulary),
    )


def a_block(policy, dtype, drawn, vocabulary, seed=0, most_top=0):
    """A block on the host, its proposal drawn from laws (True: dense ones; "by logits") or chosen."""
    rng = np.random.default_rng(seed)
    each = list(POLICIES[policy])
    batch = len(each)
    if most_top:
        each[1] = each[1] | {"top_logprobs": most_top}
    requests = [a_request(b, rng, vocabulary, changes) for b, changes in enumerate(each)]
    drafts = rng.integers(0, vocabulary, (batch, WIDTH - 1)).astype(np.int32)
    num_drafts = rng.integers(0, WIDTH, batch).astype(np.int32)
    num_drafts[:2] = WIDTH - 1
    laws = None
    if drawn == "by logits":
        of_draft = rng.normal(size=(batch, WIDTH - 1, vocabulary)).astype(np.float32) * 3
        policy = row_policies([request.params for request in requests], WIDTH - 1, vocabulary, of_draft)
        index = np.zeros((batch, WIDTH - 1), np.int64)
        laws = gpu.LogitsLaw.of(of_draft, gpu.draw_drafts(of_draft, *policy, rng.random(index.shape), index))
        drafts = index.astype(np.int32)
    elif drawn:
        laws = rng.random((batch, WIDTH - 1, vocabulary)).astype(np.float32)
        laws /= laws.sum(2, keepdims=True)
    logits = torch.from_numpy(rng.normal(size=(batch, WIDTH, vocabulary)).astype(np.float32) * 3).to(dtype)
    for b, i in np.argwhere(rng.random((batch, WIDTH - 1)) < 0.7):  # so that many are kept
        logits[b, i, drafts[b, i]] = 9.0
    return Block(Proposal(requests, drafts, num_drafts, laws), logits)


def a_state():
    """What the stages read of a pipeline's."""
    options = SimpleNamespace(filter_order="top_k_first", max_support=40)
    return SimpleNamespace(options=options, threshold_single=1.0, threshold_acc=1.0)


def settle(block):
    """The records of the three stages."""
    state = a_state()
    adjusted = Adjust()(state, block)
    verified = Verify()(state, adjusted)
    return adjusted, verified, Capture()(state, verified)


def check(move, policy, dtype=torch.float32, drawn=False, vocabulary=97, most_top=0):
    """`move` gives a block whose logits, and laws, the stages take for a device's."""
    block = a_block(policy, dtype, drawn, vocabulary, most_top=most_top)
    before = block.logits.clone()
    want, got = settle(block), settle(move(block))
    assert torch.equal(block.logits, before)
    for one in (held(got[0], "logits"), held(got[1], "support").status):
        assert on_device(one)
    adjusted, verified, captured = got
    assert adjusted.failures == want[0].failures
    assert same_bits(adjusted.logits, want[0].logits).all()
    assert adjusted.logits.dtype == want[0].logits.dtype
    assert not adjusted.logits.flags.writeable
    assert_same(verified.verdict, want[1].verdict)
    assert_same(verified.support, want[1].support)
    assert verified.support.walk is None
    assert (captured.capture is None) == (want[2].capture is None)
    if captured.capture is not None:
        assert_same(captured.capture, want[2].capture)
    for name in ("top_ids", "top_values", "top_start"):
        assert np.array_equal(getattr(captured, name), getattr(want[2], name)), name
    assert (captured.audits is None) == (want[2].audits is None)
    for ours, theirs in zip(captured.audits or (), want[2].audits or (), strict=True):
        assert (ours is None) == (theirs is None)
        for field in dataclasses.fields(ours) if ours is not None else ():
            a, b = getattr(ours, field.name), getattr(theirs, field.name)
            assert a.dtype == b.dtype
            assert same_bits(a, b).all(), field.name
    return captured

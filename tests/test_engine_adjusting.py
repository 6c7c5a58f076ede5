"""Penalties, biases and bans on the device against the adjust stage, bit for bit, through rounds that commit."""

from types import SimpleNamespace

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

import gpu
from pipeline import SamplingParams
from pipeline.arrays import array_of
from pipeline.batch.records import Block, Proposal
from pipeline.engine.adjusting import Adjusting
from pipeline.stages import Adjust
from tests import device_adjust

VOCABULARY = 23


def a_request(rng, output):
    params = SamplingParams(
        repetition_penalty=rng.choice([1.0, 1.3, 0.7]),
        presence_penalty=rng.choice([0.0, 0.4]),
        frequency_penalty=rng.choice([0.0, 0.3, -0.2]),
        logit_bias=None if rng.random() < 0.5 else {3: 1.5, 7: -np.inf},
        min_new_tokens=int(rng.choice([0, 4, 9])),
        max_new_tokens=50,
    )
    return SimpleNamespace(
        params=params,
        prompt=SimpleNamespace(token_ids=rng.integers(0, VOCABULARY, 5).astype(np.int32)),
        token_ids=list(output),
        num_generated=len(output),
        scanner=SimpleNamespace(ending_ids=frozenset({2, 11})),
        grammar=None,
    )


def rounds_are_the_stages(seed, batch, width, device):
    rng = np.random.default_rng(seed)
    own = Adjusting(batch + 1, VOCABULARY, torch.device(device))
    requests = [a_request(rng, rng.integers(0, VOCABULARY, rng.integers(0, 6)).tolist()) for _ in range(batch)]
    own.write(dict(enumerate([*requests[1:], requests[0]])))  # some slots have been somebody else's
    own.write({0: None})
    own.write(dict(enumerate(requests)))
    own.move(0, batch)
    own.move(batch, 0)
    for _ in range(3):
        logits = torch.from_numpy(rng.normal(size=(batch, width, VOCABULARY)).astype(np.float32)).bfloat16()
        drafts = rng.integers(0, 6, (batch, width - 1)).astype(np.int32)  # few tokens: they repeat
        num_drafts = rng.integers(0, width, batch).astype(np.int32)
        proposal = Proposal(requests, drafts, num_drafts)
        want = Adjust()(None, Block(proposal, logits)).logits
        generated = torch.tensor([request.num_generated for request in requests])
        arguments = logits, torch.from_numpy(drafts), torch.from_numpy(num_drafts), generated
        got = own.apply(*(tensor.to(device) for tensor in arguments)).cpu().numpy()
        if want.dtype == np.uint16:  # nobody adjusts
            want = torch.from_numpy(want).view(torch.bfloat16).float().numpy()
        for b in range(batch):
            rows = slice(0, num_drafts[b] + 1)
            np.testing.assert_array_equal(got[b, rows], want[b, rows])
            np.testing.assert_array_equal(got[b, num_drafts[b] + 1 :], logits[b, num_drafts[b] + 1 :].float().numpy())
        verdict, phases = device_adjust.a_verdict(rng, batch, width, VOCABULARY)
        tensors = {
            name: torch.from_numpy(value).to(device) for name, value in vars(verdict).items() if name != "bounds"
        }
        held = gpu.Verdict(**{name: array_of(tensor) for name, tensor in tensors.items()})
        own.count(held, torch.from_numpy(phases).to(device), gpu.DECODING)
        for b in np.flatnonzero(phases == gpu.DECODING):
            committed = verdict.tokens[b, : verdict.num_committed[b]].tolist()
            requests[b].token_ids += [token for token in committed if 0 <= token < VOCABULARY]
            requests[b].num_generated = len(requests[b].token_ids)


SIZES = {"seed": st.integers(0, 2**32), "batch": st.integers(1, 4), "width": st.integers(1, 5)}


@settings(deadline=None, max_examples=40)
@given(**SIZES)
def test_rows_are_the_stages(seed, batch, width):
    rounds_are_the_stages(seed, batch, width, "cpu")


@pytest.mark.gpu
@settings(deadline=None, max_examples=40)
@given(**SIZES)
def test_rows_are_the_stages_on_a_device(seed, batch, width):
    stream = torch.cuda.Stream()
    with torch.cuda.stream(stream), gpu.on_stream(stream.cuda_stream):
        rounds_are_the_stages(seed, batch, width, "cuda")

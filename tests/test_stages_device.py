"""Eager rounds on a CUDA device sample where the logits are: stage by stage the host's numbers, bit for bit."""

from dataclasses import replace

import pytest
import torch

from pipeline.arrays import torchs_stream
from pipeline.batch.held import held
from tests import device_stages
from tests.backends import DEVICE

pytestmark = pytest.mark.gpu
DTYPES = [torch.float32, torch.bfloat16, torch.float16]


def move(block):
    law = DEVICE.to_device(held(block.proposal, "draft_probs"))
    return replace(block, proposal=replace(block.proposal, draft_probs=law), logits=block.logits.cuda())


@pytest.mark.parametrize("drawn", [False, True, "by logits"], ids=["chosen", "drawn", "by logits"])
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("policy", device_stages.POLICIES)
def test_stages_are_the_hosts(policy, dtype, drawn):
    with torchs_stream(torch.device("cuda")):
        device_stages.check(move, policy, dtype, drawn, vocabulary=5003)


def test_another_stream_and_more_top_logprobs_than_a_device_gives():
    with torch.cuda.stream(torch.cuda.Stream()), torchs_stream(torch.device("cuda")):
        captured = device_stages.check(move, "recorded", torch.bfloat16, vocabulary=5003, most_top=1500)
    assert captured.top_ids.shape[1] == 1500


def test_a_host_stage_in_a_devices_block():
    """Logits that somebody put on the host are sampled there."""
    with torchs_stream(torch.device("cuda")):
        block = device_stages.a_block("recorded", torch.float32, "by logits", 97)
        _, _, want = device_stages.settle(block)
        moved, _, _ = device_stages.settle(move(block))
        adjusted = replace(moved, logits=moved.logits.copy())
        state = device_stages.a_state()
        verified = device_stages.Verify()(state, adjusted)
        got = device_stages.Capture()(state, verified)
    assert isinstance(held(verified, "support").status, type(want.capture.status))
    device_stages.assert_same(got.capture, want.capture)
